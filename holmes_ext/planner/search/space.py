"""Search space: every shape (parallel sizes, micro-batch, recomputation, ZeRO stage) of a job on a site.

A shape must divide its job: in each row, the left number must be a multiple of the right number.

    ranks                 tensor x context x pipeline
    global batch          micro-batch x data
    attention heads       tensor
    sequence              2 x context (with at least MIN_TOKENS tokens on a rank)
    layers                pipeline x virtual, if virtual > 1
    micro-batches         pipeline, if virtual > 1 (Megatron's rule)
    experts               expert
    data x context        expert

Groups of ranks fill nodes evenly. ZeRO 2 and 3 need a single pipeline stage (DeepSpeed's rule), and
the engine must accept the ZeRO stage for the model. The user can limit the values of each size
(--limit).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import RECOMPUTE, Mode, Model, accepts
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.reductions import ZERO_WEIGHTS
from holmes_ext.plan.engine import REDUCTIONS
from holmes_ext.plan.shape import Shape
from holmes_ext.plan.sizes import DEFAULT_ORDER, PIPELINES_FIRST, divisors
from holmes_ext.words import did_you_mean, named_values

T = TypeVar("T")
_BETWEEN_LIMITS = re.compile(r",(?=[^,=]*=)")  # a comma before NAME=
#: Names of limits on values; "memory" is a limit too.
NAMES = (
    "tensor",
    "pipeline",
    "data",
    "context",
    "expert",
    "virtual",
    "micro_batch",
    "recompute",
    "zero",
    "replicas",
    "reduction",
    "clusters",
    "order",
)
#: Groups that may span clusters (limit "clusters").
CLUSTERS = ("pipeline", "data", "both")
ORDERS = (DEFAULT_ORDER, PIPELINES_FIRST)
#: Micro-batch sizes to search unless a limit names others.
MICRO_BATCHES = (1, 2, 4, 8, 16)
#: Fewest tokens of a sequence on a rank of a context group, unless a limit names context sizes.
MIN_TOKENS = 1024
ZERO_STAGES = (0, 1, 2, 3)
#: Whole numbers of limits are below this, and have fewer digits.
MAX_NUMBER = 10**6
MAX_DIGITS = 9
#: Largest limit on memory, in bytes and in GB.
MAX_MEMORY_BYTES = 1e30
MAX_MEMORY_GB = 1e9
BYTES_PER_GB = 1e9


@dataclass(frozen=True)
class Limits:
    """Limits on the search space: the values allowed for each size or option."""

    #: Name (of NAMES) -> values allowed.
    allowed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    #: Memory of a GPU; 0 for the memory that the GPUs have.
    memory_bytes: float = 0.0
    #: ZeRO stages under which the framework itself reduces hierarchically, on all stages or none;
    #: None if each stage may choose.
    hierarchical: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, values in self.allowed.items():
            if name not in NAMES:
                suggestion = did_you_mean(name, (*NAMES, "memory"))
                raise HolmesError(f"limit {name!r} is not known; {suggestion}")
            if not values:
                raise HolmesError(f"limit {name}: it allows no value; give at least one")
            for value in values:
                _check_value(name, value)
        if not 0 <= self.memory_bytes < MAX_MEMORY_BYTES:
            raise HolmesError(f"limit memory: {self.memory_bytes} bytes; it must be above 0")

    def of(self, name: str, values: Iterable[T]) -> list[T]:
        """Filter `values` by the user's limit on `name`; without such a limit, return all of them."""
        return [value for value in values if value in self.allowed.get(name, (value,))]

    def allow_shape(self, shape: Shape) -> bool:
        """Return whether every size and option of a shape is allowed.

        Example: the limit tensor=1,2 does not allow a shape with tensor 4.
        """
        for name, allowed_values in self.allowed.items():
            if hasattr(shape, name) and getattr(shape, name) not in allowed_values:
                return False
        return True


def _check_value(name: str, value: Any) -> None:
    """Raise HolmesError if a limit's value is not allowed.

    Limits with named choices allow these only; all others allow whole numbers from 1.

    Args:
        name: Name of the limit (NAMES).
        value: The value.
    """
    choices = {
        "recompute": RECOMPUTE,
        "reduction": REDUCTIONS,
        "clusters": CLUSTERS,
        "order": ORDERS,
        "zero": ZERO_STAGES,
    }
    texts = [str(choice) for choice in choices.get(name, ())]
    if texts and str(value) not in texts:
        suggestion = did_you_mean(str(value), texts)
        raise HolmesError(f"limit {name}: {value!r} is not one of {', '.join(texts)}; {suggestion}")
    if not texts and not (isinstance(value, int) and 1 <= value < MAX_NUMBER):
        raise HolmesError(f"limit {name}: {value!r} is not a whole number, 1 or more")


def parse_limits(texts: list[str]) -> Limits:
    """Parse the values of --limit: "tensor=1,2", "memory=60GB" or "pipeline=2,tensor=1".

    Raises:
        HolmesError: A name or a value is not known.
    """
    allowed: dict[str, tuple[Any, ...]] = {}
    limit_texts: list[str] = []  # of a single limit each
    for text in texts:
        limit_texts += _BETWEEN_LIMITS.split(text)
    named = named_values(limit_texts, (*NAMES, "memory"), "--limit")  # name -> text of the values
    memory = named.pop("memory", "")
    memory_gb = _parse_gb(memory) if memory else 0.0  # 0: no limit
    for name, values in named.items():
        parts = (part.strip() for part in values.split(","))
        allowed[name] = tuple(_value_of(part) for part in parts if part)
    return Limits(allowed, memory_gb * BYTES_PER_GB)


def _parse_gb(size: str) -> float:
    """Parse a size of memory in GB, as "60GB", "60G" or "60".

    Raises:
        HolmesError: It is not a number above 0, or far too large.
    """
    number = size.removesuffix("B").removesuffix("G")
    is_number = number.replace(".", "", 1).isdecimal()
    if not is_number or not 0 < float(number) < MAX_MEMORY_GB:
        raise HolmesError(
            f"--limit memory: {size!r:.40} is not a size above 0; write for example 60GB"
        )
    return float(number)


def _value_of(text: str) -> int | str:
    """Parse a limit's value: a number if it has fewer than MAX_DIGITS digits, else the text itself."""
    return int(text) if text.isdecimal() and len(text) < MAX_DIGITS else text


def shapes(network: Network, model: Model, global_batch: int, limits: Limits) -> Iterator[Shape]:
    """Yield all shapes of a job that the limits allow.

    Plans differ in their shape and their nodes. A shape is parallel sizes, micro-batch, chunks,
    recomputation and ZeRO stage. Groups of ranks must fill nodes: a tensor parallel group, also
    with its context parallel ranks, and a stage. Each is a divisor or a multiple of a node's ranks.
    If nodes have different numbers of ranks, a tensor parallel group fits into each of them.

    Args:
        network: Nodes and networks.
        model: Model to train.
        global_batch: Sequences of a step.
        limits: Values that the user allows.
    """
    world = network.world
    widths = set(network.widths)  # ranks on a node, of each type of node
    clusters = equal_clusters(network)  # their number; 1 if they differ in size
    for tensor in limits.of("tensor", divisors(world)):
        if not _tensor_fits(model, tensor) or not _fill_nodes(widths, tensor):
            continue
        if len(widths) > 1 and tensor > min(widths):
            continue  # some tensor groups would lie inside a node, and others would span nodes
        for context in limits.of("context", divisors(world // tensor)):
            if not _context_fits(model, context, limits):
                continue
            if not _fill_nodes(widths, tensor * context):
                continue
            for pipeline in limits.of("pipeline", divisors(world // (tensor * context))):
                data = world // (tensor * context * pipeline)
                fits = pipeline <= model.layers and _fill_nodes(widths, world // pipeline)
                if fits and global_batch % data == 0 and limits.of("data", [data]):
                    sizes = pipeline, tensor, context
                    sequences = global_batch // data
                    yield from _inner_shapes(model, sequences, limits, sizes, data, clusters)


def _tensor_fits(model: Model, tensor: int) -> bool:
    """Return whether tensor parallelism divides the heads, and divides or repeats the key-value heads."""
    kv_heads = model.groups or model.heads
    return model.heads % tensor == 0 and (kv_heads % tensor == 0 or tensor % kv_heads == 0)


def _context_fits(model: Model, context: int, limits: Limits) -> bool:
    """Return whether context parallelism divides the sequence into pieces that are not too short.

    A limit on the context size allows short pieces.
    """
    if context == 1:
        return True
    is_long = "context" in limits.allowed or model.sequence >= MIN_TOKENS * context
    # Each rank gets two pieces, an early and a late piece, so that causal attention is balanced.
    return is_long and model.sequence % (2 * context) == 0


def equal_clusters(network: Network) -> int:
    """Return the number of clusters if all have equally many ranks, else 1."""
    ranks: Counter[str] = Counter()
    for node in network.site.nodes:
        ranks[node.cluster] += node.processes
    return len(ranks) if len(set(ranks.values())) == 1 else 1


def _inner_shapes(
    model: Model,
    sequences: int,
    limits: Limits,
    sizes: tuple[int, int, int],
    data: int,
    clusters: int,
) -> Iterator[Shape]:
    """Yield all shapes with given parallel sizes.

    The settings of a shape that vary here are the expert parallel size, the micro-batch, `virtual`
    (chunks of layers per pipeline stage, for the interleaved schedule), recomputation, the ZeRO stage,
    and `replicas` (copies of the weights that ZeRO 3 shards).

    Args:
        model: Model to train.
        sequences: Sequences of a step on each data parallel rank.
        limits: Values that the user allows.
        sizes: (pipeline, tensor, context)
        data: Data parallel size.
        clusters: Number of clusters if all have equally many ranks, else 1. ZeRO 3 may keep a whole
            copy of the model in each cluster (hybrid sharding), but only in clusters of equal size.
    """
    pipeline, _, context = sizes
    experts = model.expert_divisor or model.experts or 1
    expert_sizes = limits.of("expert", divisors(data * context) if model.experts else [1])
    has_pipeline = pipeline > 1

    # ZeRO 2 and 3 are not combined with a pipeline: they would reduce gradients or gather weights for
    # every micro-batch. DeepSpeed's pipeline engine refuses them.
    possible_stages = (0, 1) if has_pipeline else ZERO_STAGES
    zero_stages = [
        zero
        for zero in limits.of("zero", possible_stages)
        if accepts(model, Mode(zero, has_pipeline))
    ]
    micro_batches_allowed = limits.allowed.get("micro_batch", MICRO_BATCHES)
    for expert, micro_batch in product(expert_sizes, micro_batches_allowed):
        count = sequences // micro_batch  # micro-batches of a step
        if experts % expert or sequences % micro_batch:
            continue
        may_interleave = has_pipeline and model.layers % pipeline == 0 and count % pipeline == 0
        chunk_counts = divisors(model.layers // pipeline) if may_interleave else [1]
        virtuals = limits.of("virtual", chunk_counts)
        recomputes = limits.of("recompute", RECOMPUTE)
        for virtual, recompute, zero in product(virtuals, recomputes, zero_stages):
            shape = Shape(*sizes, expert, data, virtual, micro_batch, count, recompute, zero)
            shards = data * context
            may_replicate = zero == ZERO_WEIGHTS and clusters > 1 and shards % clusters == 0
            replica_counts = (1, clusters) if may_replicate else (1,)
            for replicas in limits.of("replicas", replica_counts):
                yield replace(shape, replicas=replicas)


def _fill_nodes(widths: Iterable[int], ranks: int) -> bool:
    """Return whether groups of `ranks` ranks fill nodes of `widths` ranks evenly."""
    return all(width % ranks == 0 or ranks % width == 0 for width in widths)

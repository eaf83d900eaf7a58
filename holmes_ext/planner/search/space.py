"""Every shape that a job can have on a site: sizes, micro-batch, recomputation and ZeRO stage.

What does not divide is left out: ranks by tensor x context x pipeline, the global batch by micro-batch x
data, heads by tensor, the sequence by 2 x context, layers by pipeline x virtual (virtual > 1), micro-batches
by pipeline (virtual > 1, Megatron's rule), experts and data x context by expert; groups of ranks that fill
nodes unevenly; and contexts of less than MIN_TOKENS a rank. ZeRO stages 2 and 3 only without a pipeline
(DeepSpeed's rule).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import RECOMPUTE, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import REDUCTIONS
from holmes_ext.plan.shape import Shape
from holmes_ext.plan.sizes import DEFAULT_ORDER, PIPELINES_FIRST, divisors
from holmes_ext.words import did_you_mean, named_values

T = TypeVar("T")
_SEVERAL = re.compile(r",(?=[^,=]*=)")  # between limits: what follows is NAME=
#: What limits can name: values allowed.
NAMES = (
    *(
        "tensor",
        "pipeline",
        "data",
        "context",
        "expert",
        "virtual",
        "micro_batch",
        "recompute",
        "zero",
    ),
    *("replicas", "reduction", "clusters", "order"),
)
CLUSTERS = ("pipeline", "data", "both")
ORDERS = (DEFAULT_ORDER, PIPELINES_FIRST)
#: Looked at unless a limit names others.
MICRO_BATCHES = (1, 2, 4, 8, 16)
#: Tokens of a sequence that a rank of a context group has at least, unless a limit names context sizes.
MIN_TOKENS = 1024


@dataclass(frozen=True)
class Limits:
    """Values allowed, by name of NAMES; memory_bytes of a GPU (0: what the GPUs have). hierarchical:
    ZeRO stages
    under which a framework reduces hierarchically, all stages or none; None: as each likes."""

    allowed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    memory_bytes: float = 0.0
    hierarchical: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        choices = {
            "recompute": RECOMPUTE,
            "reduction": REDUCTIONS,
            "clusters": CLUSTERS,
            "order": ORDERS,
            "zero": (0, 1, 2, 3),
        }
        for name, values in self.allowed.items():
            if name not in NAMES:
                raise HolmesError(
                    f"limit {name!r} is not known; {did_you_mean(name, (*NAMES, 'memory'))}"
                )
            if not values:
                raise HolmesError(f"limit {name}: it allows no value; give at least one")
            known = [str(value) for value in choices.get(name, ())]
            for value in values:
                if known and str(value) not in known:
                    what = f"{value!r} is not one of {', '.join(known)}"
                    raise HolmesError(f"limit {name}: {what}; {did_you_mean(str(value), known)}")
                if not known and not (isinstance(value, int) and 1 <= value < 10**6):
                    raise HolmesError(f"limit {name}: {value!r} is not a whole number, 1 or more")
        if not 0 <= self.memory_bytes < 1e30:
            raise HolmesError(f"limit memory: {self.memory_bytes} bytes; it must be above 0")

    def of(self, name: str, values: Iterable[T]) -> list[T]:
        """Those of `values` that are allowed."""
        return [value for value in values if value in self.allowed.get(name, (value,))]


def parse_limits(texts: list[str]) -> Limits:
    """Limits from "tensor=1,2", "memory=60GB", and what --holmes-sizes takes: "pipeline=2,tensor=1"."""
    allowed: dict[str, tuple[Any, ...]] = {}
    texts = [part for text in texts for part in _SEVERAL.split(text)]
    named = named_values(texts, (*NAMES, "memory"), "--limit")
    memory = named.pop("memory", "")
    number = memory.removesuffix("B").removesuffix("G")
    if memory and (not number.replace(".", "", 1).isdecimal() or not 0 < float(number) < 1e9):
        raise HolmesError(
            f"--limit memory: {memory!r:.40} is not a size above 0; write for example 60GB"
        )
    for name, values in named.items():
        parts = [part.strip() for part in values.split(",") if part.strip()]
        allowed[name] = tuple(
            int(part) if part.isdecimal() and len(part) < 9 else part for part in parts
        )
    return Limits(allowed, float(number or 0) * 1e9)


def shapes(network: Network, model: Model, global_batch: int, limits: Limits) -> Iterator[Shape]:
    """All shapes of the space within `limits`."""
    world, processes, kv = network.world, network.processes, model.groups or model.heads
    for tensor in limits.of("tensor", divisors(world)):
        if model.heads % tensor or (kv % tensor and tensor % kv) or not _even(processes, tensor):
            continue
        for context in limits.of("context", divisors(world // tensor)):
            long = "context" in limits.allowed or model.sequence >= MIN_TOKENS * context
            divisible = context == 1 or (model.sequence % (2 * context) == 0 and long)
            if not divisible or not _even(processes, tensor * context):
                continue
            for pipeline in limits.of("pipeline", divisors(world // (tensor * context))):
                data = world // (tensor * context * pipeline)
                fits = pipeline <= model.layers and _even(processes, world // pipeline)
                if fits and global_batch % data == 0 and limits.of("data", [data]):
                    sizes = pipeline, tensor, context
                    yield from _inner(
                        model, global_batch // data, limits, sizes, data, equal_clusters(network)
                    )


def equal_clusters(network: Network) -> int:
    """How many; 1 where they differ in their number of nodes."""
    nodes = Counter(node.cluster for node in network.site.nodes)
    return len(nodes) if len(set(nodes.values())) == 1 else 1


def _inner(
    model: Model,
    sequences: int,
    limits: Limits,
    sizes: tuple[int, int, int],
    data: int,
    clusters: int,
) -> Iterator[Shape]:
    """The shapes of these sizes, of `sequences` a step on each data-parallel rank."""
    (pipeline, _, context), experts = sizes, model.experts or 1
    expert_sizes = limits.of("expert", divisors(data * context) if model.experts else [1])
    zeros = limits.of("zero", (0, 1) if pipeline > 1 else (0, 1, 2, 3))
    for expert, micro_batch in product(
        expert_sizes, limits.allowed.get("micro_batch", MICRO_BATCHES)
    ):
        count = sequences // micro_batch
        if experts % expert or sequences % micro_batch:
            continue
        chunks = pipeline > 1 and model.layers % pipeline == 0 and count % pipeline == 0
        virtuals = limits.of("virtual", divisors(model.layers // pipeline) if chunks else [1])
        for virtual, recompute, zero in product(virtuals, limits.of("recompute", RECOMPUTE), zeros):
            shape = Shape(*sizes, expert, data, virtual, micro_batch, count, recompute, zero)
            hybrid = zero == 3 and clusters > 1 and data * context % clusters == 0
            for replicas in limits.of("replicas", (1, clusters) if hybrid else (1,)):
                yield replace(shape, replicas=replicas)


def _even(processes: int, ranks: int) -> bool:
    return processes % ranks == 0 or ranks % processes == 0

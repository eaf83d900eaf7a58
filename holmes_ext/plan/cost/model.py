"""What a GPT costs, layer by layer: parameters, FLOPs, bytes sent on, and memory.

    embedding | block 0 | block 1 | ... | block N-1 | output          the partition cuts between blocks;
    stays with the first stage             stays with the last one    only blocks are counted as "layers"

b: sequences in a micro-batch, s: tokens of one, h: hidden size, V: vocabulary, a: heads, t: tensor size.

    parameters   block 12 h^2 + 13 h, embedding (V + s) h (Narayanan et al. 2021, arXiv 2104.04473, eq. 2)
    FLOPs        block 24 b s h^2 + 4 b s^2 h forward, output 2 b s h V; backward twice that, and a forward
                 more where a block is recomputed (the same, appendix; equation 3 is their sum)
    memory       block s b h (10 + 24/t + 5 a s / (h t)) bytes kept in 16 bits, without the last term
                 when attention is recomputed ("selective"), 2 s b h when all is ("full")
                 Korthikanti et al. 2022 (arXiv 2205.05198), equations 2, 5, table 2; the 24 is 8 of
                 attention (4 h of query and output, 4 h of keys and values) and 16 of an MLP 4 h wide,
                 which other widths and SwiGLU change in proportion
    flash        without the last term either; the backward computes the scores again: 5 products for the
                 forward's 2 (Dao et al. 2022, arXiv 2205.14135, algorithm 4)

The embedding computes next to nothing, but its gradients are reduced and its parameters kept. Tied, the
output layer uses its weight: no parameters more in the model, yet the last stage keeps a copy, and first and
last stage all-reduce its gradient. With `sequence_parallel` what a block keeps, and stages send, is divided
by t (arXiv 2205.05198, equation 4). With `experts` a token passes `experts_per_token` of an MLP's; where only
some blocks have experts, every block counts as the mean of all.

On clusters: a model comes from its TOML file (examples/models/); cluster.toml can give it other GPUs.

Memory: what one rank of a pipeline stage holds at its fullest, term by term.

    weights, gradients, optimizer   by the ZeRO stage: 1 divides the optimizer by
                                    the data-parallel ranks, 2 gradients too, 3 all
    activations                     what each layer keeps of a micro-batch (above) x the micro-batches in
                                    flight on the stage
    working                         the layer that is recomputed right now, logits with their
                                    gradient, and the buckets of gradients that have memory
                                    of their own (plan/buckets.py)

Under way on stage s of p: min(p - s, m) under 1F1B; with v chunks a stage min(m, (2 (p - s - 1) + (v - 1) p +
1) / v), Megatron's warm-up (Narayanan et al. 2021, arXiv 2104.04473, section 2.2; the first stage's is the
paper's 1 + (p - 1) / (p v) of p). Not counted: the allocator's fragments, NCCL's buffers and the CUDA
context. tests/plan/cost/test_memory.py compares with the bytes that torch holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from holmes_ext.cluster.spec import SiteSpec, accelerator_of
from holmes_ext.document import Table, load_toml
from holmes_ext.errors import HolmesError
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.workload import Workload

RECOMPUTE = ("none", "selective", "full")
POSITIONS = ("learned", "none")


@dataclass(frozen=True)
class Layer:
    """What one rank computes and keeps for one layer and one micro-batch. tensors: elements of each parameter
    of this rank but experts', in the order of the forward pass; their gradients become final in the reverse.
    forward_flops, backward_flops; weight_flops: those of the backward that make weights' gradients, which
    nobody waits for. activation_bytes: sent on if the stage ends here. kept_bytes: from the micro-batch's
    forward to its backward. tensor_bytes, context_bytes, expert_bytes: forward and backward together, as in
    Workload. expert_parameters: of experts."""

    kind: str
    tensors: tuple[float, ...]
    forward_flops: float
    backward_flops: float
    activation_bytes: float
    kept_bytes: float
    tensor_bytes: float = 0.0
    context_bytes: float = 0.0
    expert_bytes: float = 0.0
    expert_parameters: float = 0.0
    weight_flops: float = 0.0

    @cached_property
    def parameters(self) -> float:
        return sum(self.tensors) + self.expert_parameters

    def reduced(self, ranks: int, expert: int) -> tuple[float, ...]:
        """Elements of each gradient as a group of all `ranks` ranks would have to reduce them to send as
        much: an expert's are reduced by ranks / expert only. The last becomes final first."""
        if not self.expert_parameters:
            return self.tensors
        group = max(1, ranks // expert)
        part = (group - 1) / group / ((ranks - 1) / ranks) if ranks > 1 else 1.0
        return (*self.tensors, self.expert_parameters * part)


@dataclass(frozen=True)
class Gpu:
    """flops: FLOP/s that training reaches on one GPU (not the data sheet's peak). memory_bytes: 0 when no
    limit is known. link_bps: bits/s of one GPU to the others of its node (NVLink), each way; 0 when not
    known: then that traffic counts as free."""

    flops: float = 150e12
    memory_bytes: float = 0.0
    link_bps: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.flops < 1e30:
            raise HolmesError(f"gpu: flops is {self.flops}; it must be above 0, and finite")
        if not 0 <= self.memory_bytes < 1e30:
            raise HolmesError(
                f"gpu: memory_bytes is {self.memory_bytes}; it must be 0 (no limit) or more, and finite"
            )


#: Every plan holds a cost for each layer.
_MOST_LAYERS = 100_000


def _key(text: str, default: Any = MISSING, training: bool = False) -> Any:
    """A field of Model. text: what the key of a model file says; training: it stands in [training]."""
    return field(default=default, metadata={"text": text, "training": training})


@dataclass(frozen=True)
class Model:
    """A GPT and how it is trained; optional sizes are 0 where they are left out. gpus: where a cluster's
    differ."""

    layers: int = _key("transformer blocks")
    hidden: int = _key("hidden size: the width of an activation")
    heads: int = _key("attention heads")
    sequence: int = _key("tokens per sequence")
    vocabulary: int = _key("tokens in the vocabulary")
    name: str = _key("its name in tables and messages", "model")
    ffn: int = _key("width inside the MLP; 0: 4 x hidden", 0)
    groups: int = _key("key-value heads; 0: as many as heads", 0)
    head_size: int = _key("width of a head; 0: hidden / heads", 0)
    gated: bool = _key("the MLP is gated (SwiGLU)", False)
    bias: bool = _key("linear layers and norms have a bias", True)
    tied: bool = _key("the output layer shares the embedding's weight", True)
    positions: str = _key(
        '"learned" (a table of max_positions rows), or "none" (rotary ones have no parameters)',
        "learned",
    )
    max_positions: int = _key("0: sequence", 0)
    experts: int = _key("experts in each block that has them; 0: none", 0)
    experts_per_token: int = _key("experts per token (top-k)", 2)
    expert_ffn: int = _key("width inside an expert; 0: ffn", 0)
    shared_ffn: int = _key("width inside the shared expert; 0: none", 0)
    expert_layers: int = _key("blocks with experts; 0: all", 0)
    micro_batch: int = _key("sequences per micro-batch", 1, True)
    micro_batches: int = _key(
        "micro-batches per step on each rank; give this or global_batch", 0, True
    )
    global_batch: int = _key("sequences per step over all ranks", 0, True)
    recompute: str = _key('"none", "selective" or "full"', "none", True)
    flash: bool = _key("attention keeps no scores", False, True)
    sequence_parallel: bool = _key("norms and dropout are split over the tensor ranks", False, True)
    activation_width: int = _key("bytes per activation element", 2, True)
    gradient_width: int = _key("bytes per gradient element", 4, True)
    state_bytes: float = _key(
        "bytes per parameter on each rank: weight, gradient, optimizer", 18.0, True
    )
    sharded_bytes: float = _key(
        "the same, sharded over the data size: 12, with state_bytes 6, for Adam under ZeRO 1",
        0.0,
        True,
    )
    gpu: Gpu = Gpu()
    gpus: dict[str, Gpu] = field(default_factory=dict)
    source: str = "model"

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.type != "int" or item.name == "experts_per_token":
                continue
            name, value, least = item.name, getattr(self, item.name), int(item.default != 0)
            if not least <= value < 10**12:
                raise self._wrong(name, f"{value} is not {least} or more")
        if self.layers > _MOST_LAYERS:
            raise self._wrong("layers", f"{self.layers} is more than {_MOST_LAYERS}")
        for name in ("state_bytes", "sharded_bytes"):
            if not 0 <= getattr(self, name) < 1e6:
                raise self._wrong(
                    name, f"{getattr(self, name)} is not a number of bytes, 0 or more"
                )
        for name, known in (("recompute", RECOMPUTE), ("positions", POSITIONS)):
            if getattr(self, name) not in known:
                raise self._wrong(name, f"{getattr(self, name)!r} is not one of {', '.join(known)}")
        if (not self.head_size and self.hidden % self.heads) or self.heads % (
            self.groups or self.heads
        ):
            problem = f"{self.heads} heads must divide hidden {self.hidden}"
            raise self._wrong("heads", f"{problem}, and key 'groups' the heads")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            problem = f"{self.experts_per_token} is not 1 to {self.experts}"
            raise self._wrong("experts_per_token", f"{problem} (key 'experts')")
        if self.expert_layers > self.layers:
            raise self._wrong(
                "expert_layers", f"{self.expert_layers} is more than the {self.layers} layers"
            )
        if bool(self.micro_batches) == bool(self.global_batch):
            raise HolmesError(
                f"{self.source}: give one of the keys 'micro_batches' and 'global_batch'"
            )

    def _wrong(self, key: str, what: str) -> HolmesError:
        return HolmesError(f"{self.source}: key '{key}': {what}")

    def gpu_of(self, cluster: str) -> Gpu:
        return self.gpus.get(cluster, self.gpu)

    def micro_batches_of(self, data: int) -> int:
        """Of a step on `data` data-parallel ranks; HolmesError when the global batch is not divisible."""
        if self.micro_batches:
            return self.micro_batches
        if self.global_batch % (self.micro_batch * data):
            by = f"micro_batch {self.micro_batch} x data {data}"
            unit = self.micro_batch * data
            below = self.global_batch // unit * unit
            near = f"{below} or {below + unit} is" if below else f"{unit} is"
            raise self._wrong(
                "global_batch", f"{self.global_batch} is not divisible by {by}; {near}"
            )
        return self.global_batch // (self.micro_batch * data)

    @property
    def parameters(self) -> int:
        """Of the whole model, tied ones once."""
        embedding, *blocks, output = self.costs()
        tied = self.vocabulary * self.hidden if self.tied else 0
        return round(
            embedding.parameters
            + sum(block.parameters for block in blocks)
            + output.parameters
            - tied
        )

    def costs(self, tensor: int = 1, context: int = 1, expert: int = 1) -> tuple[Layer, ...]:
        """Embedding, every block, output, as one rank has them, with its part of the experts."""
        block = self._block(tensor, context, expert)
        return (
            self._embedding(tensor, context),
            *[block] * self.layers,
            self._output(tensor, context),
        )

    def _tokens(self, context: int) -> float:
        return self.micro_batch * self.sequence / context

    def _sent(self, tensor: int, context: int) -> float:
        return (
            self._tokens(context)
            * self.hidden
            * self.activation_width
            / (tensor if self.sequence_parallel else 1)
        )

    def _block(self, tensor: int, context: int, expert: int) -> Layer:
        h, head = self.hidden, self.head_size or self.hidden // self.heads
        q, kv = self.heads * head, (self.groups or self.heads) * head
        norm, times = (h, h) if self.bias else (h,), 3 if self.gated else 2  # matrices of an MLP
        routed = (
            (self.expert_layers or self.layers) / self.layers if self.experts else 0.0
        )  # of all blocks
        wide, active = self.expert_ffn or self._ffn, self.experts_per_token if self.experts else 0

        def linear(inputs: float, outputs: float) -> tuple[float, ...]:
            return (inputs * outputs / tensor, *((outputs / tensor,) if self.bias else ()))

        def mlp(ffn: float) -> tuple[float, ...]:
            return (*linear(h, (times - 1) * ffn), *linear(ffn, h)) if ffn else ()

        # what every token passes, mean of all blocks
        dense = (1 - routed) * self._ffn + routed * self.shared_ffn
        experts = routed * self.experts / expert * sum(mlp(wide))
        router = (h * self.experts * routed,) if self.experts else ()
        tensors = (*norm, *linear(h, q + 2 * kv), *linear(q, h), *norm, *router, *mlp(dense))
        # MLP's width that a token passes
        tokens, passed = self._tokens(context), dense + routed * active * wide
        scores_flops = 4 * tokens * self.sequence * q
        forward = (2 * tokens * (2 * h * (q + kv) + times * h * passed) + scores_flops) / tensor
        again = {"none": 0.0, "selective": scores_flops / tensor, "full": forward}[self.recompute]
        again += scores_flops / 2 / tensor if self.flash else 0.0
        bytes_wide = tokens * h * self.activation_width
        scores = (
            0.0 if self.flash else 5 * self.heads * self.sequence / h
        )  # bytes for each element of s b h
        whole = tensor if self.sequence_parallel else 1  # what the 10 and the 2 are divided by
        inside = (
            4 * (q + kv) / h
            + (6 if self.gated else 4) * passed / h
            + 3 * routed * max(0, active - 1)
        )
        kept = 10 / whole + inside / tensor
        kept = {"none": kept + scores / tensor, "selective": kept, "full": 2.0 / whole}[
            self.recompute
        ]
        # passes through the block: forward, (forward again,) backward
        through = 3 if self.recompute == "full" else 2
        sent = (
            2 * through * bytes_wide
        )  # two all-reduces (Shoeybi et al. 2019) or all-to-alls a pass
        # K, V and their gradients
        around = 4 * tokens * kv * self.activation_width / tensor if context > 1 else 0.0
        routes = sent * routed * active * (expert - 1) / expert / tensor
        computing, both = (
            (forward, 2 * forward + again),
            (self._sent(tensor, context), bytes_wide / 2 * kept),
        )
        later = (
            forward - scores_flops / tensor
            if self.recompute == "none" and not self.experts
            else 0.0
        )
        sums = sent if tensor > 1 else 0.0, around, routes, experts
        return Layer("block", tensors, *computing, *both, *sums, later)

    @property
    def _ffn(self) -> int:
        return self.ffn or 4 * self.hidden

    def _embedding(self, tensor: int, context: int) -> Layer:
        tokens, h = self._tokens(context), self.hidden
        positions = (
            ((self.max_positions or self.sequence) * h,) if self.positions == "learned" else ()
        )
        kept = tokens * h / (tensor if self.sequence_parallel else 1)  # the dropout mask
        tensors = (self.vocabulary * h / tensor, *positions)
        return Layer(
            "embedding", tensors, tokens * h, tokens * h, self._sent(tensor, context), kept
        )

    def _output(self, tensor: int, context: int) -> Layer:
        """Final norm, logits and loss; kept: the inputs of norm and matrix, and the logits in 32 bits."""
        tokens, h = self._tokens(context), self.hidden
        logits = tokens * self.vocabulary / tensor
        kept = 2 * tokens * h * self.activation_width + 4 * logits
        tensors = (*((h, h) if self.bias else (h,)), self.vocabulary * h / tensor)
        forward = 2 * h * logits
        return Layer("output", tensors, forward, 2 * forward, 0.0, kept, weight_flops=forward)

    def layers_of(self, sizes: Sizes) -> tuple[Layer, ...]:
        """costs() as a job of `sizes` has them: tied, a single stage has one matrix, not two copies."""
        layers = self.costs(sizes.tensor, sizes.context, sizes.expert if self.experts else 1)
        if self.tied and sizes.pipeline == 1:
            layers = (*layers[:-1], replace(layers[-1], tensors=layers[-1].tensors[:-1]))
        return layers

    def tied_bytes(self, sizes: Sizes) -> float:
        """Of a tied embedding's gradient that ranks of the first and the last stage all-reduce."""
        if not self.tied or sizes.pipeline == 1:
            return 0.0
        return self.vocabulary * self.hidden / sizes.tensor * self.gradient_width

    def copies(self, sizes: Sizes) -> int:
        """Tensor ranks of a stage that have the same activation to send."""
        return 1 if self.sequence_parallel else sizes.tensor

    def workload(self, sizes: Sizes) -> Workload:
        """One rank's work on the average stage of complete `sizes`: what placement compares."""
        layers = self.costs(sizes.tensor, sizes.context, sizes.expert if self.experts else 1)

        def mean(name: str) -> float:
            total: float = sum(getattr(layer, name) for layer in layers)
            return total / sizes.pipeline

        slowest = min(gpu.flops for gpu in (self.gpu, *self.gpus.values()))
        computing = mean("forward_flops") / slowest, mean("backward_flops") / slowest
        gradients, activation = mean("parameters") * self.gradient_width, layers[0].activation_bytes
        sent = {name: mean(name) for name in ("tensor_bytes", "context_bytes", "expert_bytes")}
        return Workload(
            *computing,
            self.micro_batches_of(sizes.data),
            gradients,
            activation,
            **sent,
            copies=self.copies(sizes),
            activation_width=self.activation_width,
        )


#: Of a model file.
VERSION = 1


def on_clusters(model: Model, spec: SiteSpec) -> Model:
    """`model` with the GPUs of cluster.toml: its numbers, then [gpu.cluster.NAME], the GPU's name, [gpu]."""
    gpus = {}
    for cluster in spec.clusters:
        sources = (
            cluster.accelerator,
            model.gpus.get(cluster.name),
            accelerator_of(cluster.gpu),
            model.gpu,
        )
        every = {
            item.name: [getattr(source, item.name, 0.0) for source in sources]
            for item in fields(Gpu)
        }
        gpus[cluster.name] = Gpu(
            **{name: next(filter(None, values), 0.0) for name, values in every.items()}
        )
    return replace(model, gpus=gpus)


def load_model(path: str | Path) -> Model:
    """Read and validate a model TOML (examples/models/); HolmesError names the file and the key."""
    top = load_toml(path, "name a model's TOML, such as those of examples/models/")
    top.version(VERSION)
    training, gpu = top.table("training"), top.table("gpu", default={})
    values: dict[str, Any] = {}
    for item in fields(Model):
        if item.metadata:
            table = training if item.metadata["training"] else top
            required = item.default is MISSING
            kind = int if required else type(item.default)
            values[item.name] = table.take(item.name, kind, *(() if required else (item.default,)))
    clusters, default = gpu.table("cluster", default={}), _gpu(gpu, Gpu())
    gpus = {name: _gpu(clusters.table(name), default) for name in list(clusters.values)}
    for table in (top, training):
        table.done()
    return Model(**values, gpu=default, gpus=gpus, source=str(path))


def _gpu(table: Table, default: Gpu) -> Gpu:
    values = {
        name: table.take(name, float, getattr(default, name)) for name in ("flops", "memory_bytes")
    }
    table.done()
    try:
        return Gpu(**values)
    except HolmesError as error:
        raise HolmesError(f"{table.source}: key '{table.path}': {error}") from None


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float

    @property
    def terms(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def states(model: Model) -> dict[str, float]:
    """Bytes of one parameter when nothing is shared: their sum is the model's state_bytes + sharded_bytes."""
    total = model.state_bytes + model.sharded_bytes
    weights = min(float(model.activation_width), total)
    gradients = min(float(model.gradient_width), total - weights)
    return {"weights": weights, "gradients": gradients, "optimizer": total - weights - gradients}


def state_bytes(model: Model, layer: Layer, shards: int, expert_shards: int) -> float:
    """All three of a layer on one rank; what ZeRO divides is the model's sharded_bytes."""
    whole, shared = model.state_bytes, model.sharded_bytes
    dense = layer.parameters - layer.expert_parameters
    return dense * (whole + shared / shards) + layer.expert_parameters * (
        whole + shared / expert_shards
    )


def in_flight(stage: int, pipeline: int, virtual: int, micro_batches: int) -> float:
    """Micro-batches (of the whole stage) whose activations the stage keeps at most."""
    if virtual == 1:
        return min(pipeline - stage, micro_batches)
    return min(micro_batches, (2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1) / virtual)


def working_bytes(model: Model, tensor: int = 1, context: int = 1, expert: int = 1) -> float:
    """Of a block: all that its forward keeps while it is recomputed; 0 without recomputation."""
    if model.recompute == "none":
        return 0.0
    sizes = tensor, context, expert
    whole, kept = (
        replace(model, recompute=name).costs(*sizes)[1].kept_bytes
        for name in ("none", model.recompute)
    )
    return whole - kept


def stage_memory(
    model: Model,
    layers: Sequence[Layer],
    zero: int = 0,
    shards: int = 1,
    expert_shards: int = 0,
    in_flight: float = 1.0,
    working: float = 0.0,
) -> Memory:
    """A stage that holds `layers` (of model.costs()); shards, expert_shards: what ZeRO divides by."""
    experts = sum(layer.expert_parameters for layer in layers)
    rest = sum(layer.parameters for layer in layers) - experts
    parts = states(model)

    def share(name: str, from_stage: int) -> float:
        if zero < from_stage:
            return parts[name] * (rest + experts)
        return parts[name] * (rest / shards + experts / (expert_shards or shards))

    kept = in_flight * sum(layer.kept_bytes for layer in layers)
    return Memory(share("weights", 3), share("gradients", 2), share("optimizer", 1), kept, working)

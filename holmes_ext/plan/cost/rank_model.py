"""What one rank has of a model: layers by kind, the bytes that it reduces, keeps and sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from holmes_ext.plan.buckets import buffer_bytes
from holmes_ext.plan.cost.model import Gpu, Layer, Model, state_bytes, working_bytes
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.workload import Workload

#: Of a number that is rounded (runtime/groups/wire.py); int8 has a scale for each row besides.
NARROW_BYTES = {"bf16": 2, "int8": 1}
#: (embedding, block, output), and what recomputation works on.
Kinds = tuple[tuple[Layer, Layer, Layer], float]


def narrowed(narrow: str, width: int) -> float:
    """What of an activation's bytes is left when it is rounded so; never more. width: of a number of it."""
    return min(1.0, NARROW_BYTES.get(narrow, inf) / width)


def kinds_of(model: Model, sizes: Sizes) -> Kinds:
    """As a rank of complete sizes has them."""
    every, expert = model.layers_of(sizes), sizes.expert if model.experts else 1
    return (every[0], every[1], every[-1]), working_bytes(model, sizes.tensor, sizes.context, expert)


@dataclass(frozen=True)
class RankModel:
    """layers: of each kind, in order; repeats: how many of each. By kind: reduced_bytes, state_bytes."""

    layers: tuple[Layer, ...]
    repeats: tuple[int, ...]
    reduced_bytes: tuple[float, ...]
    state_bytes: tuple[float, ...]
    micro_batches: int
    #: Layers before the first block and after the last.
    before: int = 1
    after: int = 1
    working_bytes: float = 0.0
    #: Of a tied embedding's gradient; 0: there is none.
    tied_bytes: float = 0.0
    #: Tensor ranks that have the same activation to send; 0: not known.
    copies: int = 0
    #: Bytes of a number of an activation.
    activation_width: int = 2
    #: Bytes of weights that travel for each byte of gradients.
    weights: float = 0.5
    #: By cluster; gpu: of the others.
    gpus: Mapping[str, Gpu] = field(default_factory=dict, hash=False)
    gpu: Gpu = Gpu()

    @classmethod
    def of(cls, model: Model, sizes: Sizes, kinds: Kinds | None = None, replicas: int = 1) -> RankModel:
        """kinds: kinds_of(), where they are known; replicas: of what is sharded."""
        layers, working = kinds or kinds_of(model, sizes)
        shards = sizes.data * sizes.context
        owners = shards // replicas
        experts = max(1, owners // sizes.expert)
        reduced = [model.gradient_width * sum(kind.reduced(shards, sizes.expert)) for kind in layers]
        if shards > 1:
            working += buffer_bytes(reduced[1] * model.layers / sizes.pipeline)
        return cls(
            layers, (1, model.layers, 1), tuple(reduced),
            tuple(state_bytes(model, kind, owners, experts) for kind in layers),
            model.micro_batches_of(sizes.data), working_bytes=working, tied_bytes=model.tied_bytes(sizes),
            copies=model.copies(sizes), activation_width=model.activation_width,
            weights=model.activation_width / model.gradient_width, gpus=model.gpus, gpu=model.gpu,
        )

    @classmethod
    def of_workload(cls, work: Workload, sizes: Sizes) -> RankModel:
        """A block on each stage, which computes and sends what the workload says."""
        layer = Layer(
            "block", (work.gradient_bytes,), work.forward_s, work.backward_s, work.activation_bytes, 0.0,
            work.tensor_bytes, work.context_bytes, work.expert_bytes,
        )
        return cls(
            (layer,), (sizes.pipeline,), (work.gradient_bytes,), (0.0,), work.micro_batches, before=0,
            after=0, copies=work.copies, activation_width=work.activation_width, gpu=Gpu(flops=1.0),
        )

    @property
    def blocks(self) -> int:
        return sum(self.repeats) - self.before - self.after

    @property
    def block(self) -> Layer:
        return self.layers[1 if self.before else 0]

    @property
    def block_bytes(self) -> float:
        """Of a block's gradients."""
        return self.reduced_bytes[1 if self.before else 0]

    @property
    def total_bytes(self) -> float:
        """Of all gradients, on all stages of a pipeline."""
        return sum(count * size for count, size in zip(self.repeats, self.reduced_bytes))

    def narrowed(self, narrow: str) -> float:
        return narrowed(narrow, self.activation_width)

    def gpu_of(self, cluster: str) -> Gpu:
        return self.gpus.get(cluster, self.gpu)

    def slowest(self, clusters: Iterable[str]) -> Gpu:
        """With the least of each number of these clusters' GPUs (memory 0: no limit)."""
        every = [self.gpu_of(cluster) for cluster in clusters]
        limits = [gpu.memory_bytes for gpu in every if gpu.memory_bytes]
        links = min(gpu.link_bps for gpu in every)
        return Gpu(min(gpu.flops for gpu in every), min(limits, default=0.0), links)

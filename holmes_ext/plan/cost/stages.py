"""What one rank has of a model, what that costs on every stage, and the step that a partition makes.

    RankModel    layers by kind, and the bytes that a rank reduces, keeps and sends
    price(...)   ->  StageCosts  -- estimate(stage_layers) -->  Estimate

With overlap a layer's gradients travel while the layers below it still run backward in the last micro-batch
(they are final only then), so of layers i..j-1 max over l of (reduction(i..l) - backward(i..l-1)) is exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from math import inf

from holmes_ext.errors import HolmesError
from holmes_ext.plan.buckets import buffer_bytes
from holmes_ext.plan.cost.model import Gpu, Layer, Model, in_flight, state_bytes, working_bytes
from holmes_ext.plan.cost.pipeline import Estimate, both_ways, formula_ends, schedule, walked_ends
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.workload import StageLoad, Workload, passes_s

#: Of a number that is rounded (runtime/groups/wire.py); int8 has a scale for each row besides.
COMPRESSED_BYTES = {"bf16": 2, "int8": 1}
#: (embedding, block, output), and what recomputation works on.
Kinds = tuple[tuple[Layer, Layer, Layer], float]


def compressed_share(compression: str, width: int) -> float:
    """What of an activation's bytes is left when it is rounded so; never more. width: of a number of it."""
    return min(1.0, COMPRESSED_BYTES.get(compression, inf) / width)


def kinds_of(model: Model, sizes: Sizes) -> Kinds:
    """As a rank of complete sizes has them."""
    every, expert = model.layers_of(sizes), sizes.expert if model.experts else 1
    return (every[0], every[1], every[-1]), working_bytes(
        model, sizes.tensor, sizes.context, expert
    )


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
    def of(
        cls, model: Model, sizes: Sizes, kinds: Kinds | None = None, replicas: int = 1
    ) -> RankModel:
        """kinds: kinds_of(), where they are known; replicas: of what is sharded."""
        layers, working = kinds or kinds_of(model, sizes)
        shards = sizes.data * sizes.context
        owners = shards // replicas
        experts = max(1, owners // sizes.expert)
        reduced = [
            model.gradient_width * sum(kind.reduced(shards, sizes.expert)) for kind in layers
        ]
        if shards > 1:
            working += buffer_bytes(reduced[1] * model.layers / sizes.pipeline)
        return cls(
            layers,
            (1, model.layers, 1),
            tuple(reduced),
            tuple(state_bytes(model, kind, owners, experts) for kind in layers),
            model.micro_batches_of(sizes.data),
            working_bytes=working,
            tied_bytes=model.tied_bytes(sizes),
            copies=model.copies(sizes),
            activation_width=model.activation_width,
            weights=model.activation_width / model.gradient_width,
            gpus=model.gpus,
            gpu=model.gpu,
        )

    @classmethod
    def of_workload(cls, work: Workload, sizes: Sizes) -> RankModel:
        """A block on each stage, which computes and sends what the workload says."""
        layer = Layer(
            "block",
            (work.gradient_bytes,),
            work.forward_s,
            work.backward_s,
            work.activation_bytes,
            0.0,
            work.tensor_bytes,
            work.context_bytes,
            work.expert_bytes,
        )
        return cls(
            (layer,),
            (sizes.pipeline,),
            (work.gradient_bytes,),
            (0.0,),
            work.micro_batches,
            before=0,
            after=0,
            copies=work.copies,
            activation_width=work.activation_width,
            gpu=Gpu(flops=1.0),
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

    def compressed_share(self, compression: str) -> float:
        return compressed_share(compression, self.activation_width)

    def gpu_of(self, cluster: str) -> Gpu:
        return self.gpus.get(cluster, self.gpu)

    def slowest(self, clusters: Iterable[str]) -> Gpu:
        """With the least of each number of these clusters' GPUs (memory 0: no limit)."""
        every = [self.gpu_of(cluster) for cluster in clusters]
        limits = [gpu.memory_bytes for gpu in every if gpu.memory_bytes]
        links = min(gpu.link_bps for gpu in every)
        return Gpu(min(gpu.flops for gpu in every), min(limits, default=0.0), links)


Row = tuple[float, ...]
Rows = tuple[Row, ...]


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes; HolmesError names stage, layer, number."""

    #: [stage][kind of layer]: of a micro-batch; of the gradients but the latency; of the layer's output to
    #: the next stage.
    forward_s: Rows
    backward_s: Rows
    reduction_s: Rows
    transfer_s: Rows
    micro_batches: int
    #: [stage] of the reduction.
    latency_s: Row = ()
    #: [kind]; and of each micro-batch in flight.
    state_bytes: Row = ()
    kept_bytes: Row = ()
    #: [stage]; inf without limit.
    limit_bytes: Row = ()
    #: Layers before the first block and after the last.
    before: int = 1
    after: int = 1
    #: All-reduce of a tied embedding's gradient.
    tied_s: float = 0.0
    overlap: bool = False
    #: [kind] layers that follow each other; () for one of each.
    repeats: tuple[int, ...] = ()
    #: On every stage.
    working_bytes: float = 0.0
    #: Chunks of a stage; seconds in which a stage's NIC sends one micro-batch of all chunks.
    virtual: int = 1
    load_s: float = 0.0
    #: [stage] its clusters.
    places: tuple[str, ...] = ()
    #: [stage link] the part of transfer_s in which it carries nothing else, where as many
    #: micro-batches are in
    #: flight as hide the stage links (plan/cost/pipeline.py, in_flight); None under the framework's
    #: own schedule.
    hidden: Row | None = None
    #: First and last stage of those that send to the stages before and after them through one NIC.
    nics: tuple[tuple[int, int], ...] = ()
    #: [stage][kind] of backward_s what makes weights' gradients and could wait; () where nobody told.
    weights_s: Rows = ()

    def __post_init__(self) -> None:
        stages, kinds = len(self.forward_s), len(self.forward_s[0])
        none, empty = (0.0,) * stages, (0.0,) * kinds
        defaults = {
            "latency_s": none,
            "state_bytes": empty,
            "kept_bytes": empty,
            "limit_bytes": (inf,) * stages,
        }
        for name, default in (
            {**defaults, "repeats": (1,) * kinds, "weights_s": (empty,) * stages}
        ).items():
            object.__setattr__(self, name, getattr(self, name) or default)
        for name in ("forward_s", "backward_s", "reduction_s", "transfer_s"):
            rows = getattr(self, name)
            assert len(rows) == stages and all(len(row) == kinds for row in rows), name
            for row in dict.fromkeys(rows):
                for kind, value in enumerate(row):
                    if not 0 <= value < 1e30:
                        what = f"stage {rows.index(row)}, layer {kind}: {name} is {value}"
                        raise HolmesError(f"{what}; a time must be 0 or more, and finite")
        for stage, limit in enumerate(self.limit_bytes):
            if not limit > 0:
                raise HolmesError(
                    f"{self.names[stage]}: a memory limit of {limit} bytes; it must be above 0"
                )
        if self.micro_batches < 1:
            raise HolmesError(f"micro_batches is {self.micro_batches}; it must be 1 or more")
        if self.blocks < stages:
            raise HolmesError(
                f"{self.blocks} layers are too few for {stages} pipeline stages; every stage needs one"
            )

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    @cached_property
    def layers(self) -> int:
        return sum(self.repeats)

    @cached_property
    def blocks(self) -> int:
        """Layers that the partition is about."""
        return self.layers - self.before - self.after

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the stages, for messages."""
        places = [f" (cluster {place})" for place in self.places] or [""] * self.stages
        return tuple(f"stage {stage}{place}" for stage, place in enumerate(places))

    def ranges(self, stage_layers: Sequence[int]) -> list[tuple[int, int]]:
        """Layers [low, high) of every stage (or chunk) that has so many blocks."""
        borders = list(accumulate(stage_layers, initial=0))
        return [self.bounds(start, stop) for start, stop in zip(borders, borders[1:])]

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        """Blocks start..stop-1 as a range of layers, with what stands before the first and after the last."""
        return (
            start + self.before if start else 0,
            stop + self.before if stop < self.blocks else self.layers,
        )

    @cached_property
    def memory(self) -> Rows:
        """Bytes at a stage's fullest, [stage][kind]."""
        layer_bytes, stages = list(zip(self.state_bytes, self.kept_bytes)), range(self.stages)
        counts = (
            in_flight(stage, self.stages, self.virtual, self.micro_batches) for stage in stages
        )
        return tuple(tuple(state + count * kept for state, kept in layer_bytes) for count in counts)

    @cached_property
    def room_bytes(self) -> Row:
        """For layers, [stage]."""
        return tuple(limit - self.working_bytes for limit in self.limit_bytes)

    @cached_property
    def sums(self) -> dict[str, list[list[float]]]:
        """name -> stage -> running sums over layers, from 0. Stages with one row share one list."""
        known: dict[Row, list[float]] = {}

        def running(row: Row) -> list[float]:
            if row not in known:
                known[row] = list(accumulate(self.by_layer(row), initial=0.0))
            return known[row]

        names = ("forward_s", "backward_s", "reduction_s", "memory", "weights_s")
        return {name: [running(row) for row in getattr(self, name)] for name in names}

    def by_layer(self, row: Row) -> Iterator[float]:
        """`row`, by layer instead of kind."""
        return (value for value, count in zip(row, self.repeats) for _ in range(count))

    @cached_property
    def transfer(self) -> list[Row]:
        """transfer_s, [stage][layer]. Stages with one row share one."""
        known = {row: tuple(self.by_layer(row)) for row in dict.fromkeys(self.transfer_s)}
        return [known[row] for row in self.transfer_s]

    @cached_property
    def _corners(self) -> list[int]:
        """Layers that are the first or the last of their kind: between them all is linear."""
        ends = zip(accumulate(self.repeats), self.repeats)
        return sorted({corner for end, count in ends for corner in (end - 1, end - count)})

    def exposed_s(self, stage: int, low: int, high: int) -> float:
        """Reduction of layers low..high-1 that is left when the stage's last backward ends."""
        reduction = self.sums["reduction_s"][stage]
        if not self.overlap:
            return reduction[high] - reduction[low] + self.latency_s[stage]
        backward = self.sums["backward_s"][stage]
        corners = (layer for layer in (low, high - 1, *self._corners) if low <= layer < high)
        worst = max(reduction[layer + 1] - backward[layer] for layer in corners)
        return worst - (reduction[low] - backward[low]) + self.latency_s[stage]

    def loads(self, stage_layers: Sequence[int]) -> tuple[StageLoad, ...]:
        """Of the stages with so many blocks."""
        of = {
            name: list(accumulate(self.by_layer(row), initial=0.0))
            for name, row in (("state", self.state_bytes), ("kept", self.kept_bytes))
        }
        loads = []
        for stage, (low, high) in enumerate(self.ranges(stage_layers)):
            forward, backward, weights = (
                sums[high] - sums[low]
                for sums in (
                    self.sums[name][stage] for name in ("forward_s", "backward_s", "weights_s")
                )
            )
            state, kept = (of[name][high] - of[name][low] for name in ("state", "kept"))
            limit = self.limit_bytes[stage]
            limit = limit if limit < inf else 0.0
            loads.append(
                StageLoad(
                    forward, backward, state + self.working_bytes, kept, limit, weights_s=weights
                )
            )
        return tuple(loads)

    def in_flight(self, stage_layers: Sequence[int]) -> tuple[int, ...]:
        """On each stage, with so many blocks; () where the framework's own schedule will do."""
        if self.hidden is None:
            return ()
        loads = self.loads(stage_layers)
        busy_s, most = max(load.busy_s for load in loads), tuple(load.most for load in loads)
        transfer, sent = both_ways(self.stage_links_s(stage_layers), self.hidden, self.nics, busy_s)
        return schedule(*passes_s(loads), transfer, self.micro_batches, sent, most)

    def stage_links_s(self, stage_layers: Sequence[int]) -> Row:
        """Of an activation over each stage link, with so many blocks on each stage."""
        return tuple(
            row[high - 1] for row, (_, high) in zip(self.transfer, self.ranges(stage_layers)[:-1])
        )


def predict(costs: StageCosts, stage_layers: Sequence[int], asked: Sequence[int] = ()) -> Estimate:
    """Pass by pass (one chunk a stage), with as many micro-batches in flight as hide the stage links
    and fit the memory, or as asked for."""
    in_flight = tuple(asked) or costs.in_flight(stage_layers)
    load, nics = (costs.hidden or (), costs.nics) if in_flight else ((), ())
    step = estimate(
        costs, stage_layers, partial(walked_ends, in_flight=in_flight, load=load, nics=nics)
    )
    if not in_flight:
        return step
    return replace(
        step,
        in_flight=in_flight,
        memory_bytes=tuple(map(StageLoad.bytes_of, costs.loads(stage_layers), in_flight)),
    )


def estimate(
    costs: StageCosts, stage_layers: Sequence[int], ends: Callable[..., list[float]] | None = None
) -> Estimate:
    """The step with stage_layers[s] blocks on stage s; ends: formula_ends unless told."""
    ends = ends or partial(
        formula_ends,
        virtual=costs.virtual,
        load_s=costs.load_s,
        hidden=costs.hidden,
        nics=costs.nics,
    )
    assert (
        len(stage_layers) == costs.stages
        and sum(stage_layers) == costs.blocks
        and min(stage_layers) > 0
    )
    ranges = costs.ranges(stage_layers)

    def total(name: str) -> list[float]:
        return [sums[high] - sums[low] for sums, (low, high) in zip(costs.sums[name], ranges)]

    forward, backward, transfer = (
        total("forward_s"),
        total("backward_s"),
        costs.stage_links_s(stage_layers),
    )
    end = ends(forward, backward, transfer, costs.micro_batches)
    exposed = [costs.exposed_s(stage, *layers) for stage, layers in enumerate(ranges)]
    if (
        costs.tied_s and costs.stages > 1
    ):  # before both reduce their own (DeepSpeed's PipelineEngine)
        end[-1] = end[0]  # the last stage waits for the first one
        exposed[0], exposed[-1] = exposed[0] + costs.tied_s, exposed[-1] + costs.tied_s
    memory = tuple(used + costs.working_bytes for used in total("memory"))
    return Estimate(
        compute_s=tuple((f + b) * costs.micro_batches for f, b in zip(forward, backward)),
        transfer_s=transfer,
        reduction_s=tuple(map(sum, zip(total("reduction_s"), costs.latency_s))),
        exposed_s=tuple(exposed),
        end_s=tuple(map(sum, zip(end, exposed))),
        stage_layers=tuple(stage_layers),
        memory_bytes=memory,
        fits=tuple(used <= limit for used, limit in zip(memory, costs.limit_bytes)),
    )

"""Costs of a model's layers on every pipeline stage, and the step time of a partition.

    RankModel         layers by kind, and the bytes that a rank reduces, keeps and sends
    price(...)        -> StageCosts (plan/cost/price.py)
    estimate(costs)   -> Estimate, in closed form
    predict(costs)    -> Estimate, pass by pass, with the micro-batches in flight that hide the stage links

A gradient is final only in the last micro-batch. With overlap, a layer's gradients travel while the layers
before it still run their backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.plan.buckets import buffer_bytes
from holmes_ext.plan.cost.model import Gpu, Layer, Model, in_flight, state_bytes, working_bytes
from holmes_ext.plan.cost.pipeline import Estimate, formula_ends, schedule, share_nics, walked_ends
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.workload import StageLoad, Workload, passes_s
from holmes_ext.words import counted

#: Bytes of a compressed activation element (runtime/groups/wire.py), without the scales of int8.
COMPRESSED_BYTES = {"bf16": 2, "int8": 1}
#: A time in seconds that is too large to be true.
_TOO_LONG_S = 1e30


class Kinds(NamedTuple):
    """The three kinds of layers of a model, with their costs on a rank."""

    layers: tuple[Layer, Layer, Layer]  # embedding, block, output
    working_bytes: float  # of the block that is recomputed at the moment


def compressed_share(compression: str, width: int) -> float:
    """Return the part of an activation's bytes that compression leaves, at most 1.

    Args:
        compression: "off", "bf16" or "int8".
        width: Bytes of an uncompressed element.
    """
    return min(1.0, COMPRESSED_BYTES.get(compression, inf) / width)


def kinds_of(model: Model, sizes: Sizes) -> Kinds:
    """Return the costs of the embedding, a block and the output layer on a rank of these sizes."""
    layers = model.layers_of(sizes)
    expert = sizes.expert if model.experts else 1
    return Kinds(
        layers=(layers[0], layers[1], layers[-1]),
        working_bytes=working_bytes(model, sizes.tensor, sizes.context, expert),
    )


@dataclass(frozen=True)
class RankModel:
    """Layers of a rank by kind, and the bytes that the rank reduces, keeps and sends."""

    layers: tuple[Layer, ...]  # a layer of each kind, in the order of the forward pass
    repeats: tuple[int, ...]  # number of layers of each kind
    reduced_bytes: tuple[float, ...]  # gradients of a layer of each kind
    state_bytes: tuple[float, ...]  # weights, gradients and optimizer of a layer of each kind
    micro_batches: int
    before: int = 1  # layers before the first block
    after: int = 1  # layers after the last block
    working_bytes: float = 0.0  # buffers that every stage needs for a moment
    tied_bytes: float = 0.0  # gradient of a tied embedding; 0: there is none
    copies: int = 0  # tensor-parallel ranks that send the same activation; 0: not known
    activation_width: int = 2  # bytes of an activation element
    weight_bytes_per_gradient_byte: float = 0.5  # bytes of weights for each byte of gradients
    gpus: Mapping[str, Gpu] = field(default_factory=dict, hash=False)  # cluster -> its GPU
    gpu: Gpu = Gpu()  # of all other clusters

    @classmethod
    def of(
        cls, model: Model, sizes: Sizes, kinds: Kinds | None = None, replicas: int = 1
    ) -> RankModel:
        """Return the layers of a rank, with the bytes that it reduces, keeps and sends.

        Args:
            model: The model.
            sizes: Parallel sizes, with the data size.
            kinds: Result of kinds_of(model, sizes), if it is known already.
            replicas: Number of clusters that each have all shards (hybrid sharding); else 1.
        """
        layers, working = kinds or kinds_of(model, sizes)  # `working`: bytes needed for a moment
        reducing_ranks = sizes.data * sizes.context  # these have equal dense parameters
        shards = reducing_ranks // replicas
        expert_shards = max(1, shards // sizes.expert)  # ranks that have the same experts
        reduced_bytes = [
            model.gradient_width * sum(layer.reduced(reducing_ranks, sizes.expert))
            for layer in layers
        ]
        if reducing_ranks > 1:
            block_bytes = reduced_bytes[1]  # layers are (embedding, block, output)
            stage_gradient_bytes = block_bytes * model.layers / sizes.pipeline
            working += buffer_bytes(stage_gradient_bytes)  # gradient buckets have their own memory
        return cls(
            layers=layers,
            repeats=(1, model.layers, 1),
            reduced_bytes=tuple(reduced_bytes),
            state_bytes=tuple(state_bytes(model, layer, shards, expert_shards) for layer in layers),
            micro_batches=model.micro_batches_of(sizes.data),
            working_bytes=working,
            tied_bytes=model.tied_bytes(sizes),
            copies=model.copies(sizes),
            activation_width=model.activation_width,
            weight_bytes_per_gradient_byte=model.activation_width / model.gradient_width,
            gpus=model.gpus,
            gpu=model.gpu,
        )

    @classmethod
    def of_workload(cls, work: Workload, sizes: Sizes) -> RankModel:
        """Build a model with a single block for each stage, which has all the work of an average stage."""
        block = Layer(
            kind="block",
            tensors=(work.gradient_bytes,),
            forward_flops=work.forward_s,  # seconds, as the GPU below computes 1 FLOP/s
            backward_flops=work.backward_s,
            activation_bytes=work.activation_bytes,
            kept_bytes=0.0,
            tensor_bytes=work.tensor_bytes,
            context_bytes=work.context_bytes,
            expert_bytes=work.expert_bytes,
        )
        return cls(
            layers=(block,),
            repeats=(sizes.pipeline,),
            reduced_bytes=(work.gradient_bytes,),
            state_bytes=(0.0,),
            micro_batches=work.micro_batches,
            before=0,  # no embedding, and no output layer
            after=0,
            copies=work.copies,
            activation_width=work.activation_width,
            gpu=Gpu(flops=1.0),
        )

    @property
    def blocks(self) -> int:
        """Return the number of layers that a partition distributes."""
        return sum(self.repeats) - self.before - self.after

    @property
    def block(self) -> Layer:
        """Return the costs of a block."""
        return self.layers[1 if self.before else 0]

    @property
    def block_bytes(self) -> float:
        """Return the bytes of a block's gradients."""
        return self.reduced_bytes[1 if self.before else 0]

    @property
    def total_bytes(self) -> float:
        """Return the bytes of all gradients of a pipeline, over all its stages."""
        return sum(count * size for count, size in zip(self.repeats, self.reduced_bytes))

    def compressed_share(self, compression: str) -> float:
        """Return the part of an activation's bytes that compression leaves, at most 1."""
        return compressed_share(compression, self.activation_width)

    def gpu_of(self, cluster: str) -> Gpu:
        """Return the GPU of a cluster's nodes."""
        return self.gpus.get(cluster, self.gpu)

    def slowest(self, clusters: Iterable[str]) -> Gpu:
        """Return a GPU with the least FLOP/s, memory and link rate, each over all these clusters' GPUs."""
        gpus = [self.gpu_of(cluster) for cluster in clusters]
        limits = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes]  # 0: no limit
        return Gpu(
            flops=min(gpu.flops for gpu in gpus),
            memory_bytes=min(limits, default=0.0),
            link_bps=min(gpu.link_bps for gpu in gpus),
        )


#: Numbers by kind of layer, or by stage.
Row = tuple[float, ...]
#: Numbers by stage and kind of layer: rows[stage][kind].
Rows = tuple[Row, ...]


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes of every kind of layer (embedding, block, output) on every pipeline stage.

    Raises:
        HolmesError: A number is negative or infinite, or there are more stages than blocks.
    """

    # By stage and kind of layer.
    forward_s: Rows  # of a micro-batch
    backward_s: Rows  # of a micro-batch
    reduction_s: Rows  # of the layer's gradients, without latency
    transfer_s: Rows  # of the output to the next stage, if a stage ends after the layer
    micro_batches: int
    latency_s: Row = ()  # by stage: of the reduction
    # By kind of layer.
    state_bytes: Row = ()
    kept_bytes: Row = ()  # activations of each micro-batch in flight
    limit_bytes: Row = ()  # by stage: memory of the smallest GPU; inf: no limit
    before: int = 1  # layers before the first block
    after: int = 1  # layers after the last block
    tied_s: float = 0.0  # all-reduce of a tied embedding's gradient
    overlap: bool = False  # whether gradients are reduced during the last backward pass
    repeats: tuple[int, ...] = ()  # number of layers of each kind; (): 1 of each
    working_bytes: float = 0.0  # buffers that every stage needs for a moment
    virtual: int = 1  # chunks per stage
    load_s: float = 0.0  # seconds that a NIC needs to send a micro-batch of all chunks of a stage
    places: tuple[str, ...] = ()  # by stage: names of its clusters
    #: By stage link: part of transfer_s that occupies the link (without latency), if holmes sets the micro-
    #: batches in flight so that they hide the stage links. None: the framework's own schedule runs.
    link_load_s: Row | None = None
    #: (first, last) of neighbouring stages that share NICs for the stage links before and after them.
    shared_nic_stages: tuple[tuple[int, int], ...] = ()
    #: By stage and kind of layer: part of backward_s that computes weight gradients; (): not known.
    weights_s: Rows = ()

    def __post_init__(self) -> None:
        """Set empty fields to 0 seconds or bytes, no memory limit, 1 layer; check all numbers."""
        stages = len(self.forward_s)
        kinds = len(self.forward_s[0])
        defaults: dict[str, tuple[Any, ...]] = {
            "latency_s": (0.0,) * stages,
            "state_bytes": (0.0,) * kinds,
            "kept_bytes": (0.0,) * kinds,
            "limit_bytes": (inf,) * stages,
            "repeats": (1,) * kinds,
            "weights_s": ((0.0,) * kinds,) * stages,
        }
        for name, default in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, default)
        for name in ("forward_s", "backward_s", "reduction_s", "transfer_s"):
            rows = getattr(self, name)
            assert len(rows) == stages and all(len(row) == kinds for row in rows), name
            self._check_times(name, rows)
        for stage, limit in enumerate(self.limit_bytes):
            if not limit > 0:
                problem = f"a memory limit of {limit} bytes; it must be above 0"
                raise HolmesError(f"{self.names[stage]}: {problem}")
        if self.micro_batches < 1:
            raise HolmesError(f"micro_batches is {self.micro_batches}; it must be 1 or more")
        if self.blocks < stages:
            problem = f"{counted(self.blocks, 'layer', 'are')} too few for {stages} pipeline stages"
            raise HolmesError(f"{problem}; every stage needs one")

    @staticmethod
    def _check_times(name: str, rows: Rows) -> None:
        for row in dict.fromkeys(rows):  # stages often share a row
            for kind, value in enumerate(row):
                if not 0 <= value < _TOO_LONG_S:
                    place = f"stage {rows.index(row)}, layer {kind}"
                    problem = f"{name} is {value}; a time must be 0 or more, and finite"
                    raise HolmesError(f"{place}: {problem}")

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages."""
        return len(self.forward_s)

    @cached_property
    def layers(self) -> int:
        """Return the number of layers, with those before the first and after the last block."""
        return sum(self.repeats)

    @cached_property
    def blocks(self) -> int:
        """Return the number of layers that a partition distributes."""
        return self.layers - self.before - self.after

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the stages for messages, such as "stage 0 (cluster a)"."""
        places = [f" (cluster {place})" for place in self.places] or [""] * self.stages
        return tuple(f"stage {stage}{place}" for stage, place in enumerate(places))

    def ranges(self, stage_layers: Sequence[int]) -> list[tuple[int, int]]:
        """Return the layers of each stage or chunk, given its blocks: (low, high) for low..high - 1."""
        borders = list(accumulate(stage_layers, initial=0))
        return [self.bounds(start, stop) for start, stop in zip(borders, borders[1:])]

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        """Return the layers of a stage with the blocks start..stop - 1: (low, high) for low..high - 1.

        The first stage also has the layers before the first block, the last stage those after the last.
        """
        low = start + self.before if start else 0
        high = stop + self.before if stop < self.blocks else self.layers
        return low, high

    @cached_property
    def memory(self) -> Rows:
        """Return bytes[stage][kind of layer]: state, and activations of all micro-batches in flight."""
        rows = []
        for stage in range(self.stages):
            count = in_flight(stage, self.stages, self.virtual, self.micro_batches)
            by_kind = zip(self.state_bytes, self.kept_bytes)
            rows.append(tuple(state + count * kept for state, kept in by_kind))
        return tuple(rows)

    @cached_property
    def room_bytes(self) -> Row:
        """Return the memory that every stage has for layers, in bytes, after its working memory."""
        return tuple(limit - self.working_bytes for limit in self.limit_bytes)

    @cached_property
    def sums(self) -> dict[str, list[list[float]]]:
        """Return, as sums[name][stage][n], the total cost of the model's first n layers on a stage.

        The names are forward_s, backward_s, reduction_s, memory and weights_s. So the cost of layers
        [low, high) on a stage is the difference of two numbers.
        """
        totals_of: dict[Row, list[float]] = {}  # stages with equal rows share a list

        def totals(row: Row) -> list[float]:
            if row not in totals_of:
                totals_of[row] = self._totals(row)
            return totals_of[row]

        names = ("forward_s", "backward_s", "reduction_s", "memory", "weights_s")
        return {name: [totals(row) for row in getattr(self, name)] for name in names}

    def _totals(self, row: Row) -> list[float]:
        """Return the total cost of the first 0, 1, 2, ... layers, from the cost of each kind of layer."""
        return list(accumulate(self.by_layer(row), initial=0.0))

    def by_layer(self, row: Row) -> Iterator[float]:
        """Yield a number for every layer, given one each for embedding, block and output layer."""
        return (value for value, count in zip(row, self.repeats) for _ in range(count))

    @cached_property
    def transfer(self) -> list[Row]:
        """Return the seconds of sending a layer's output to the next stage, as [stage][layer]."""
        row_of = {row: tuple(self.by_layer(row)) for row in dict.fromkeys(self.transfer_s)}
        return [row_of[row] for row in self.transfer_s]

    @cached_property
    def _corners(self) -> list[int]:
        """Return the numbers of the first and last layer of each kind; costs are linear between them."""
        corners = set()
        for end, count in zip(accumulate(self.repeats), self.repeats):
            corners |= {end - 1, end - count}
        return sorted(corners)

    def exposed_s(self, stage: int, low: int, high: int) -> float:
        """Return the seconds of reduction after the last backward pass of a stage with layers [low, high).

        The backward pass runs from the last layer to the first. With overlap, a layer's gradients
        can travel when its backward pass has ended. So the reduction of layers low..l cannot begin
        before layer l is done, and is hidden only by the backward pass of layers low..l-1. The
        largest difference over all l is exposed.
        """
        # Sums from layer 0 on, so that a difference gives layers low..l: reduction_s[l + 1] -
        # reduction_s[low], and their backward pass without layer l: backward_s[l] - backward_s[low].
        reduction_s = self.sums["reduction_s"][stage]
        if not self.overlap:
            return reduction_s[high] - reduction_s[low] + self.latency_s[stage]
        backward_s = self.sums["backward_s"][stage]
        # Layers of a kind have equal costs, so the largest difference is at the first or last of a
        # kind (_corners), or of the stage. Terms with `low` are the same for all l: subtracted last.
        candidates = (layer for layer in (low, high - 1, *self._corners) if low <= layer < high)
        largest_s = max(reduction_s[layer + 1] - backward_s[layer] for layer in candidates)
        before_low_s = reduction_s[low] - backward_s[low]
        return largest_s - before_low_s + self.latency_s[stage]

    def loads(self, stage_layers: Sequence[int]) -> tuple[StageLoad, ...]:
        """Return the computation and memory of every stage, given the number of its blocks."""
        # totals[n]: cost of the model's first n layers. So layers [low, high) cost the difference.
        state_totals = self._totals(self.state_bytes)
        kept_totals = self._totals(self.kept_bytes)
        loads = []
        for stage, (low, high) in enumerate(self.ranges(stage_layers)):
            forward_totals = self.sums["forward_s"][stage]
            backward_totals = self.sums["backward_s"][stage]
            weights_totals = self.sums["weights_s"][stage]
            limit = self.limit_bytes[stage]
            load = StageLoad(
                forward_s=forward_totals[high] - forward_totals[low],
                backward_s=backward_totals[high] - backward_totals[low],
                fixed_bytes=state_totals[high] - state_totals[low] + self.working_bytes,
                kept_bytes=kept_totals[high] - kept_totals[low],  # of each micro-batch in flight
                limit_bytes=limit if limit < inf else 0.0,  # a StageLoad has 0 for "no limit"
                weights_s=weights_totals[high] - weights_totals[low],  # weight gradients
            )
            loads.append(load)
        return tuple(loads)

    def in_flight(self, stage_layers: Sequence[int]) -> tuple[int, ...]:
        """Return the micro-batches in flight, by stage, that hide the stage links and fit the memory.

        (): keep the framework's own schedule. stage_layers: blocks of each stage.
        """
        if self.link_load_s is None:
            return ()  # holmes cannot change the number of micro-batches in flight
        loads = self.loads(stage_layers)
        forward_s, backward_s = passes_s(loads)
        # Longer for stage links that share a NIC if this NIC is busier than the slowest stage.
        transfer_s, link_load_s = share_nics(
            self.stage_links_s(stage_layers),
            self.link_load_s,
            self.shared_nic_stages,
            busy_s=max(load.busy_s for load in loads),
        )
        return schedule(  # micro-batches in flight by stage; (): 1F1B is as fast
            forward_s,
            backward_s,
            transfer_s,
            self.micro_batches,
            link_load_s,
            most=tuple(load.most for load in loads),  # micro-batches that fit the stage's memory
        )

    def stage_links_s(self, stage_layers: Sequence[int]) -> Row:
        """Return the seconds of an activation over each stage link, given the blocks of each stage."""
        ranges = self.ranges(stage_layers)[:-1]
        return tuple(row[high - 1] for row, (_, high) in zip(self.transfer, ranges))


def predict(costs: StageCosts, stage_layers: Sequence[int], asked: Sequence[int] = ()) -> Estimate:
    """Return the predicted times of a step, calculated pass by pass, with a single chunk per stage.

    Args:
        costs: Costs of every layer on every stage.
        stage_layers: Number of blocks of each stage.
        asked: Micro-batches in flight on each stage that the user sets; (): those of costs.in_flight().
    """
    in_flight = tuple(asked) or costs.in_flight(stage_layers)
    if not in_flight:  # the framework's own schedule
        return estimate(costs, stage_layers, walked_ends)
    link_load_s = costs.link_load_s or ()  # part of each transfer that occupies its stage link
    ends = partial(walked_ends, in_flight=in_flight, load=link_load_s, nics=costs.shared_nic_stages)
    step = estimate(costs, stage_layers, ends)
    memory_bytes = tuple(  # with this number of micro-batches in flight, not the framework's
        load.bytes_of(count) for load, count in zip(costs.loads(stage_layers), in_flight)
    )
    return replace(step, in_flight=in_flight, memory_bytes=memory_bytes)


def estimate(
    costs: StageCosts, stage_layers: Sequence[int], ends: Callable[..., list[float]] | None = None
) -> Estimate:
    """Return the predicted times of a step, for a partition of the layers over the stages.

    Args:
        costs: Costs of every layer on every stage.
        stage_layers: Number of blocks of each stage.
        ends: Computes the end of each stage's last backward pass; default: formula_ends, in closed form.
    """
    ends = ends or partial(
        formula_ends,
        virtual=costs.virtual,
        load_s=costs.load_s,
        link_load_s=costs.link_load_s,
        nics=costs.shared_nic_stages,
    )
    assert len(stage_layers) == costs.stages
    assert sum(stage_layers) == costs.blocks and min(stage_layers) > 0
    ranges = costs.ranges(stage_layers)

    def by_stage(name: str) -> list[float]:
        """Return the total cost of the layers of each stage, for a key of StageCosts.sums."""
        return [totals[high] - totals[low] for totals, (low, high) in zip(costs.sums[name], ranges)]

    forward_s = by_stage("forward_s")
    backward_s = by_stage("backward_s")
    transfer_s = costs.stage_links_s(stage_layers)
    end_s = ends(forward_s, backward_s, transfer_s, costs.micro_batches)
    exposed_s = [costs.exposed_s(stage, low, high) for stage, (low, high) in enumerate(ranges)]
    if costs.tied_s and costs.stages > 1:
        # The first and last stage sum a tied weight's gradient before they reduce their other gradients
        # (as DeepSpeed's PipelineEngine does), so the last stage waits for the first.
        end_s[-1] = end_s[0]
        exposed_s[0] += costs.tied_s
        exposed_s[-1] += costs.tied_s
    memory_bytes = tuple(used + costs.working_bytes for used in by_stage("memory"))
    return Estimate(
        compute_s=tuple(
            (forward + backward) * costs.micro_batches
            for forward, backward in zip(forward_s, backward_s)
        ),
        transfer_s=transfer_s,
        reduction_s=tuple(map(sum, zip(by_stage("reduction_s"), costs.latency_s))),
        exposed_s=tuple(exposed_s),
        end_s=tuple(map(sum, zip(end_s, exposed_s))),
        stage_layers=tuple(stage_layers),
        memory_bytes=memory_bytes,
        fits=tuple(used <= limit for used, limit in zip(memory_bytes, costs.limit_bytes)),
    )

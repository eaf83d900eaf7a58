"""What every layer would cost on every stage, and the step that a partition of them makes.

    cluster + order of nodes + sizes + model  -- costs_on_site -->  StageCosts  -- estimate(stage_layers) -->  Estimate

The step is 1F1B (plan/cost/step.py: backward_ends, a formula to search with; predict() works the same out pass by pass), then each stage's reduction. With overlap a layer's gradients travel while the layers below it
still run backward in the last micro-batch (they are final only then), so what is exposed of layers i..j-1 is

    max over l of   reduction(i..l) - backward(i..l-1)

Tied embeddings: first and last stage all-reduce that gradient when both have ended, then reduce their own (the order of
DeepSpeed's PipelineEngine: ReduceTiedGrads, ReduceGrads). Memory: parameters' state, and what min(stages - s, micro_batches)
micro-batches keep on stage s under 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf

from holmes_ext.cluster.site import Fabric, Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import Layer, Model
from holmes_ext.plan.cost.reduction import reduced_parameters
from holmes_ext.plan.cost.step import Predictor, Workload, allreduce_seconds, backward_ends, simulated_ends
from holmes_ext.plan.layout import Layout
from holmes_ext.plan.sizes import Sizes

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes, by stage and layer. Layers include those `before` the first block and `after` the last.

    forward_s, backward_s: [stage][layer], one micro-batch. reduction_s: [stage][layer], the layer's gradients; latency_s: [stage], once
    a step. transfer_s: [stage][layer], the layer's output from this stage to the next (the last stage's row is not used).
    state_bytes, kept_bytes: [layer]; kept for each micro-batch under way. limit_bytes: [stage], inf without limit.
    tied_s: all-reduce of a tied embedding. names: of the stages, for messages. HolmesError names stage, layer and number.
    """

    forward_s: Rows
    backward_s: Rows
    reduction_s: Rows
    transfer_s: Rows
    micro_batches: int
    latency_s: tuple[float, ...] = ()
    state_bytes: tuple[float, ...] = ()
    kept_bytes: tuple[float, ...] = ()
    limit_bytes: tuple[float, ...] = ()
    before: int = 1
    after: int = 1
    tied_s: float = 0.0
    overlap: bool = False
    names: tuple[str, ...] = ()

    def __post_init__(self):
        stages, layers = len(self.forward_s), len(self.forward_s[0])
        defaults = {"latency_s": (0.0,) * stages, "state_bytes": (0.0,) * layers, "kept_bytes": (0.0,) * layers, "limit_bytes": (inf,) * stages}
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if not self.names:
            object.__setattr__(self, "names", tuple(f"stage {stage}" for stage in range(stages)))
        for name in ("forward_s", "backward_s", "reduction_s", "transfer_s"):
            rows = getattr(self, name)
            assert len(rows) == stages and all(len(row) == layers for row in rows), name
            for stage, row in enumerate(rows):
                for layer, value in enumerate(row):
                    if not 0 <= value < 1e30:
                        raise HolmesError(f"stage {stage}, layer {layer}: {name} is {value}; a time must be 0 or more, and finite")
        for name in ("latency_s", "state_bytes", "kept_bytes"):
            for index, value in enumerate(getattr(self, name)):
                if not 0 <= value < 1e30:
                    raise HolmesError(f"{name}[{index}] is {value}; it must be 0 or more, and finite")
        if not 0 <= self.tied_s < 1e30:
            raise HolmesError(f"tied_s is {self.tied_s}; a time must be 0 or more, and finite")
        for stage, value in enumerate(self.limit_bytes):
            if not value > 0:
                raise HolmesError(f"{self.names[stage]}: a memory limit of {value} bytes; it must be above 0")
        if self.micro_batches < 1:
            raise HolmesError(f"micro_batches is {self.micro_batches}; it must be 1 or more")
        if self.blocks < stages:
            raise HolmesError(f"{self.blocks} layers are too few for {stages} pipeline stages; every stage needs one")

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    @property
    def blocks(self) -> int:
        """Layers that the partition is about."""
        return len(self.forward_s[0]) - self.before - self.after

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        """Blocks start..stop-1 of a stage as a range of layers: with what comes before the first and after the last."""
        return (start + self.before if start else 0), (stop + self.before if stop < self.blocks else len(self.forward_s[0]))

    def under_way(self, stage: int) -> int:
        """Micro-batches whose activations the stage keeps at most (1F1B)."""
        return min(self.stages - stage, self.micro_batches)

    @cached_property
    def sums(self) -> dict[str, list[list[float]]]:
        """name -> stage -> running sums over layers, from 0. Stages with one row share one list."""
        rows = {name: getattr(self, name) for name in ("forward_s", "backward_s", "reduction_s")}
        rows["memory"] = tuple(
            tuple(state + self.under_way(stage) * kept for state, kept in zip(self.state_bytes, self.kept_bytes)) for stage in range(self.stages)
        )
        known: dict[tuple[float, ...], list[float]] = {}
        return {
            name: [known.setdefault(row, list(accumulate(row, initial=0.0))) for row in table] for name, table in rows.items()
        }

    def exposed_s(self, stage: int, low: int, high: int) -> float:
        """Reduction of layers low..high-1 that is left when the stage's last backward ends."""
        reduction = self.sums["reduction_s"][stage]
        if not self.overlap:
            return reduction[high] - reduction[low] + self.latency_s[stage]
        backward = self.sums["backward_s"][stage]
        base = reduction[low] - backward[low]
        return max(reduction[layer + 1] - backward[layer] for layer in range(low, high)) - base + self.latency_s[stage]

    def tied_wait_s(self) -> float:
        """The tied all-reduce where it takes place: not inside one stage."""
        return self.tied_s if self.stages > 1 else 0.0


@dataclass(frozen=True)
class Estimate:
    """One step under a partition; tuples by stage. compute_s: all micro-batches. reduction_s: all of it; exposed_s: what is left after the
    stage's last backward, with the tied all-reduce. transfer_s: one activation to the next stage, by edge. end_s: when the stage
    has ended all."""

    stage_layers: tuple[int, ...]
    compute_s: tuple[float, ...]
    reduction_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    end_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    fits: tuple[bool, ...]

    @property
    def step_s(self) -> float:
        return max(self.end_s)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Neither computing nor reducing after its backward: the bubble, transfers, and waiting for the slowest stage."""
        return tuple(self.step_s - compute - exposed for compute, exposed in zip(self.compute_s, self.exposed_s))


def predict(costs: StageCosts, stage_layers: Sequence[int]) -> Estimate:
    """estimate() without its formula's error: the schedule pass by pass, which takes a microsecond or two for each."""
    return estimate(costs, stage_layers, simulated_ends)


def estimate(costs: StageCosts, stage_layers: Sequence[int], ends_of: Callable[..., Sequence[float]] = backward_ends) -> Estimate:
    """The predicted step with stage_layers[s] blocks on stage s (all of them, each stage at least one)."""
    assert len(stage_layers) == costs.stages and sum(stage_layers) == costs.blocks and min(stage_layers) > 0, stage_layers
    borders = list(accumulate(stage_layers, initial=0))
    ranges = [costs.bounds(start, stop) for start, stop in zip(borders, borders[1:])]

    def total(name: str) -> list[float]:
        return [costs.sums[name][stage][high] - costs.sums[name][stage][low] for stage, (low, high) in enumerate(ranges)]

    forward, backward, memory = total("forward_s"), total("backward_s"), total("memory")
    transfer = [costs.transfer_s[stage][ranges[stage][1] - 1] for stage in range(costs.stages - 1)]
    exposed = [costs.exposed_s(stage, *ranges[stage]) for stage in range(costs.stages)]
    ends = list(ends_of(forward, backward, transfer, costs.micro_batches))
    if tied := costs.tied_wait_s():
        ends[-1] = ends[0]  # the last stage waits for the first one
        exposed[0], exposed[-1] = exposed[0] + tied, exposed[-1] + tied
    return Estimate(
        stage_layers=tuple(stage_layers),
        compute_s=tuple((f + b) * costs.micro_batches for f, b in zip(forward, backward)),
        reduction_s=tuple(part + latency for part, latency in zip(total("reduction_s"), costs.latency_s)),
        exposed_s=tuple(exposed),
        transfer_s=tuple(transfer),
        end_s=tuple(end + left for end, left in zip(ends, exposed)),
        memory_bytes=tuple(memory),
        fits=tuple(used <= limit for used, limit in zip(memory, costs.limit_bytes)),
    )


def costs_on_site(
    site: Site, order: Sequence[str], sizes: Sizes, model: Model, overlap: bool = False, only: Fabric | None = None
) -> StageCosts:
    """The layers of `model` on the stages of a job of `sizes` whose rank r runs on order[r // processes].

    A stage computes as fast as its slowest GPU and holds what its smallest one does (model.gpu, model.gpus). Groups that share a
    NIC share its rate, as in plan/cost/step.py; only: the fabric of all traffic. HolmesError: fewer layers than stages.
    """
    sizes = sizes.complete(site.world_size)
    layers = model.costs(sizes.tensor, sizes.context, sizes.expert if model.experts else 1)
    if model.tied and sizes.pipeline == 1:  # one matrix, not two copies
        layers = (*layers[:-1], replace(layers[-1], parameters=layers[-1].parameters - model.vocabulary * model.hidden / sizes.tensor))
    if model.layers < sizes.pipeline:
        raise HolmesError(f"{model.source}: {model.layers} layers are too few for {sizes.pipeline} pipeline stages; every stage needs one")
    network = _Network(site, order, sizes, only)
    clusters = clusters_of_stages(site, order, sizes)
    gpus = [[model.gpu_of(name) for name in names] for names in clusters]
    flops = [min(gpu.flops for gpu in own) for own in gpus]
    shards = sizes.data * sizes.context
    gradients = [reduced_parameters(layer, shards, sizes.expert) * model.gradient_width for layer in layers]
    block = next(layer for layer in layers if layer.kind == "block")
    collective = network.collectives(block)  # of a block, forward and backward together
    extra = [[seconds / 2 if layer.kind == "block" else 0.0 for layer in layers] for seconds in collective]
    per_byte, latency = network.reductions(max(gradients))
    per_activation, edge_latency = network.transfers(block.activation_bytes)
    stages = range(sizes.pipeline)
    tied = model.tied and sizes.pipeline > 1
    return StageCosts(
        forward_s=tuple(tuple(x.forward_flops / flops[s] + extra[s][i] for i, x in enumerate(layers)) for s in stages),
        backward_s=tuple(tuple(x.backward_flops / flops[s] + extra[s][i] for i, x in enumerate(layers)) for s in stages),
        reduction_s=tuple(tuple(size * per_byte[s] for size in gradients) for s in stages),
        latency_s=tuple(latency),
        transfer_s=tuple(tuple(x.activation_bytes * per_activation[s] + edge_latency[s] for x in layers) for s in stages),
        micro_batches=model.micro_batches_of(sizes.data),
        state_bytes=tuple(x.parameters * (model.state_bytes + model.sharded_bytes / sizes.data) for x in layers),
        kept_bytes=tuple(x.kept_bytes for x in layers),
        limit_bytes=tuple(min((gpu.memory_bytes or inf) for gpu in own) for own in gpus),
        tied_s=network.tied(model.vocabulary * model.hidden / sizes.tensor * model.gradient_width) if tied else 0.0,
        overlap=overlap,
        names=tuple(f"stage {s} (cluster {', '.join(names)})" for s, names in enumerate(clusters)),
    )


def clusters_of_stages(site: Site, order: Sequence[str], sizes: Sizes) -> list[list[str]]:
    """The names of the clusters that each stage lies on."""
    stride = sizes.strides()["pp"]
    found: list[dict[str, None]] = [{} for _ in range(sizes.pipeline)]
    for rank in range(site.world_size):
        found[rank // stride % sizes.pipeline][site.node_by_name[order[rank // site.processes]].cluster] = None
    return [list(names) for names in found]


class _Network:
    """plan/cost/step.py's predictor, asked for seconds of each byte and for latencies: both are linear in the bytes."""

    def __init__(self, site: Site, order: Sequence[str], sizes: Sizes, only: Fabric | None):
        self.site, self.order, self.sizes, self.only = site, order, sizes, only
        self.layout = Layout(sizes, site.processes)

    def _ask(self, **volume: float) -> tuple[Predictor, list]:
        nothing = {"gradient_bytes": 0.0, "activation_bytes": 0.0, "tensor_bytes": 0.0, "context_bytes": 0.0, "expert_bytes": 0.0}
        predictor = Predictor(self.site, self.layout, Workload(0.0, 0.0, 1, **{**nothing, **volume}), only=self.only)
        return predictor, list(predictor.cut([predictor.class_of[name] for name in self.order]))

    def _linear(self, once: Sequence[float], twice: Sequence[float], size: float) -> tuple[list[float], list[float]]:
        return [(b - a) / size for a, b in zip(once, twice)], [max(0.0, 2 * a - b) for a, b in zip(once, twice)]

    def reductions(self, size: float) -> tuple[list[float], list[float]]:
        """For each stage: seconds of one byte of gradients, seconds of latency."""
        asked = [self._ask(gradient_bytes=factor * size) for factor in (1, 2)]
        return self._linear(*(predictor.breakdown(parts).reduction_s for predictor, parts in asked), size)

    def transfers(self, size: float) -> tuple[list[float], list[float]]:
        """The same for an activation to the next stage; 0 for the last stage."""
        asked = [self._ask(activation_bytes=factor * size) for factor in (1, 2)]
        return self._linear(*((*predictor.breakdown(parts).transfer_s, 0.0) for predictor, parts in asked), size)

    def collectives(self, block: Layer) -> list[float]:
        """For each stage: seconds of a block's tensor, context and expert groups."""
        predictor, parts = self._ask(tensor_bytes=block.tensor_bytes, context_bytes=block.context_bytes, expert_bytes=block.expert_bytes)
        return [seconds for part in parts for seconds in predictor.component(part).collectives]

    def tied(self, size: float) -> float:
        """All-reduce of `size` bytes between a rank of the first stage and its twin of the last; the slowest pair."""
        stride, processes = self.sizes.strides()["pp"], self.site.processes
        slowest, seen = 0.0, set()
        for rank in range(self.site.world_size):
            if rank // stride % self.sizes.pipeline:
                continue
            names = self.order[rank // processes], self.order[(rank + (self.sizes.pipeline - 1) * stride) // processes]
            if names in seen or names[0] == names[1]:
                continue
            seen.add(names)
            fabric = self.only or self.site.shared_fabric(names)
            slowest = max(slowest, allreduce_seconds(size, [1, 1], fabric, sharers=min(processes, stride)))
        return slowest

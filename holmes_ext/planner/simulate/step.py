"""One training step of every rank, simulated: what planner/search compares and `holmes plan` draws.

    network, placement, model, Execution  -- JobStep -->  Step

Deterministic; 1 to 100 ms for each thousand passes (stages x micro-batches x kinds of pipelines). Seconds are
price()'s, the order schedules.py's, what travels transfers.py's, when collectives.py's, who shares what
events.py's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import CORES, Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.price import price
from holmes_ext.plan.cost.stages import RankModel, StageCosts, compressed_share
from holmes_ext.plan.placement import Fold, Placement
from holmes_ext.plan.schedule import PassOrder
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.simulate.collective_ops import CollectiveOps, Operations
from holmes_ext.planner.simulate.events import Op, Simulation, Span, Transfer, Transfers
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.schedules import schedule
from holmes_ext.planner.simulate.transfers import TransferMaker

CAUSES = (
    "compute",
    "optimizer",
    "bubble",
    "send_inside",
    "send_across",
    "reduce_inside",
    "reduce_across",
)
_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
_CAUSES = {
    "forward": "compute",
    "backward": "compute",
    "weights": "compute",
    "optimizer": "optimizer",
    "idle": "bubble",
    "send": "send",
}


@dataclass(frozen=True)
class Timeline:
    """Ranks that do the same at the same time; spans: by start, without overlap."""

    stage: int
    ranks: tuple[int, ...]
    cluster: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Step:
    """step_s: to the end of the last rank; ranks: one Timeline for all that are alike; carried: bytes through
    a NIC of each kind (class of node, fabric, direction) and each hop, by its key."""

    step_s: float
    ranks: tuple[Timeline, ...]
    carried: dict[Hashable, float]

    @property
    def causes(self) -> dict[str, float]:
        """Mean seconds of a rank; their sum is step_s.

        compute, optimizer, bubble (idle, waiting for others); exposed communication in a cluster ("_inside")
        and between clusters ("_across"): sends between stages, and reductions with what ZeRO gathers.
        """
        total = dict.fromkeys(CAUSES, 0.0)
        world = sum(len(line.ranks) for line in self.ranks)
        for line in self.ranks:
            share, busy = len(line.ranks) / world, 0.0
            for span in line.spans:
                cause = _CAUSES.get(span.kind, "reduce")
                if cause in ("send", "reduce"):
                    cause += "_across" if span.across else "_inside"
                total[cause] += share * (span.end - span.start)
                busy += span.end - span.start
            total["bubble"] += share * (self.step_s - busy)
        return total


def simulate(
    site: Site,
    order: Sequence[str],
    sizes: Sizes,
    model: Model,
    execution: Execution = Execution(),
    links: Links = Links(),
    only: Fabric | None = None,
    costs: StageCosts | None = None,
) -> Step:
    """Rank r runs on order[r // processes]. only: the fabric of all traffic (stock); costs: instead of
    price()'s. HolmesError: what does not fit together."""
    network = Network(site, links, only)
    placement = network.placement(order, sizes.complete(site.world_size))
    costs = costs or price(network, placement, RankModel.of(model, placement.sizes))
    return JobStep(network, placement, model, execution, costs).step()


class JobStep:
    """What is simulated, of any number of micro-batches. actors: (kind of pipeline, stage)."""

    def __init__(
        self,
        network: Network,
        placement: Placement,
        model: Model,
        run: Execution,
        costs: StageCosts,
    ):
        sizes, self.network, self.run, self.costs = placement.sizes, network, run, costs
        if run.zero > 1 and sizes.pipeline > 1:
            problem = f"zero is {run.zero} with {sizes.pipeline} pipeline stages"
            raise HolmesError(f"{problem}; under a pipeline it can be 0 or 1")
        self.fold = network.remember(("fold", placement), lambda: Fold(placement))
        self.model, layers = model, model.layers_of(sizes)
        maker = TransferMaker(network, run.message_s)
        blocks = _blocks(run.stage_layers, costs.blocks, sizes.pipeline * run.virtual)
        self.ranges = costs.ranges(blocks)
        self.passes = PassOrder.parse(run.schedule) if run.schedule else None
        self.collectives = CollectiveOps(network, self.fold, run, self.ranges, layers, model, maker)
        messages = self._messages(maker, layers[0].activation_bytes)
        self.templates = {**messages, **self.collectives.transfers}
        kinds = range(len(self.fold.kinds))
        self.actors = [(kind, stage) for kind in kinds for stage in range(sizes.pipeline)]
        self.capacities = {**maker.capacities, CORES: run.cores * network.links.core_bps or inf}

    def _messages(self, maker: TransferMaker, size: float) -> dict[Hashable, Transfer]:
        """Activations to the next (virtual) stage and their gradients back, by (letter, place, kind)."""
        transfers: dict[Hashable, Transfer] = {}
        stages = len(self.fold.stages)
        for kind in range(len(self.fold.kinds)):
            for place in range(stages * self.run.virtual - 1):
                stage, following = place % stages, (place + 1) % stages
                for letter, ends in (("a", (stage, following)), ("g", (following, stage))):
                    transfers[letter, place, kind] = self._message(maker, kind, *ends, size)
        return transfers

    def _message(
        self, maker: TransferMaker, kind: int, stage: int, other: int, size: float
    ) -> Transfer:
        """From a stage to another. Tensor ranks share out what crosses on Ethernet, and gather it then."""
        buffered, gathered_s, fold = size <= self.run.buffer_bytes, 0.0, self.fold
        clusters = [self.network.cluster(fold.kind_on(kind, at)) for at in (stage, other)]
        rates = [self.model.gpu_of(cluster).link_bps for cluster in clusters]
        load = self.network.message(fold.stage_link(kind, stage, other), min(rates))
        if stage == other:
            return Transfer(2, buffered=buffered)
        if load.fabric is not None and load.fabric.name == ETHERNET:
            share = (
                1.0
                if self.network.only
                else compressed_share(self.run.compression, self.model.activation_width)
            )
            slices = self._slices
            gathered_s = 8 * (slices - 1) / slices * size / rates[1] if rates[1] else 0.0
            size *= share / slices
        transfer = maker.message(load, size, gathered_s)
        return replace(
            transfer, channel=(kind, stage, other) if load.fabric else None, buffered=buffered
        )

    @property
    def _slices(self) -> int:
        sizes = self.fold.of.sizes
        cut = (
            self.network.only is None
            and self.run.cut
            and sizes.tensor_inside(self.network.processes)
        )
        return self.model.copies(sizes) if cut else 1

    def simulation(self, micro_batches: int, begins: Sequence[float] = ()) -> Simulation:
        """Of so many, not yet run. begins: seconds until each kind of pipelines begins."""
        transfers, programs = Transfers(self.templates), []
        for kind, stage in self.actors:
            ops = self._program(kind, stage, micro_batches)
            if begins:
                ops = chain([("compute", "idle", begins[kind], -1, 0)], ops)
            programs.append(list(self._software(ops, transfers, kind, stage)))
        return Simulation(programs, transfers, self.capacities)

    def apart(self) -> list[set[int]]:
        """Kinds of pipelines, those together that share something before their gradients are reduced."""
        kinds_uses: list[tuple[set[int], set[Hashable]]] = [
            ({kind}, set()) for kind in range(len(self.fold.kinds))
        ]
        for tag, transfer in self.templates.items():
            if isinstance(tag, tuple) and tag[0] in ("a", "g"):
                kinds_uses[tag[2]][1].update(
                    nic for nic, _ in transfer.uses if self.capacities[nic] < inf
                )
        joined: list[tuple[set[int], set[Hashable]]] = []
        for kinds, uses in kinds_uses:
            for other in [group for group in joined if group[1] & uses]:
                joined.remove(other)
                kinds, uses = kinds | other[0], uses | other[1]
            joined.append((kinds, uses))
        early = (
            self.run.zero == 1 and self.run.gather_overlap or self.run.zero > 1 or self.run.cores
        )
        return [set(range(len(kinds_uses)))] if early else [kinds for kinds, _ in joined]

    def step(self) -> Step:
        """Of all micro-batches."""
        simulation, lines = self.simulation(self.costs.micro_batches), []
        for (kind, stage), spans in zip(self.actors, simulation.run()):
            cluster = self.network.cluster(self.fold.kind_on(kind, stage))
            lines.append(Timeline(stage, self.fold.ranks(kind, stage), cluster, tuple(spans)))
        carried = {nic: bits / 8 for nic, bits in simulation.carried.items() if nic != CORES}
        return Step(end_of(line.spans for line in lines), tuple(lines), carried)

    def _program(self, kind: int, stage: int, micro_batches: int) -> Iterator[Op]:
        """All that a rank of a kind and stage does."""
        run, costs, collectives = self.run, self.costs, self.collectives
        stages, last = costs.stages, micro_batches - 1
        sums = {"F": costs.sums["forward_s"][stage], "B": costs.sums["backward_s"][stage]}
        sums["W"] = costs.sums["weights_s"][stage]
        sums["I"] = [whole - later for whole, later in zip(sums["B"], sums["W"])]
        yield from collectives.before(kind, stage)
        in_flight = run.in_flight[stage] if run.in_flight else 0
        how = run.virtual, in_flight, run.breadth_first, self.passes
        for op in schedule(run.engine.sends, stage, stages, micro_batches, *how):
            if op[0] in ("post", "wait"):
                yield self._exchange(op, kind, stage)
                continue
            letter, micro_batch, chunk = op
            low, high = self.ranges[chunk * stages + stage]
            final = letter in "BW" and micro_batch == last
            along = collectives.along(kind, stage, chunk, letter, micro_batch, final)
            if run.block_s and letter != "W":
                blocks = min(high, costs.before + costs.blocks) - max(low, costs.before)
                yield ("software", _KINDS[letter], run.block_s * blocks, micro_batch, chunk)
            for seconds, ops in _pieces(sums[letter], low, high, letter == "F", *along):
                yield ("compute", _KINDS[letter], seconds, micro_batch, chunk)
                yield from ops
        yield from collectives.after(kind, stage)
        yield ("software", "optimizer", run.step_s, -1, 0)
        yield from collectives.report(kind, stage)

    def _exchange(self, op: Op, kind: int, stage: int) -> Op:
        """Of a schedule's operation that of the simulation."""
        message, place, micro_batch = op[1]
        sends = (place + (message == "g")) % self.costs.stages == stage
        tag, *sent = (((what, at, kind), number) for what, at, number in op[1:])
        if op[0] == "post":
            return (
                ("post", tag) if sends else ("post", tag, True, *(sent if self.run.notices else ()))
            )
        return ("wait", tag, "send", micro_batch, *((True,) if sends else ()))

    def _software(
        self, ops: Iterator[Op], transfers: dict[Hashable, Transfer], kind: int, stage: int
    ) -> Iterator[Op]:
        """Software's seconds as flows through shared cores, at most one a rank (a second is as many bits as a
        core can send, so both get the same share); as computing where every rank has its own."""
        ranks, core_bps = self.fold.count[kind], self.network.links.core_bps
        for number, op in enumerate(ops):
            if op[0] != "software":
                yield op
            elif not self.run.cores:
                yield ("compute", *op[1:])
            elif op[2] > 0:
                tag = ("software", (kind, stage), number)
                uses = ((CORES, ranks),)
                transfers[tag] = Transfer(1, bits=op[2] * core_bps, limit_bps=core_bps, uses=uses)
                yield from (("post", tag), ("wait", tag, op[1], op[3]))


def end_of(spans: Iterable[Sequence[Span]]) -> float:
    """Of the last actor; seconds."""
    return max(span[-1].end for span in spans if span)


def _blocks(blocks: Sequence[int], layers: int, parts: int) -> Sequence[int]:
    """Of every (virtual) stage."""
    blocks = blocks or uniform(layers, parts)
    if len(blocks) != parts or sum(blocks) != layers or min(blocks) < 1:
        said = ",".join(map(str, blocks))
        needs = f"they must be {parts} numbers above 0 whose sum is {layers} layers"
        raise HolmesError(f"stage_layers {said}: {needs}")
    return blocks


def _pieces(
    sums: Sequence[float],
    low: int,
    high: int,
    forward: bool,
    needs: Operations,
    launches: Operations,
) -> Iterator[tuple[float, list[Op]]]:
    """(seconds, operations then) of a pass over layers [low, high), cut where weights are needed or gradients
    leave."""
    at = sums[low if forward else high]
    for layer in sorted({*needs, *launches}, reverse=not forward):
        for ops, border in (
            (needs.get(layer), layer + (not forward)),
            (launches.get(layer), layer + forward),
        ):
            if ops:
                yield abs(sums[border] - at), ops
                at = sums[border]
    yield abs(sums[high if forward else low] - at), []

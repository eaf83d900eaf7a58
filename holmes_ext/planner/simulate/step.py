"""Simulation of one training step of every rank: the step times that planner/search compares.

    network, placement, model, Execution  -- JobStep -->  Step

    costs of passes        plan/cost/price.py
    order of passes        schedules.py
    bytes of transfers     transfers.py
    collectives            collectives.py, collective_ops.py
    sharing of NICs        events.py

The simulation is deterministic. It takes 1 to 100 ms for a thousand passes (stages x micro-batches x kinds of
pipelines).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import NamedTuple

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

#: Causes of the seconds of a step (Step.causes).
CAUSES = (
    "compute",
    "optimizer",
    "bubble",
    "send_inside",
    "send_across",
    "reduce_inside",
    "reduce_across",
)
#: Letter of a pass (F: forward, B: backward, I and W: its gradients of input and weights) -> kind of span.
_SPAN_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
#: Kind of span -> cause; the other kinds are reductions.
_CAUSES = {
    "forward": "compute",
    "backward": "compute",
    "weights": "compute",
    "optimizer": "optimizer",
    "idle": "bubble",
    "send": "send",
}
#: Messages between stages: activations and their gradients.
_ACTIVATION, _GRADIENT = "a", "g"


@dataclass(frozen=True)
class Timeline:
    """Spans of ranks that do the same at the same time."""

    stage: int
    ranks: tuple[int, ...]
    cluster: str
    #: Ordered by start, without overlap.
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Step:
    """Result of a simulation: one training step."""

    #: Seconds to the end of the last rank.
    step_s: float
    #: Timelines of groups of equal ranks.
    ranks: tuple[Timeline, ...]
    #: (class of node, fabric, direction), or key of a hop -> bytes through one NIC, or the hop.
    carried: dict[Hashable, float]

    @property
    def causes(self) -> dict[str, float]:
        """Mean seconds of a rank by cause (CAUSES); their sum is step_s.

        "bubble" is idle time. Exposed communication in a cluster ("_inside") and between clusters
        ("_across") is divided into sends between stages, and reductions with the gathers of ZeRO.
        """
        total_s = dict.fromkeys(CAUSES, 0.0)
        world = sum(len(line.ranks) for line in self.ranks)
        for line in self.ranks:
            share = len(line.ranks) / world
            busy_s = 0.0
            for span in line.spans:
                cause = _CAUSES.get(span.kind, "reduce")
                if cause in ("send", "reduce"):
                    cause += "_across" if span.across else "_inside"
                total_s[cause] += share * (span.end - span.start)
                busy_s += span.end - span.start
            total_s["bubble"] += share * (self.step_s - busy_s)
        return total_s


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
    """Simulate one training step.

    Args:
        site: Nodes and networks.
        order: Names of the nodes in rank order: rank r runs on order[r // processes].
        sizes: Parallel sizes.
        model: Model to train.
        execution: Schedule and overlap.
        links: Measured links.
        only: Fabric of all traffic, as without holmes.
        costs: Costs of the stages instead of price()'s.

    Raises:
        HolmesError: Sizes, layers and schedule do not fit each other.
    """
    network = Network(site, links, only)
    placement = network.placement(order, sizes.complete(site.world_size))
    costs = costs or price(network, placement, RankModel.of(model, placement.sizes))
    return JobStep(network, placement, model, execution, costs).step()


class _Actor(NamedTuple):
    """All ranks of a stage in pipelines of one kind (on equal nodes): they do the same at the same time."""

    pipeline_kind: int
    stage: int


class _LinkedKinds(NamedTuple):
    """Pipeline classes whose messages use common NICs or hops."""

    kinds: set[int]
    resources: set[Hashable]


class JobStep:
    """A job's step, ready to be simulated with any number of micro-batches."""

    def __init__(
        self,
        network: Network,
        placement: Placement,
        model: Model,
        run: Execution,
        costs: StageCosts,
    ):
        """Prepare the transfers of a step.

        Args:
            run: Schedule and overlap.
            costs: Times and memory of the stages.

        Raises:
            HolmesError: ZeRO 2 or 3 with a pipeline, or layers that do not fit the stages.
        """
        sizes = placement.sizes
        self.network = network
        self.model = model
        self.run = run
        self.costs = costs
        if run.zero > 1 and sizes.pipeline > 1:
            problem = f"zero is {run.zero} with {sizes.pipeline} pipeline stages"
            raise HolmesError(f"{problem}; under a pipeline it can be 0 or 1")
        self.fold = network.remember(("fold", placement), lambda: Fold(placement))
        layers = model.layers_of(sizes)
        maker = TransferMaker(network, run.message_s)
        blocks = _blocks_of_chunks(run.stage_layers, costs.blocks, sizes.pipeline * run.virtual)
        #: First layer and end of every chunk; chunk c of stage s is at c x stages + s.
        self.ranges = costs.ranges(blocks)
        self.passes = PassOrder.parse(run.schedule) if run.schedule else None
        self.collectives = CollectiveOps(network, self.fold, run, self.ranges, layers, model, maker)
        messages = self._messages(maker, layers[0].activation_bytes)
        #: Tag without micro-batch -> transfer.
        self.templates = {**messages, **self.collectives.transfers}
        self.actors = [
            _Actor(kind, stage)
            for kind in range(len(self.fold.pipeline_classes))
            for stage in range(sizes.pipeline)
        ]
        shared_cores_bps = run.cores * network.links.core_bps or inf
        self.capacities = {**maker.capacities, CORES: shared_cores_bps}

    def _messages(self, maker: TransferMaker, size: float) -> dict[Hashable, Transfer]:
        """Return the messages between neighbouring chunks: (letter, place, pipeline class) -> transfer.

        Letter "a" is the activation from the chunk at `place` to the next chunk, "g" its gradient back. The
        place of a chunk is its number in the order of the forward pass, over all stages.

        Args:
            maker: Factory of transfers.
            size: Bytes of an activation.
        """
        transfers: dict[Hashable, Transfer] = {}
        stages = len(self.fold.stages)
        for kind in range(len(self.fold.pipeline_classes)):
            for place in range(stages * self.run.virtual - 1):
                stage = place % stages
                next_stage = (place + 1) % stages
                down = self._message(maker, kind, stage, next_stage, size)
                up = self._message(maker, kind, next_stage, stage, size)
                transfers[_ACTIVATION, place, kind] = down
                transfers[_GRADIENT, place, kind] = up
        return transfers

    def _message(
        self, maker: TransferMaker, kind: int, stage: int, other: int, size: float
    ) -> Transfer:
        """Return a message of `size` bytes from a stage to another.

        On Ethernet between nodes, the tensor parallel ranks send a slice each, and gather the slices on the
        receiving node.

        Args:
            kind: Pipeline class.
            stage: Sending stage.
            other: Receiving stage.
            size: Bytes of the whole message, uncompressed.
        """
        fold = self.fold
        is_buffered = size <= self.run.buffer_bytes
        sender_bps = self._gpu_link_bps(kind, stage)
        receiver_bps = self._gpu_link_bps(kind, other)
        stage_link = fold.stage_link(kind, stage, other)
        load = self.network.message(stage_link, min(sender_bps, receiver_bps))
        if stage == other:  # between chunks of one stage: no time
            return Transfer(parties=2, buffered=is_buffered)
        gathered_s = 0.0
        if load.fabric is not None and load.fabric.name == ETHERNET:
            slices = self._slices
            if receiver_bps:
                gathered_s = 8 * (slices - 1) / slices * size / receiver_bps
            size *= self._compressed_share / slices
        transfer = maker.message(load, size, gathered_s)
        # Messages of one channel follow each other.
        channel = (kind, stage, other) if load.fabric else None
        return replace(transfer, channel=channel, buffered=is_buffered)

    def _gpu_link_bps(self, kind: int, stage: int) -> float:
        """Return the rate between the GPUs of a node in bits/s."""
        cluster = self.network.cluster(self.fold.node_type_on(kind, stage))
        return self.model.gpu_of(cluster).link_bps

    @property
    def _compressed_share(self) -> float:
        """Bytes sent for each byte of an activation on Ethernet."""
        if self.network.single_fabric:
            return 1.0
        return compressed_share(self.run.compression, self.model.activation_width)

    @property
    def _slices(self) -> int:
        """Tensor parallel ranks that share out a message on Ethernet."""
        sizes = self.fold.full_placement.sizes
        is_sliced = (
            self.network.single_fabric is None
            and self.run.cut
            and sizes.tensor_inside(self.network.processes)
        )
        return self.model.copies(sizes) if is_sliced else 1

    def simulation(self, micro_batches: int, begins: Sequence[float] = ()) -> Simulation:
        """Return a simulation of so many micro-batches, not yet run.

        Args:
            micro_batches: Number of micro-batches.
            begins: Seconds until each pipeline class begins; () for all at once.
        """
        transfers = Transfers(self.templates)
        programs = []
        for actor in self.actors:
            ops = self._program(actor.pipeline_kind, actor.stage, micro_batches)
            if begins:
                # An operation: (name, kind of span, seconds, micro-batch, chunk).
                idle = ("compute", "idle", begins[actor.pipeline_kind], -1, 0)
                ops = chain([idle], ops)
            programs.append(list(self._with_software(ops, transfers, actor)))
        return Simulation(programs, transfers, self.capacities)

    def apart(self) -> list[set[int]]:
        """Divide the pipeline classes into groups that share nothing before their gradients are reduced.

        Two kinds share something if their messages use the same NIC or link, or if a collective of both runs
        before the reduction.
        """
        all_kinds = range(len(self.fold.pipeline_classes))
        has_early_collectives = (
            (self.run.zero == 1 and self.run.gather_overlap) or self.run.zero > 1 or self.run.cores
        )
        if has_early_collectives:
            return [set(all_kinds)]
        # Pipeline class -> NICs and links of limited rate that its messages use.
        resources_of: list[set[Hashable]] = [set() for _ in all_kinds]
        for tag, transfer in self.templates.items():
            if isinstance(tag, tuple) and tag[0] in (_ACTIVATION, _GRADIENT):
                _, _, kind = tag
                for resource, _ in transfer.uses:
                    if self.capacities[resource] < inf:
                        resources_of[kind].add(resource)
        groups: list[_LinkedKinds] = []
        for kind, resources in enumerate(resources_of):
            joined = _LinkedKinds({kind}, resources)
            # Join the groups that use any of the same resources.
            for other in [group for group in groups if group.resources & joined.resources]:
                groups.remove(other)
                joined = _LinkedKinds(
                    joined.kinds | other.kinds, joined.resources | other.resources
                )
            groups.append(joined)
        return [group.kinds for group in groups]

    def step(self) -> Step:
        """Simulate the step with all micro-batches."""
        simulation = self.simulation(self.costs.micro_batches)
        timelines = []
        for (kind, stage), spans in zip(self.actors, simulation.run()):
            cluster = self.network.cluster(self.fold.node_type_on(kind, stage))
            ranks = self.fold.ranks(kind, stage)
            timelines.append(Timeline(stage, ranks, cluster, spans=tuple(spans)))
        carried_bytes = {nic: bits / 8 for nic, bits in simulation.carried.items() if nic != CORES}
        step_s = end_of(timeline.spans for timeline in timelines)
        return Step(step_s, ranks=tuple(timelines), carried=carried_bytes)

    def _program(self, kind: int, stage: int, micro_batches: int) -> Iterator[Op]:
        """Yield all operations of a rank (events.py), and of software: ("software", kind, seconds, ...).

        Args:
            kind: Kind of the rank's pipeline.
        """
        run = self.run
        costs = self.costs
        collectives = self.collectives
        # Letter of a pass -> running sums of its seconds over the layers.
        sums = {
            "F": costs.sums["forward_s"][stage],
            "B": costs.sums["backward_s"][stage],
            "W": costs.sums["weights_s"][stage],
        }
        sums["I"] = [both - weights for both, weights in zip(sums["B"], sums["W"])]
        yield from collectives.before(kind, stage)
        in_flight = run.in_flight[stage] if run.in_flight else 0
        ops = schedule(
            run.engine.sends,
            stage,
            costs.stages,
            micro_batches,
            virtual=run.virtual,
            in_flight=in_flight,
            breadth_first=run.breadth_first,
            planned=self.passes,
        )
        for op in ops:
            if op[0] in ("post", "wait"):
                yield self._exchange(op, kind, stage)
                continue
            letter, micro_batch, chunk = op
            low, high = self.ranges[chunk * costs.stages + stage]
            is_final = letter in "BW" and micro_batch == micro_batches - 1
            needs, launches = collectives.along(kind, stage, chunk, letter, micro_batch, is_final)
            span_kind = _SPAN_KINDS[letter]
            if run.block_s and letter != "W":
                blocks = min(high, costs.before + costs.blocks) - max(low, costs.before)
                yield ("software", span_kind, run.block_s * blocks, micro_batch, chunk)
            pieces = _pieces(sums[letter], low, high, letter == "F", needs, launches)
            for seconds, collective_ops in pieces:
                yield ("compute", span_kind, seconds, micro_batch, chunk)
                yield from collective_ops
        yield from collectives.after(kind, stage)
        yield ("software", "optimizer", run.step_s, -1, 0)
        yield from collectives.report(kind, stage)

    def _exchange(self, op: Op, kind: int, stage: int) -> Op:
        """Return the simulation's operation for a schedule's post or wait of a message.

        A post says that the sender or the receiver is ready for the message.

        Args:
            op: Operation of schedules.py; the result is one of events.py.
            kind: Kind of the rank's pipeline.
            stage: The rank's stage.
        """
        operation, message, *sent_before = op
        letter, place, micro_batch = message
        tag = ((letter, place, kind), micro_batch)
        # The activation leaves the chunk at `place`; its gradient leaves the chunk after it.
        sending_place = place + 1 if letter == _GRADIENT else place
        is_sender = sending_place % self.costs.stages == stage
        if operation == "wait":
            if is_sender:  # a fifth item marks the sender's wait
                return ("wait", tag, "send", micro_batch, True)
            return ("wait", tag, "send", micro_batch)
        if is_sender:
            return ("post", tag)
        if not self.run.notices:  # a third item marks the receiver's post
            return ("post", tag, True)
        # The receiver's notice travels behind these messages, if they are still leaving.
        sent_tags = [((sent, at, kind), number) for sent, at, number in sent_before]
        return ("post", tag, True, *sent_tags)

    def _with_software(
        self, ops: Iterator[Op], transfers: dict[Hashable, Transfer], actor: _Actor
    ) -> Iterator[Op]:
        """Yield a rank's operations with those of software replaced by others that the simulation has.

        Software becomes computation, or a flow of bits through the CPU cores if ranks share these. A flow
        uses at most one core a rank. A second counts as many bits as a core can send in it, so software and
        bytes sent get equal shares of the cores.

        Args:
            transfers: Transfers of the simulation; the flows are added to them.
        """
        ranks = self.fold.count[actor.pipeline_kind]
        core_bps = self.network.links.core_bps
        for number, op in enumerate(ops):
            if op[0] != "software":
                yield op
                continue
            _, kind, seconds, micro_batch, chunk = op
            if not self.run.cores:
                yield ("compute", kind, seconds, micro_batch, chunk)
            elif seconds > 0:
                tag = ("software", tuple(actor), number)
                uses = ((CORES, ranks),)
                bits = seconds * core_bps
                transfers[tag] = Transfer(1, bits=bits, limit_bps=core_bps, uses=uses)
                yield ("post", tag)
                yield ("wait", tag, kind, micro_batch)


def end_of(spans: Iterable[Sequence[Span]]) -> float:
    """Return the end of the last span of all actors, in seconds."""
    return max(span[-1].end for span in spans if span)


def _blocks_of_chunks(blocks: Sequence[int], layers: int, parts: int) -> Sequence[int]:
    """Return the number of blocks of every chunk.

    Args:
        blocks: Blocks of every chunk; () for the same number on each.
        layers: Blocks of the model.
        parts: Number of chunks, of all stages together.

    Raises:
        HolmesError: `blocks` is no split of the layers.
    """
    blocks = blocks or uniform(layers, parts)
    if len(blocks) != parts or sum(blocks) != layers or min(blocks) < 1:
        given = ",".join(map(str, blocks))
        needed = f"they must be {parts} numbers above 0 whose sum is {layers} layers"
        raise HolmesError(f"stage_layers {given}: {needed}")
    return blocks


def _pieces(
    sums: Sequence[float],
    low: int,
    high: int,
    forward: bool,
    needs: Operations,
    launches: Operations,
) -> Iterator[tuple[float, list[Op]]]:
    """Divide a pass where weights are needed or gradients are sent.

    Args:
        sums: Running sums of the seconds over the layers: sums[n] is of the first n layers.
        low: First layer of the pass.
        high: End of its layers.
        forward: The pass goes from `low` to `high`, else from `high` to `low`.
        needs: Layer -> operations before it.
        launches: Layer -> operations after it.

    Yields:
        Seconds of a part of the pass, and the operations that follow it.
    """
    done_s = sums[low if forward else high]  # running sum up to which the pass is yielded
    for layer in sorted({*needs, *launches}, reverse=not forward):
        begin, end = (layer, layer + 1) if forward else (layer + 1, layer)
        for ops, border in ((needs.get(layer), begin), (launches.get(layer), end)):
            if ops:
                yield abs(sums[border] - done_s), ops
                done_s = sums[border]
    yield abs(sums[high if forward else low] - done_s), []

"""Simulation of a training step of every rank: the step times that planner/search compares.

    network, placement, model, Execution  -- JobStep -->  Step

    costs of passes        plan/cost/price.py
    order of passes        schedules.py
    bytes of transfers     transfers.py
    collectives            collectives.py, collective_ops.py
    sharing of NICs        events.py

The simulation is deterministic. It takes 1 to 100 ms for a thousand passes (stages x micro-batches
x pipeline classes).
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
from holmes_ext.plan.cost.price import price
from holmes_ext.plan.cost.stages import RankModel, StageCosts, compressed_share
from holmes_ext.plan.placement import Fold, Placement
from holmes_ext.plan.schedule import PassOrder
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.simulate.collective_ops import CollectiveOps
from holmes_ext.planner.simulate.events import (
    AS_RECEIVER,
    AS_SENDER,
    NO_CHUNK,
    NO_MICRO_BATCH,
    Op,
    Simulation,
    Span,
    Transfer,
    Transfers,
)
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.pass_pieces import blocks_of_chunks, pass_pieces
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
#: Letter of a pass (F: forward, B: backward, I and W: its gradients of input and weights) -> kind
#: of span.
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
    """Activities over time (spans) of ranks that do the same at the same time."""

    stage: int
    ranks: tuple[int, ...]
    cluster: str
    #: Ordered by start, without overlap.
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Step:
    """Result of a simulation: a training step."""

    #: Seconds to the end of the last rank.
    step_s: float
    #: Timelines of groups of equal ranks.
    ranks: tuple[Timeline, ...]
    #: (class of node, fabric, direction), or key of a hop -> bytes through a NIC, or the hop.
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
    """Simulate a training step.

    Args:
        site: Nodes and networks.
        order: Names of the nodes in rank order: rank r runs on order[r // processes].
        sizes: Parallel sizes.
        links: Measured links.
        only: Fabric that carries all traffic, as in a job without this plugin. None: the groups
            inside a cluster use its fast fabric, the others Ethernet.
        costs: Costs of the stages instead of price()'s.

    Raises:
        HolmesError: Sizes, layers and schedule do not fit each other.
    """
    network = Network(site, links, only)
    placement = network.placement(order, sizes.complete(site.world_size))
    costs = costs or price(network, placement, RankModel.of(model, placement.sizes))
    return JobStep(network, placement, model, execution, costs).step()


class _Actor(NamedTuple):
    """All ranks of a stage that do the same at the same time: those in pipelines on equal nodes (a class)."""

    pipeline_class: int
    stage: int


class _LinkedClasses(NamedTuple):
    """Pipeline classes (pipelines on equal nodes) whose messages share NICs or WAN links."""

    pipeline_classes: set[int]
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
        """Prepare a training step for simulation: create its transfers and its actors.

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
        # A fold has an actor for all equal ranks. The network caches it for all jobs of a search.
        self.fold = network.remember(("fold", placement), lambda: Fold(placement))
        layers = model.layers_of(sizes)  # embedding, transformer blocks, output layer
        embedding, *_ = layers
        maker = TransferMaker(network, run.message_s)
        chunks = sizes.pipeline * run.virtual  # of all stages
        blocks = blocks_of_chunks(run.stage_layers, costs.blocks, chunks)
        #: First layer and end of every chunk, in the order of the forward pass: chunk c of stage s
        #: is the item c x stages + s.
        self.ranges = costs.ranges(blocks)
        self.passes = PassOrder.parse(run.schedule) if run.schedule else None
        self.collectives = CollectiveOps(network, self.fold, run, self.ranges, layers, model, maker)
        # All layers pass on activations of the same size.
        messages = self._messages(maker, embedding.activation_bytes)
        #: Tag without micro-batch -> transfer, to be copied for each micro-batch.
        self.templates = {**messages, **self.collectives.transfers}
        self.actors = [
            _Actor(pipeline_class, stage)
            for pipeline_class in range(len(self.fold.pipeline_classes))
            for stage in range(sizes.pipeline)
        ]
        # 0 cores: every rank has a core of its own, so the CPU limits no flow.
        shared_cores_bps = run.cores * network.links.core_bps or inf
        self.capacities = {**maker.capacities, CORES: shared_cores_bps}

    def _messages(self, maker: TransferMaker, size: float) -> dict[Hashable, Transfer]:
        """Return (letter, virtual stage, pipeline class) -> message between neighbouring chunks.

        Letter "a" is the activation from a virtual stage to the next, "g" its gradient back. A
        virtual stage is a chunk of layers, numbered over all stages in the order of the forward
        pass. A pipeline class is all pipelines on equal nodes.

        Args:
            maker: Factory of transfers.
            size: Bytes of an activation.
        """
        transfers: dict[Hashable, Transfer] = {}
        stages = len(self.fold.stages)
        for pipeline_class in range(len(self.fold.pipeline_classes)):
            for virtual_stage in range(stages * self.run.virtual - 1):
                stage = virtual_stage % stages
                next_stage = (virtual_stage + 1) % stages
                down = self._message(maker, pipeline_class, stage, next_stage, size)
                up = self._message(maker, pipeline_class, next_stage, stage, size)
                transfers[_ACTIVATION, virtual_stage, pipeline_class] = down
                transfers[_GRADIENT, virtual_stage, pipeline_class] = up
        return transfers

    def _message(
        self, maker: TransferMaker, pipeline_class: int, stage: int, other: int, size: float
    ) -> Transfer:
        """Return the transfer of a message of `size` bytes from a stage to another.

        On Ethernet between nodes, tensor parallel ranks send a slice each if the job allows it
        (_slices); the receiving node gathers them. A message of at most run.buffer_bytes is
        buffered: its sender goes on once the receiver is ready, before the bytes have left.

        Args:
            pipeline_class: Number of the class of pipelines: all pipelines on equal nodes.
            stage: Sending stage.
            other: Receiving stage.
            size: Bytes of the whole message, uncompressed.
        """
        fold = self.fold
        is_buffered = size <= self.run.buffer_bytes
        sender_bps = self._gpu_link_bps(pipeline_class, stage)
        receiver_bps = self._gpu_link_bps(pipeline_class, other)
        if stage == other:  # between chunks of the same stage: no time
            return Transfer(parties=2, buffered=is_buffered)
        stage_link = fold.stage_link(pipeline_class, stage, other)
        load = self.network.message(stage_link, min(sender_bps, receiver_bps))
        gathered_s = 0.0
        if load.fabric is not None and load.fabric.name == ETHERNET:
            slices = self._slices
            if receiver_bps:  # the GPUs gather decompressed slices, hence the full `size`
                gathered_s = 8 * (slices - 1) / slices * size / receiver_bps
            size *= self._compressed_share / slices
        transfer = maker.message(load, size, gathered_s)
        # Messages of a channel follow each other, as on a connection.
        channel = (pipeline_class, stage, other) if load.fabric else None
        return replace(transfer, channel=channel, buffered=is_buffered)

    def _gpu_link_bps(self, pipeline_class: int, stage: int) -> float:
        """Return the rate between the GPUs of a node of a stage, in bits/s.

        A pipeline class is all pipelines on equal nodes, so the stage is on nodes of the same kind.
        """
        cluster = self.network.cluster(self.fold.node_type_on(pipeline_class, stage))
        return self.model.gpu_of(cluster).link_bps

    @property
    def _compressed_share(self) -> float:
        """Bytes that Ethernet carries for each byte of an activation, after compression."""
        if self.network.single_fabric:  # a job without holmes compresses nothing
            return 1.0
        return compressed_share(self.run.compression, self.model.activation_width)

    @property
    def _slices(self) -> int:
        """Number of tensor parallel ranks that share out an activation on Ethernet; 1: no slices."""
        sizes = self.fold.full_placement.sizes
        is_sliced = (
            self.network.single_fabric is None
            and self.run.cut
            and sizes.tensor_inside(self.network.processes)
        )
        return self.model.copies(sizes) if is_sliced else 1  # copies: ranks with the same message

    def simulation(self, micro_batches: int, begins: Sequence[float] = ()) -> Simulation:
        """Return a simulation of `micro_batches` micro-batches, not yet run.

        An actor represents all ranks of a stage in pipelines of a class (all pipelines on equal
        nodes): these ranks do the same at the same time.

        Args:
            micro_batches: Number of micro-batches.
            begins: Seconds until each pipeline class begins (for repeat.py); () for 0.
        """
        transfers = Transfers(self.templates)  # copies of the messages and collectives
        programs = []
        for actor in self.actors:
            ops = self._program(actor.pipeline_class, actor.stage, micro_batches)
            if begins:
                # An operation: (name, kind of span, seconds, micro-batch, chunk).
                delay_s = begins[actor.pipeline_class]
                idle = ("compute", "idle", delay_s, NO_MICRO_BATCH, NO_CHUNK)
                ops = chain([idle], ops)
            # Time of software becomes computation, or a flow through shared CPU cores.
            programs.append(list(self._with_software(ops, transfers, actor)))
        return Simulation(programs, transfers, self.capacities)

    def apart(self) -> list[set[int]]:
        """Divide the pipeline classes into groups that share nothing before they reduce gradients.

        A class is all pipelines on equal nodes. Two share something if their messages use the same
        NIC or link, if all ranks share CPU cores (run.cores), or if a collective runs before the
        reduction: ZeRO 2 and 3, or ZeRO 1 with its gather of weights under the forward pass.
        """
        all_classes = range(len(self.fold.pipeline_classes))
        has_early_collectives = (
            (self.run.zero == 1 and self.run.gather_overlap) or self.run.zero > 1 or self.run.cores
        )
        if has_early_collectives:
            return [set(all_classes)]
        # Pipeline class -> NICs and links of limited rate that its messages use.
        resources_of: list[set[Hashable]] = [set() for _ in all_classes]
        for tag, transfer in self.templates.items():  # tag: (letter, virtual stage, class)
            if isinstance(tag, tuple) and tag[0] in (_ACTIVATION, _GRADIENT):
                _, _, pipeline_class = tag
                for resource, _ in transfer.uses:
                    if self.capacities[resource] < inf:
                        resources_of[pipeline_class].add(resource)
        groups: list[_LinkedClasses] = []
        for pipeline_class, resources in enumerate(resources_of):
            joined = _LinkedClasses({pipeline_class}, resources)
            # Join the groups that use any of the same resources.
            for other in [group for group in groups if group.resources & joined.resources]:
                groups.remove(other)
                joined = _LinkedClasses(
                    joined.pipeline_classes | other.pipeline_classes,
                    joined.resources | other.resources,
                )
            groups.append(joined)
        return [group.pipeline_classes for group in groups]

    def step(self, micro_batches: int = 0) -> Step:
        """Simulate the step with `micro_batches` micro-batches (0: all); equal ranks share a timeline."""
        simulation = self.simulation(micro_batches or self.costs.micro_batches)
        timelines = []
        for (pipeline_class, stage), spans in zip(self.actors, simulation.run()):
            cluster = self.network.cluster(self.fold.node_type_on(pipeline_class, stage))
            ranks = self.fold.ranks(pipeline_class, stage)  # in all pipelines of the class
            timelines.append(Timeline(stage, ranks, cluster, spans=tuple(spans)))
        # CORES models the CPU cores that ranks share: its bits are no traffic, so it is left out.
        carried_bytes = {nic: bits / 8 for nic, bits in simulation.carried.items() if nic != CORES}
        step_s = end_of(timeline.spans for timeline in timelines)
        return Step(step_s, ranks=tuple(timelines), carried=carried_bytes)

    def _program(self, pipeline_class: int, stage: int, micro_batches: int) -> Iterator[Op]:
        """Yield all operations of a rank in a step, in the formats of events.py.

        The time of software (such as the framework's Python) is a further kind of operation:
        ("software", kind of span, seconds, micro-batch, chunk). _with_software() replaces it.

        Args:
            pipeline_class: Class of the rank's pipeline: all pipelines on equal nodes.
            stage: The rank's stage.
            micro_batches: Number of micro-batches.
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
        yield from collectives.before(pipeline_class, stage)
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
            # ("post" or "wait", message, ...), or a pass: (letter, micro-batch, chunk)
            if op[0] in ("post", "wait"):
                yield self._exchange(op, pipeline_class, stage)
                continue
            letter, micro_batch, chunk = op
            low, high = self.ranges[chunk * costs.stages + stage]  # layers of the chunk
            is_final = letter in "BW" and micro_batch == micro_batches - 1
            needs, launches = collectives.along(
                pipeline_class, stage, chunk, letter, micro_batch, is_final
            )
            span_kind = _SPAN_KINDS[letter]
            if run.block_s and letter != "W":
                # Of the chunk: `before` layers (the embedding) precede the model's blocks.
                blocks = min(high, costs.before + costs.blocks) - max(low, costs.before)
                yield ("software", span_kind, run.block_s * blocks, micro_batch, chunk)
            pieces = pass_pieces(sums[letter], low, high, letter == "F", needs, launches)
            for seconds, collective_ops in pieces:
                yield ("compute", span_kind, seconds, micro_batch, chunk)
                yield from collective_ops
        yield from collectives.after(pipeline_class, stage)
        yield ("software", "optimizer", run.step_s, NO_MICRO_BATCH, NO_CHUNK)
        yield from collectives.report(pipeline_class, stage)

    def _exchange(self, op: Op, pipeline_class: int, stage: int) -> Op:
        """Translate a schedule's post or wait for a message into an operation of the simulation.

        The activation ("a", 0, 5) of micro-batch 5 goes from virtual stage 0 to 1. Results on stage
        0: ("post", tag), ("wait", tag, ..., AS_SENDER) until all bytes have left. On stage 1:
        ("post", tag, AS_RECEIVER), ("wait", tag, ...) until it has arrived. A post says that this
        side is ready.

        Args:
            op: ("post" or "wait", message, messages that a receiver has sent to the same stage just
                before). A message is (letter, virtual stage v, micro-batch): letter "a" for the
                activation from v to v + 1, "g" for its gradient back.
            pipeline_class: Class of the rank's pipeline: all pipelines on equal nodes.
            stage: The rank's stage.
        """
        operation, message, *sent_before = op
        letter, virtual_stage, micro_batch = message
        tag = ((letter, virtual_stage, pipeline_class), micro_batch)
        # The activation leaves this virtual stage; its gradient leaves the next.
        sending_stage = virtual_stage + 1 if letter == _GRADIENT else virtual_stage
        is_sender = sending_stage % self.costs.stages == stage
        if operation == "wait":
            if is_sender:
                return ("wait", tag, "send", micro_batch, AS_SENDER)
            return ("wait", tag, "send", micro_batch)
        if is_sender:
            return ("post", tag)
        if not self.run.notices:
            return ("post", tag, AS_RECEIVER)
        # The receiver's notice travels behind these messages, if they are still leaving.
        sent_tags = [((sent, at, pipeline_class), number) for sent, at, number in sent_before]
        return ("post", tag, AS_RECEIVER, *sent_tags)

    def _with_software(
        self, ops: Iterator[Op], transfers: dict[Hashable, Transfer], actor: _Actor
    ) -> Iterator[Op]:
        """Yield an actor's operations, with the time of software as computation or as a flow.

        An operation ("software", kind of span, seconds, ...) is time that the CPU needs. If every
        rank has a core of its own, it becomes computation. If all ranks share cores, it becomes a
        flow of bits through them, like the bytes that ranks send; so both get fair shares.

        Args:
            ops: Operations of the actor.
            transfers: Transfers of the simulation; the flows are added to them.
            actor: All ranks of a stage in pipelines of a class (on equal nodes).
        """
        ranks = self.fold.count[actor.pipeline_class]  # for which the actor stands
        core_bps = self.network.links.core_bps
        for number, op in enumerate(ops):
            if op[0] != "software":
                yield op
                continue
            _, kind, seconds, micro_batch, chunk = op
            if not self.run.cores:
                yield ("compute", kind, seconds, micro_batch, chunk)
            elif seconds > 0:
                tag = ("software", tuple(actor), number)  # key of the transfer
                # The flow of each rank uses at most 1 core: a second is as many bits as a core
                # can send. Its weight is the number of ranks that the actor stands for.
                transfers[tag] = Transfer(
                    parties=1,
                    bits=seconds * core_bps,
                    limit_bps=core_bps,
                    uses=((CORES, ranks),),
                )
                yield ("post", tag)
                yield ("wait", tag, kind, micro_batch)


def end_of(spans: Iterable[Sequence[Span]]) -> float:
    """Return the end of the last span of all actors, in seconds."""
    return max(span[-1].end for span in spans if span)

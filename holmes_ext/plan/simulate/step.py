"""One training step of every rank, simulated: what plan/search/ranking.py compares and `holmes plan` draws.

    site, order of nodes, sizes, model, Execution  -- simulate -->  Step

Rank r runs on order[r // processes]; `only` is the fabric of all traffic (stock: plan/cost/nodes.py's stock_fabric).
Pure and deterministic. A simulation takes 1 to 100 ms for each thousand passes (stages x micro-batches x kinds of
pipelines): plan/cost/ chooses what to simulate. Compute is costs_on_site's (tensor and context collectives are inside
it); orders and waits of the engines are programs.py's, NICs and their sharing events.py's, what travels flows.py's, and
when it does collectives.py's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

from holmes_ext.cluster.site import Fabric, Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import CORES, Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.nodes import costs_on_site, slices_of
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.simulate.collectives import Operations, Reductions
from holmes_ext.plan.simulate.events import Op, Simulation, Span, Transfer, Transfers
from holmes_ext.plan.simulate.execution import Execution
from holmes_ext.plan.simulate.flows import Flows
from holmes_ext.plan.simulate.pipelines import Pipelines
from holmes_ext.plan.simulate.programs import program
from holmes_ext.plan.sizes import Sizes

CAUSES = ("compute", "optimizer", "bubble", "send_inside", "send_across", "reduce_inside", "reduce_across")
_KINDS = {"F": "forward", "B": "backward"}
_CAUSES = {"forward": "compute", "backward": "compute", "optimizer": "optimizer", "idle": "bubble", "send": "send"}


@dataclass(frozen=True)
class Timeline:
    """Ranks that do the same at the same time. node: where the first of them runs; spans: by start, without overlap."""

    stage: int
    ranks: tuple[int, ...]
    node: str
    cluster: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Step:
    """step_s: to the end of the last rank. ranks: one Timeline for all that are alike (same stage, same fabrics:
    pipelines.py). carried: (kind of node, fabric, "out" or "in") -> bytes through one such node's NIC;
    the key of a hop between clusters (cluster/wan.py) -> bytes through it."""

    step_s: float
    ranks: tuple[Timeline, ...]
    carried: dict[Hashable, float]

    @property
    def causes(self) -> dict[str, float]:
        """Mean seconds of a rank; their sum is step_s. compute, optimizer, bubble (idle, waiting for others); exposed
        communication in a cluster ("_inside") and between clusters ("_across"): sends between stages, and reductions
        with what ZeRO gathers."""
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
    site: Site, order: Sequence[str], sizes: Sizes, model: Model, execution: Execution = Execution(), links: Links =
    Links(), only: Fabric | None = None, costs: StageCosts | None = None,
) -> Step:
    """See the module. costs: seconds by stage and layer if they are known better than costs_on_site knows them.
    HolmesError: what does not fit together."""
    return JobStep(site, order, sizes, model, execution, links, only, costs).step()


class JobStep:
    """What is simulated, of any number of micro-batches: see simulate. pipelines: of the same order and sizes, where
    they are known. actors: (kind, stage)."""

    def __init__(
        self, site: Site, order: Sequence[str], sizes: Sizes, model: Model, execution: Execution = Execution(),
        links: Links = Links(), only: Fabric | None = None, costs: StageCosts | None = None,
        pipelines: Pipelines | None = None,
    ):
        sizes, self.run, self.links = sizes.complete(site.world_size), execution, links
        if execution.zero > 1 and sizes.pipeline > 1:
            given = f"zero is {execution.zero} with {sizes.pipeline} pipeline stages"
            raise HolmesError(f"{given}; under a pipeline it can be 0 or 1")
        self.costs = costs or costs_on_site(site, order, sizes, model, only=only)
        self.pipelines = pipelines or Pipelines(site, order, sizes, only)
        slices = slices_of(sizes, model.copies(sizes), site.processes) if only is None and execution.cut else 0
        flows, virtual = Flows(self.pipelines, links, model, execution.message_s, slices), execution.virtual
        layers, parts = model.layers_of(sizes), sizes.pipeline * virtual
        self.ranges = self.costs.ranges(_blocks(execution.stage_layers, self.costs.blocks, parts))
        self.reductions = Reductions(flows, execution, self.ranges, layers, model, sizes)
        self.templates = {**_messages(flows, execution, layers[0].activation_bytes), **self.reductions.transfers}
        self.actors = [(kind, stage) for kind in range(len(self.pipelines.kinds)) for stage in range(sizes.pipeline)]
        shared = {*flows.hops, CORES}
        fabrics = {nic for transfer in self.templates.values() for nic, _ in transfer.uses if nic not in shared}
        nics = {nic: flows.capacity(only or site.fabric_by_name[nic[1]]) for nic in fabrics}  # type: ignore[index]
        self.capacities = {**nics, **flows.hops, CORES: execution.cores * links.core_bps or inf}

    def simulation(self, micro_batches: int, begins: Sequence[float] = ()) -> Simulation:
        """Of so many, not yet run. begins: seconds until each kind of pipelines begins."""
        transfers, programs = Transfers(self.templates), []
        for kind, stage in self.actors:
            ops = _program(kind, stage, micro_batches, self.run, self.costs, self.ranges, self.reductions)
            if begins:
                ops = chain([("compute", "idle", begins[kind], -1, 0)], ops)
            cores = self.run.cores, self.pipelines.count[kind], (kind, stage), self.links.core_bps
            programs.append(list(_software(ops, transfers, *cores)))
        return Simulation(programs, transfers, self.capacities)

    def apart(self) -> list[set[int]]:
        """Kinds of pipelines, those together that share something before their gradients are reduced."""
        found: list[tuple[set[int], set[Hashable]]] = [({kind}, set()) for kind in range(len(self.pipelines.kinds))]
        for tag, transfer in self.templates.items():
            if isinstance(tag, tuple) and tag[0] in ("a", "g"):
                found[tag[2]][1].update(nic for nic, _ in transfer.uses if self.capacities[nic] < inf)
        joined: list[tuple[set[int], set[Hashable]]] = []
        for kinds, uses in found:
            for other in [one for one in joined if one[1] & uses]:
                joined.remove(other)
                kinds, uses = kinds | other[0], uses | other[1]
            joined.append((kinds, uses))
        early = self.run.zero == 1 and self.run.gather_overlap or self.run.zero > 1 or self.run.cores
        return [set(range(len(found)))] if early else [kinds for kinds, _ in joined]

    def step(self) -> Step:
        """Of all micro-batches."""
        simulation, lines = self.simulation(self.costs.micro_batches), []
        for (kind, stage), spans in zip(self.actors, simulation.run()):
            node = self.pipelines.kinds[kind][stage]
            cluster = self.pipelines.cluster(node)
            lines.append(Timeline(stage, self.pipelines.ranks(kind, stage), node, cluster, tuple(spans)))
        carried = {nic: bits / 8 for nic, bits in simulation.carried.items() if nic != CORES}
        return Step(end_of(line.spans for line in lines), tuple(lines), carried)


def end_of(spans: Iterable[Sequence[Span]]) -> float:
    """Of the last actor; seconds."""
    return max(own[-1].end for own in spans if own)


def _blocks(blocks: Sequence[int], layers: int, parts: int) -> Sequence[int]:
    """Of every (virtual) stage."""
    blocks = blocks or uniform(layers, parts)
    if len(blocks) != parts or sum(blocks) != layers or min(blocks) < 1:
        said = ",".join(map(str, blocks))
        raise HolmesError(f"stage_layers {said}: they must be {parts} numbers above 0 whose sum is {layers} layers")
    return blocks


def _messages(flows: Flows, run: Execution, size: float) -> dict[Hashable, Transfer]:
    """Activations to the next (virtual) stage and their gradients back, by (letter, place, kind)."""
    found: dict[Hashable, Transfer] = {}
    stages = flows.pipelines.stages
    for kind in range(len(flows.pipelines.kinds)):
        for place in range(stages * run.virtual - 1):
            one, two = place % stages, (place + 1) % stages
            for letter, ends in (("a", (one, two)), ("g", (two, one))):
                message = flows.message(kind, *ends, size)
                found[letter, place, kind] = replace(message, buffered=size <= run.buffer_bytes)
    return found


def _program(
    kind: int, stage: int, micro_batches: int, run: Execution, costs: StageCosts, ranges: Sequence[tuple[int, int]],
    reductions: Reductions,
) -> Iterator[Op]:
    """All that a rank of a kind and stage does."""
    stages, last = costs.stages, micro_batches - 1
    sums = {"F": costs.sums["forward_s"][stage], "B": costs.sums["backward_s"][stage]}
    yield from reductions.before(kind, stage)
    held = run.in_flight[stage] if run.in_flight else 0
    for op in program(run.engine, stage, stages, micro_batches, run.virtual, held, run.breadth_first):
        if op[0] in ("post", "wait"):
            message, place, micro_batch = op[1]
            sends = (place + (message == "g")) % stages == stage
            tag, *sent = (((what, at, kind), number) for what, at, number in op[1:])
            if op[0] == "post":
                yield ("post", tag) if sends else ("post", tag, True, *(sent if run.notices else ()))
            else:
                yield ("wait", tag, "send", micro_batch, True) if sends else ("wait", tag, "send", micro_batch)
            continue
        letter, micro_batch, chunk = op
        low, high = ranges[chunk * stages + stage]
        along = reductions.along(kind, stage, chunk, letter, micro_batch, letter == "B" and micro_batch == last)
        if run.block_s:
            blocks = min(high, costs.before + costs.blocks) - max(low, costs.before)
            yield ("software", _KINDS[letter], run.block_s * blocks, micro_batch, chunk)
        for seconds, ops in _pieces(sums[letter], low, high, letter == "F", *along):
            yield ("compute", _KINDS[letter], seconds, micro_batch, chunk)
            yield from ops
    yield from reductions.after(kind, stage)
    yield ("software", "optimizer", run.step_s, -1, 0)
    yield from reductions.told(kind, stage)


def _pieces(
    sums: Sequence[float], low: int, high: int, forward: bool, needs: Operations, launches: Operations
) -> Iterator[tuple[float, list[Op]]]:
    """A pass over layers [low, high), cut where a layer needs weights that are gathered or has gradients that are sent:
    (seconds, what is done then)."""
    at = sums[low if forward else high]
    for layer in sorted({*needs, *launches}, reverse=not forward):
        for ops, border in ((needs.get(layer), layer + (not forward)), (launches.get(layer), layer + forward)):
            if ops:
                yield abs(sums[border] - at), ops
                at = sums[border]
    yield abs(sums[high if forward else low] - at), []


def _software(
    ops: Iterator[Op], transfers: dict[Hashable, Transfer], cores: int, ranks: int, actor: Hashable, core_bps: float
) -> Iterator[Op]:
    """`ops` of an actor that stands for `ranks` ranks, with software's seconds as flows through the shared cores, at
    most one core a rank. core_bps: bits that count as a second, as many as a core can send: then a rank that computes
    and one that sends get the same share of the cores. Where every rank has its own, software is compute."""
    for number, op in enumerate(ops):
        if op[0] != "software":
            yield op
        elif not cores:
            yield ("compute", *op[1:])
        elif op[2] > 0:
            tag = ("software", actor, number)
            transfers[tag] = Transfer(1, bits=op[2] * core_bps, limit_bps=core_bps, uses=((CORES, ranks),))
            yield from (("post", tag), ("wait", tag, op[1], op[3]))

"""One training step of every rank, simulated: what plan/search/search.py compares and `holmes plan` draws.

    site, order of nodes, sizes, model, Options  -- simulate -->  Step

The contract. `simulate(site, order, sizes, model, options=Options(), links=Links(), only=None)`: rank r runs on order[r // processes];
`only` is the fabric of all traffic (stock: plan/cost.stock_fabric). Pure and deterministic. Step.step_s: seconds from the step's start
to the end of its last rank. Step.ranks: one Timeline for all ranks that are alike (same stage, same fabrics: plan/simulate/folding.py), its spans
without overlap. Step.breakdown: seconds by cause, the mean over all ranks, whose sum is step_s. A simulation takes 1 to 100 ms
for each thousand passes (stages x micro-batches x kinds of columns): use plan/stage_costs.estimate to choose what to simulate.
HolmesError: what does not fit together. Name Options' fields: more may be added.

Compute is plan/stage_costs.costs_on_site's (tensor and context collectives are inside it); orders and waits of the engines are plan/cost/orders.py's,
NICs and their sharing plan/simulate/events.py's, link curves plan/cost/links.py's, what is reduced when and how plan/simulate/collectives.py's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from math import inf

from holmes_ext.cluster.site import Fabric, Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import CORES, Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.orders import SCHEDULES, program
from holmes_ext.plan.cost.stage_costs import StageCosts, costs_on_site
from holmes_ext.plan.simulate.collectives import Reductions, inside_s
from holmes_ext.plan.simulate.events import Simulation, Span, Transfer
from holmes_ext.plan.simulate.folding import Columns
from holmes_ext.plan.sizes import Sizes

ENGINES = ("deepspeed", "megatron", "async")
OVERLAPS = ("off", "first", "on")
KINDS = {"F": "forward", "B": "backward", "W": "weight"}


@dataclass(frozen=True)
class Options:
    """How the job runs.

    stage_layers: blocks of each stage (interleaved: of each virtual stage, chunk by chunk), () for as even as can be. engine: whose sends,
    receives and order of reductions. overlap: of reductions with the last backward: "off", "first" (megatron's: the first stage in buckets, the
    others in one piece) or "on". bucket_bytes: 0 for plan/reduction.bucket_bytes. two_level: groups that straddle clusters. zero: 0 to 3;
    2 and 3 without a pipeline, where every micro-batch's gradients are scattered layer by layer, and (3) weights gathered before each layer's forward
    and backward, while nothing is computed. gather_overlap: ZeRO-1's weights travel under the next forward. weight_share: W's part of a backward (zb-h1). block_s, message_s,
    step_s: seconds that software adds to a block's forward or backward, a message, a step. parameter_s: optimizer's seconds of one parameter. cores: CPU cores that
    all ranks share for block_s, parameter_s, step_s and what links say of bytes sent, as in a lab on one machine; 0: every rank has its own.
    """

    schedule: str = "1f1b"
    engine: str = "megatron"
    virtual: int = 1
    stage_layers: tuple[int, ...] = ()
    overlap: str = "off"
    bucket_bytes: int = 0
    two_level: bool = False
    zero: int = 0
    gather_overlap: bool = False
    weight_share: float = 0.5
    block_s: float = 0.0
    message_s: float = 0.0
    step_s: float = 0.0
    parameter_s: float = 2e-11
    cores: int = 0

    def __post_init__(self):
        for name, known in (("schedule", SCHEDULES), ("engine", ENGINES), ("overlap", OVERLAPS)):
            if getattr(self, name) not in known:
                raise HolmesError(f"{name} {getattr(self, name)!r} is none of {', '.join(known)}")
        if self.zero not in (0, 1, 2, 3):
            raise HolmesError(f"zero is {self.zero}; ZeRO's stages are 0, 1, 2 and 3")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not 0 <= value < 1e9:
                raise HolmesError(f"{item.name} is {value}; it must be 0 or more, and finite")
        if self.virtual < 1 or not self.weight_share <= 1 or self.cores < 0:
            raise HolmesError("virtual must be 1 or more, weight_share 1 or less and cores 0 or more")


@dataclass(frozen=True)
class Timeline:
    """Ranks that do the same at the same time. nodes: where the first of them runs; spans: plan/events.Span, by start."""

    stage: int
    ranks: tuple[int, ...]
    node: str
    cluster: str
    spans: tuple[Span, ...]

    def seconds(self, *kinds: str) -> float:
        return sum(span.end - span.start for span in self.spans if span.kind in kinds)


@dataclass(frozen=True)
class Step:
    """One simulated step. carried: (kind of node, fabric, "out" or "in") -> bytes through one such node's NIC."""

    step_s: float
    ranks: tuple[Timeline, ...]
    carried: dict[Hashable, float]

    @property
    def breakdown(self) -> dict[str, float]:
        """Mean seconds of a rank: compute, optimizer, bubble (idle, waiting for others), inside and across (exposed communication in a
        cluster and between clusters). Their sum is step_s."""
        total: Counter = Counter(compute=0.0, optimizer=0.0, bubble=0.0, inside=0.0, across=0.0)
        world = sum(len(line.ranks) for line in self.ranks)
        for line in self.ranks:
            share, busy = len(line.ranks) / world, 0.0
            for span in line.spans:
                cause = _CAUSES.get(span.kind) or ("across" if span.across else "inside")
                total[cause] += share * (span.end - span.start)
                busy += span.end - span.start
            total["bubble"] += share * (self.step_s - busy)
        return dict(total)


_CAUSES = {"forward": "compute", "backward": "compute", "weight": "compute", "optimizer": "optimizer", "idle": "bubble"}


def simulate(
    site: Site,
    order: Sequence[str],
    sizes: Sizes,
    model: Model,
    options: Options = Options(),
    links: Links = Links(),
    only: Fabric | None = None,
    costs: StageCosts | None = None,
) -> Step:
    """See the module. costs: seconds by stage and layer if they are known better than costs_on_site knows them."""
    sizes = sizes.complete(site.world_size)
    if options.zero > 1 and sizes.pipeline > 1:
        raise HolmesError(f"zero is {options.zero} with {sizes.pipeline} pipeline stages; under a pipeline it can be 0 or 1")
    costs = costs or costs_on_site(site, order, sizes, model, only=only)
    columns = Columns(site, order, sizes, only)
    layers = model.costs(sizes.tensor, sizes.context, sizes.expert if model.experts else 1)
    ranges = layer_ranges(costs, sizes.pipeline * options.virtual, options.stage_layers)
    job = _Job(columns, costs, ranges, options, links, layers[0].activation_bytes, model)
    reductions = Reductions(columns, links, options, ranges, layers, model, sizes, costs.micro_batches)
    transfers, actors = job.transfers(), [(kind, stage) for kind in range(len(columns.kinds)) for stage in range(sizes.pipeline)]
    transfers.update(reductions.transfers)
    programs = [job.program(kind, stage, reductions) for kind, stage in actors]
    uses = {nic for transfer in transfers.values() for nic, _ in transfer.uses} - {CORES}
    capacities = {nic: _capacity(links, only or site.fabric_by_name[nic[1]]) for nic in uses}
    if options.cores:
        programs = [list(_on_cores(ops, columns.count[kind], (kind, stage), transfers, links.core_bps)) for (kind, stage), ops in zip(actors, programs)]
    else:
        programs = [[("compute", *op[1:]) if op[0] == "software" else op for op in ops] for ops in programs]
    capacities[CORES] = options.cores or inf
    simulation = Simulation(programs, transfers, capacities)
    spans = simulation.run()
    step_s = max(own[-1].end for own in spans if own)
    lines = []
    for (kind, stage), own in zip(actors, spans):
        node = columns.kinds[kind][stage]
        lines.append(Timeline(stage, columns.ranks(kind, stage), node, columns.cluster(node), tuple(own)))
    return Step(step_s, tuple(lines), {nic: bits / 8 for nic, bits in simulation.carried.items() if nic != CORES})


def _on_cores(ops: Sequence[tuple], ranks: int, actor: Hashable, transfers: dict[Hashable, Transfer], core_bps: float) -> Iterator[tuple]:
    """`ops` of an actor that stands for `ranks` ranks, with software's seconds as flows through the shared cores, at most one core a rank. core_bps: bits that
    count as a second, as many as a core can send: then a rank that computes and one that sends get the same share of the cores."""
    for number, op in enumerate(ops):
        if op[0] != "software":
            yield op
        elif op[2] > 0:
            tag = ("software", actor, number)
            transfers[tag] = Transfer(1, bits=op[2] * core_bps, limit_bps=core_bps, uses=((CORES, ranks / core_bps),))
            yield from (("post", tag), ("wait", tag, op[1], op[3]))


def layer_ranges(costs: StageCosts, parts: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Layers [low, high) of every (virtual) stage."""
    if not blocks:
        blocks = [costs.blocks // parts + (part < costs.blocks % parts) for part in range(parts)]
    if len(blocks) != parts or sum(blocks) != costs.blocks or min(blocks) < 1:
        raise HolmesError(f"stage_layers {','.join(map(str, blocks))}: they must be {parts} numbers above 0 whose sum is {costs.blocks} layers")
    borders = list(accumulate(blocks, initial=0))
    return [costs.bounds(start, stop) for start, stop in zip(borders, borders[1:])]


def _capacity(links: Links, fabric: Fabric) -> float:
    link = links.of(fabric)
    return max(link.send.rate_bps, link.ring.rate_bps)


class _Job:
    """Programs of the actors, and their messages."""

    def __init__(self, columns: Columns, costs: StageCosts, ranges, options: Options, links: Links, activation_bytes: float, model: Model):
        self.columns, self.costs, self.ranges, self.options, self.links, self.model = columns, costs, ranges, options, links, model
        self.stages, self.size = columns.stages, activation_bytes

    def transfers(self) -> dict[Hashable, Transfer]:
        found = {}
        last = self.stages * self.options.virtual - 1
        for kind in range(len(self.columns.kinds)):
            for place in range(last):
                one, two = place % self.stages, (place + 1) % self.stages
                for letter, ends in (("a", (one, two)), ("g", (two, one))):
                    shape = self._message(kind, *ends)
                    for micro_batch in range(self.costs.micro_batches):
                        found[letter, place, micro_batch, kind] = Transfer(2, **shape, channel=(kind, *ends))
        return found

    def _message(self, kind: int, stage: int, other: int) -> dict:
        one, two, leaving, reaching = self.columns.edge(kind, stage, other)
        if one == two:
            return {"fixed_s": self.options.message_s + inside_s(self.model, self.columns, (one,), self.size) if stage != other else 0.0}
        fabric = self.columns.fabric((one, two))
        curve = self.links.of(fabric).send
        return {
            "fixed_s": curve.fixed_s(self.size) + self.options.message_s,
            "bits": 8 * self.size,
            "limit_bps": curve.rate_bps,
            "uses": (
                (self.columns.nic(one, fabric, "out"), leaving),
                (self.columns.nic(two, fabric, "in"), reaching),
                *self.links.on_cores(fabric, self.columns.count[kind]),
            ),
            "across": self.columns.cluster(one) != self.columns.cluster(two),
        }

    def program(self, kind: int, stage: int, reductions: Reductions) -> list[tuple]:
        options, ops = self.options, list(reductions.before(kind, stage))
        last = self.costs.micro_batches - 1
        for op in program(options.engine, options.schedule, stage, self.stages, self.costs.micro_batches, options.virtual):
            if op[0] in ("post", "wait"):
                ops.append((op[0], (*op[1], kind), "send", op[1][2]))
                continue
            letter, micro_batch, chunk = op
            parts = self._layers(letter, stage, chunk)
            final = letter == ("W" if options.schedule == "zb-h1" else "B") and micro_batch == last
            ops += self._pass(letter, parts, micro_batch, chunk, *reductions.along(kind, stage, chunk, letter, micro_batch, final))
        return [*ops, *reductions.after(kind, stage), ("software", "optimizer", options.step_s, -1, 0)]

    def _layers(self, letter: str, stage: int, chunk: int) -> list[tuple[int, float]]:
        """(layer, seconds) in the order of the pass."""
        low, high = self.ranges[chunk * self.stages + stage]
        if letter == "F":
            return [(layer, self.costs.forward_s[stage][layer]) for layer in range(low, high)]
        share = 1.0
        if self.options.schedule == "zb-h1":
            share = self.options.weight_share if letter == "W" else 1 - self.options.weight_share
        return [(layer, share * self.costs.backward_s[stage][layer]) for layer in reversed(range(low, high))]

    def _pass(self, letter: str, parts, micro_batch: int, chunk: int, needs: dict, launches: dict) -> list[tuple]:
        """A pass, cut where a layer needs weights that are gathered or has gradients that are sent."""
        blocks = sum(self.costs.before <= layer < self.costs.before + self.costs.blocks for layer, _ in parts)
        ops, seconds = [("software", KINDS[letter], self.options.block_s * blocks, micro_batch, chunk)], 0.0
        for layer, own in parts:
            if layer in needs:
                ops += [("compute", KINDS[letter], seconds, micro_batch, chunk), *needs[layer]]
                seconds = 0.0
            seconds += own
            if layer in launches:
                ops += [("compute", KINDS[letter], seconds, micro_batch, chunk), *launches[layer]]
                seconds = 0.0
        return [*ops, ("compute", KINDS[letter], seconds, micro_batch, chunk)]

"""Why a plan is as it is: stages of few layers, what it wins against others, what one change of the site would give.

All in seconds of the step: simulated ones wherever the plan was simulated (plan/search/ranking.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from math import inf

from holmes_ext.cluster.site import ETHERNET, Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import StageCosts, estimate
from holmes_ext.plan.search.explanation import CAUSES, causes, stock_like, with_fabric
from holmes_ext.plan.search.ranking import rank, timed
from holmes_ext.plan.search.result import Candidate, Outcome
from holmes_ext.plan.search.search import search
from holmes_ext.words import some_of

#: A stage is thin with at most this part of the mean number of layers.
THIN = 1 / 3
#: Shapes that are looked at again under a change of the site; changes that are shown; clusters up to which nodes move.
SHAPES, CHANGES, MOST_CLUSTERS = 3, 7, 4
#: Fraction of the step below which a change gives nothing.
NOTHING = 0.001


def thin_stages(outcome: Outcome, candidate: Candidate) -> list[str]:
    """A line for the stages of one layer (or of a third of the mean): why, and what even layers would take."""
    split = candidate.split
    mean = sum(split) / len(split)
    thin = [stage for stage, layers in enumerate(split) if layers <= max(1, THIN * mean) and mean >= 2]
    if not thin:
        return []
    costs = outcome.costs(candidate)
    even = uniform(sum(split), len(split))
    other = outcome.candidate(outcome.pricing(candidate.shape), candidate.arrangement, even)
    fits = all(used <= limit for used, limit in zip(other.memory_bytes, other.limit_bytes))
    seconds = timed(outcome, other).step_s if candidate.simulated_s else other.step_s
    instead = f"with even layers the step takes {seconds:.4g} s instead of {candidate.step_s:.4g} s"
    lines: dict[str, list[int]] = {}
    for stage in thin:
        lines.setdefault(_why_thin(costs, outcome, candidate, stage, even), []).append(stage)
    said = []
    for why, stages in lines.items():
        names = ", ".join(str(stage) for stage in stages)
        places = ", ".join(dict.fromkeys(costs.places[stage] for stage in stages))
        layers = " and ".join(dict.fromkeys(str(split[stage]) for stage in stages))
        one = len(stages) == 1
        noun = "layer" if layers == "1" else "layers"
        said.append(f"stage{'' if one else 's'} {names} ({places}) ha{'s' if one else 've'} {layers} {noun}: {why}")
    return [*said, instead if fits else "even layers do not fit the memory"]


def _why_thin(costs: StageCosts, outcome: Outcome, candidate: Candidate, stage: int, even: tuple[int, ...]) -> str:
    """What keeps layers away from a stage."""
    pricing, order = outcome.pricing(candidate.shape), candidate.arrangement.order
    works = [forward[1] + backward[1] for forward, backward in zip(costs.forward_s, costs.backward_s)]
    reasons = []
    room, block = costs.room_bytes[stage], costs.memory[stage][1]
    if room < inf and costs.memory[stage][1] * (candidate.split[stage] + 1) > room - _ends(costs, stage):
        reasons.append(f"its memory has room for no more ({block / 1e9:.3g} GB a layer)")
    fastest = min(range(costs.stages), key=works.__getitem__)
    if works[stage] > 1.2 * works[fastest]:
        talking = pricing.stage(candidate.arrangement.contents[stage], order).collective_s / works[stage]
        share = f", {talking:.0%} of it tensor, context and expert groups" if talking > 0.1 else ""
        ratio = works[stage] / works[fastest]
        reasons.append(f"a layer takes {ratio:.1f} x as long there as on stage {fastest} ({works[stage]:.3g} s{share})")
    extra = _seconds(costs, stage, 0 if stage == 0 else 2) if stage in (0, costs.stages - 1) else 0.0
    if extra > 0.5 * works[stage]:
        what = "the embedding" if stage == 0 else "the output"
        reasons.append(f"{what} takes as long there as {extra / works[stage]:.1f} layers")
    exposed = estimate(costs, even).exposed_s
    if exposed[stage] > 0.02 * candidate.step_s and exposed[stage] >= 0.5 * max(exposed):
        reasons.append(f"with even layers {exposed[stage]:.3g} s of its reduction are waited for")
    edges = [(costs.transfer_s[at][1], at, other) for at, other in ((stage - 1, stage - 1), (stage, stage + 1))
             if 0 <= at and other < costs.stages]
    send, _, other = max(edges, default=(0.0, 0, 0))
    if 2 * send > works[stage]:
        what = f"a micro-batch's activation and gradient take {2 * send:.3g} s between it and stage {other}"
        reasons.append(f"{what}, as long as {2 * send / works[stage]:.0f} layers")
    return "; ".join(reasons) or "what its neighbours send is hidden best so"


def _seconds(costs: StageCosts, stage: int, kind: int) -> float:
    return costs.forward_s[stage][kind] + costs.backward_s[stage][kind]


def _ends(costs: StageCosts, stage: int) -> float:
    """Bytes of the embedding or the output on a stage."""
    first, last = stage == 0, stage == costs.stages - 1
    return first * costs.memory[stage][0] + last * costs.memory[stage][-1]


def explain(outcome: Outcome, changes: int = CHANGES) -> list[str]:
    """At most ten lines: what the best plan wins against the runner-up, the user's layout and stock, by cause; then
    what one change of the site would give, the greatest gain first."""
    best, own = outcome.best, causes(outcome, outcome.best)
    lines = []
    runner_up = next((one for one in outcome.candidates if one.shape != best.shape and one.simulated_s), None)
    if runner_up is not None:
        lines.append(_against("the runner-up", own, causes(outcome, runner_up)))
    if outcome.yours is not None:
        lines.append(_against("your layout with holmes", own, causes(outcome, outcome.yours)))
    lines.append(_against("stock" if outcome.yours is None else "your layout as stock runs it", own,
                          causes(*stock_like(outcome, outcome.yours or best))))
    every = sorted(what_if(outcome), key=lambda each: each[1])
    gains = [(what, seconds) for what, seconds in every if abs(seconds / best.step_s - 1) >= NOTHING]
    same = [what for what, seconds in every if (what, seconds) not in gains]
    shown = changes - bool(same)
    lines += [f"with {what}: {seconds:.4g} s ({seconds / best.step_s - 1:+.1%})" for what, seconds in gains[:shown]]
    return lines + ([f"the same with {some_of(same, 4)}"] if same else [])


def _against(whom: str, own: dict[str, float], other: dict[str, float]) -> str:
    """The step's difference, and the causes that make most of it."""
    least, most = sum(own.values()), sum(other.values())
    parts = sorted(((other[cause] - own[cause], CAUSES[cause]) for cause in own), key=lambda part: -abs(part[0]))
    said = [f"{seconds:+.3g} s {cause}" for seconds, cause in parts[:3] if abs(seconds) > 0.001 * least]
    return f"against {whom}: {least:.4g} s instead of {most:.4g} s" + (f"; there {', '.join(said)}" if said else "")


def what_if(outcome: Outcome) -> list[tuple[str, float]]:
    """(one change of the site, the step that the best of the first shapes would then take), in no order."""
    found = []
    shapes = list(dict.fromkeys(one.shape for one in outcome.candidates))[:SHAPES]
    for what, site, links, model in _changes(outcome):
        try:
            changed = search(site, model, outcome.global_batch, outcome.limits, outcome.overlap, 10.0, rows=SHAPES,
                             links=links, only=shapes)
        except HolmesError:
            continue  # nothing fits there
        best = rank(replace(changed, gather_overlap=outcome.gather_overlap), SHAPES).best
        found.append((what, best.step_s))
    return found


def _changes(outcome: Outcome) -> Iterator[tuple[str, Site, Links, Model]]:
    """What could be changed, as (its name, the site, its links, the model)."""
    ground, model = outcome.ground, outcome.model
    site, links = ground.site, ground.links
    for fabric in site.fabrics:
        if fabric.name == ETHERNET or any(fabric.name in node.fabrics for node in site.nodes):
            faster = with_fabric(site, fabric.name, 2.0), links.scaled(fabric.name, 2.0)
            yield (f"twice the rate of {fabric.name}", *faster, model)
    if ETHERNET not in links.measured:
        yield "half the latency of ethernet", with_fabric(site, ETHERNET, latency=0.5), links, model
    if wan := links.site(site).wan:
        given = replace(links, pairs=())  # the site has them
        yield "twice the rates between clusters", replace(site, wan=wan.scaled(2.0)), given, model
        yield "half the latency between clusters", replace(site, wan=wan.scaled(1.0, 0.5)), given, model
    fastest = max(gpu.flops for gpu in ground.gpus)
    for name, gpu in zip(site.clusters, ground.gpus):
        if gpu.flops < fastest:
            gpus = {**model.gpus, name: replace(gpu, flops=fastest)}
            yield f"GPUs of {name} as fast as the fastest", site, links, replace(model, gpus=gpus)
        if gpu.memory_bytes and outcome.misfits:
            gpus = {**model.gpus, name: replace(gpu, memory_bytes=2 * gpu.memory_bytes)}
            yield f"twice the memory on GPUs of {name}", site, links, replace(model, gpus=gpus)
    for one, other in permutations(site.clusters, 2):
        if len(site.clusters) <= MOST_CLUSTERS and sum(node.cluster == one for node in site.nodes) > 1:
            yield f"one node moved from {one} to {other}", _moved(site, one, other), links, model


def _moved(site: Site, one: str, other: str) -> Site:
    """The last node of a cluster in another, attached as that one's nodes are."""
    leaving = [node for node in site.nodes if node.cluster == one][-1]
    there = [node for node in site.nodes if node.cluster == other][-1]
    stay = [node for node in site.nodes if node is not leaving]
    at = stay.index(there) + 1
    return replace(site, nodes=(*stay[:at], replace(leaving, cluster=other, ports=there.ports), *stay[at:]))

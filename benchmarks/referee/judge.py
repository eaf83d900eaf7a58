"""Judges plans by a simulation, and makes the plans of holmes, of a careful person, and random ones.

All plans run under the same engine with the same features of holmes: hierarchical reductions where they
are faster, overlap, and micro-batches in flight. Recomputation is the same, and there is no ZeRO,
interleaved schedule or context parallelism. Plans therefore differ only in sizes, places, layers and
micro-batches.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.patches.traits import ENGINES
from holmes_ext.plan.arrange.orders import launched
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.engine import REDUCTIONS, rules_of
from holmes_ext.plan.shape import Shape
from holmes_ext.plan.sizes import Sizes, divisors
from holmes_ext.planner.launch_flags import limited
from holmes_ext.planner.search.fewer import best_use
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.search import search
from holmes_ext.planner.search.simulated import timed
from holmes_ext.planner.search.space import MICRO_BATCHES, Limits
from referee.cases import LAB, Case
from referee.plans import Grid


@dataclass(frozen=True)
class SimulatedPlan:
    """Simulated step time of a plan, and whether the plan fits the memory."""

    step_s: float  # seconds of a training step
    fits: bool  # whether the stages fit the memory of their GPUs


class SimulatedCandidate(NamedTuple):
    """Planning problem of a case, with one plan for it that has a simulated step time."""

    problem: SearchResult
    candidate: Candidate


def planning_problem(case: Case, nodes: tuple[str, ...] = ()) -> SearchResult:
    """Return a case as the planning problem that holmes's search starts from.

    It has the networks, the model, the batch size, and the limits that hold for all planners: no
    interleaved stages, context parallelism or ZeRO, since not all planners know them. (A
    SearchResult is a problem with the plans that are found so far. Here it has none.)

    Args:
        case: Clusters, model and batch size.
        nodes: Only these nodes are used; (): all.
    """
    spec = case.spec.only(set(nodes)) if nodes else case.spec
    engine = ENGINES[case.framework]
    tensor = {"tensor": (1,)} if case.run == LAB else {}  # the lab's engine has stages and replicas
    allowed = {
        **dict.fromkeys(("virtual", "context"), (1,)),
        "zero": (0,),
        "recompute": (case.model.recompute,),
    }
    limits = limited(Limits({**allowed, **tensor}), engine, case.framework)
    # rules: which ways to reduce gradients, schedules and compression a plan may use.
    # Options(): the user sets no option of holmes.
    # direct: the lab uses gloo. Its hierarchical all-reduce exchanges directly inside clusters.
    # Otherwise the job uses NCCL's rings.
    rules = rules_of(engine, Options(), direct=case.run == LAB, overlap=True)
    if engine.hierarchical_zero is not None:
        # This engine can reduce hierarchically by its own flags. rules_of() then allows only flat
        # rings, so that holmes does not add a second hierarchical reduction. Here flat and
        # hierarchical reductions (REDUCTIONS) are allowed, because a plan may set the engine's
        # flags.
        rules = replace(rules, reductions=REDUCTIONS)
    network = Network(site_from_spec(spec), Links.of_spec(spec))
    return SearchResult(
        network,
        case.model,
        global_batch=case.batch,
        limits=limits,
        rules=rules,
        engine=engine,
        stock_overlap=engine.overlaps,  # whether the engine without holmes overlaps reductions
    )


def simulate_candidate(case: Case, grid: Grid) -> SimulatedCandidate:
    """Simulate a training step of a plan by the engine that runs all plans of the case.

    Args:
        case: Clusters, model and batch size.
        grid: The plan: parallel sizes, order of the nodes, layers of each stage, and micro-batch.

    Raises:
        HolmesError: The engine cannot start the plan.
    """
    sizes = grid.sizes
    problem = planning_problem(case, grid.nodes)
    if sum(grid.split) != case.model.layers or min(grid.split) < 1:
        raise HolmesError(
            f"blocks {grid.split} of the stages are not the model's {case.model.layers}"
        )
    if case.run == LAB and sizes.tensor > 1:
        raise HolmesError(
            f"tensor size {sizes.tensor}: the lab's engine has stages and replicas only"
        )
    if case.model.heads % sizes.tensor:
        raise HolmesError(
            f"tensor size {sizes.tensor} does not divide the {case.model.heads} heads"
        )
    if case.batch % (sizes.data * grid.micro_batch):
        raise HolmesError(
            f"data {sizes.data} x micro-batch {grid.micro_batch} do not divide the batch {case.batch}"
        )
    count = case.batch // (sizes.data * grid.micro_batch)
    shape = Shape(
        pipeline=sizes.pipeline,
        tensor=sizes.tensor,
        context=1,
        expert=1,
        data=sizes.data,
        virtual=1,
        micro_batch=grid.micro_batch,
        micro_batches=count,
        recompute=case.model.recompute,
        zero=0,
    )
    placement = problem.network.placement(grid.nodes, sizes)
    candidate = problem.candidate(shape, placement, grid.split)
    return SimulatedCandidate(problem, timed(problem, candidate))  # timed() simulates a step


def simulate_plan(case: Case, grid: Grid) -> SimulatedPlan:
    """Return the simulated step time of a plan, and whether it fits the memory of its GPUs.

    Args:
        case: Clusters, model and batch size.
        grid: The plan.

    Raises:
        HolmesError: The engine cannot start the plan.
    """
    simulated = simulate_candidate(case, grid).candidate
    return SimulatedPlan(simulated.step_s, simulated.fits)


def grid_of(note: Mapping[str, Any]) -> Grid:
    """Return the plan that an entry of the file of plans (a JSON object) describes."""
    pipeline, tensor, data = note["sizes"]
    sizes = Sizes(pipeline, tensor, data=data)
    return Grid(
        sizes,
        nodes=tuple(note["nodes"]),
        split=tuple(note["split"]),
        micro_batch=note["micro_batch"],
    )


class HolmesPlan(NamedTuple):
    """Result of `holmes plan` for a case: the plan, the time of the search, and the proven gap."""

    grid: Grid
    search_s: float  # CPU seconds of the search
    gap: float  # proven optimality gap, relative


def holmes_plan(case: Case, seconds: float) -> HolmesPlan:
    """Return the plan of `holmes plan --rows 1`.

    As in that command, search() first finds a good plan on all nodes without a proof. Then
    best_use() proves how good it is, and examines whether fewer nodes are faster. rows=1: only the
    best combination of parallel sizes is kept, since the command would print one row.

    Args:
        case: Clusters, model and batch size.
        seconds: Limit of the search, by the clock. The result has the CPU seconds. Planners are compared by
            these, since other programs on this machine do not change them.
    """
    begin, until = _cpu_s(), time.monotonic() + seconds
    first_look = search(planning_problem(case), seconds, rows=1, prove=False)
    result = best_use(first_look, case.spec, until, rows=1)
    spent_s, best = _cpu_s() - begin, result.best
    nodes, shape = result.network.nodes(best.placement), best.shape
    grid = Grid(
        best.placement.sizes,
        nodes=nodes,
        split=best.split,
        micro_batch=shape.micro_batch,
        predicted_s=best.step_s,
    )
    assert result.optimality_gap is not None
    return HolmesPlan(grid, search_s=spent_s, gap=result.optimality_gap.gap)


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of the processes that it has started."""
    user, system, children_user, children_system, _elapsed = os.times()
    return user + system + children_user + children_system


def careful_plan(case: Case) -> Grid:
    """Return the plan that a careful person would type.

    It follows the guidance of Megatron and DeepSpeed (Narayanan et al. 2021, arXiv 2104.04473, section
    5): tensor parallel inside a node as far as the memory needs it, then as few stages as fit, and data
    parallel for the rest. All else are defaults: even layers, micro-batch 1, and nodes in the order of
    the launcher. If nothing fits, the plan with the most stages is returned.
    """
    network = planning_problem(case).network
    plan = None
    for sizes in _possible_sizes(case):  # those with the fewest ranks of a replica come first
        if sizes.tensor > case.site.processes:  # ranks of a node
            continue
        # launched() leaves the nodes in the order of the launcher.
        nodes = tuple(network.nodes(launched(network, sizes)))
        plan = Grid(
            sizes, nodes=nodes, split=uniform(case.model.layers, sizes.pipeline), micro_batch=1
        )
        if simulate_candidate(case, plan).candidate.fits:
            return plan
    if plan is None:
        raise HolmesError(f"case {case.name}: no sizes divide its ranks and its batch")
    return plan


def _possible_sizes(case: Case) -> Iterator[Sizes]:
    """Yield the parallel sizes that a case can run with.

    Sizes with the fewest ranks of a replica come first, and among them those with the fewest stages. Sizes
    must divide the ranks, the batch and the attention heads.
    """
    world = case.site.world_size
    # The lab's engine has no tensor parallelism.
    tensors = [1] if case.run == LAB else divisors(case.site.processes)
    pairs = [(pipeline, tensor) for tensor in tensors for pipeline in divisors(world // tensor)]
    for pipeline, tensor in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[0])):
        data = world // pipeline // tensor
        if (
            pipeline <= case.model.layers
            and case.batch % data == 0
            and case.model.heads % tensor == 0
        ):
            yield Sizes(pipeline, tensor, data=data)


def random_plans(case: Case, count: int) -> list[Grid]:
    """Return plans with random sizes, order of nodes, layers and micro-batch.

    They are the same in every run. Whether they fit the memory is not checked.
    """
    dice, sizes = random.Random(f"{case.name} 0"), list(_possible_sizes(case))
    nodes, grids = [node.name for node in case.site.nodes], []
    while len(grids) < count:
        chosen = dice.choice(sizes)
        parts = [size for size in MICRO_BATCHES if case.batch // chosen.data % size == 0]
        # Borders between stages, and from them the layers of each stage.
        borders = sorted(dice.sample(range(1, case.model.layers), chosen.pipeline - 1))
        split = tuple(high - low for low, high in zip([0, *borders], [*borders, case.model.layers]))
        grids.append(
            Grid(
                chosen,
                nodes=tuple(dice.sample(nodes, len(nodes))),
                split=split,
                micro_batch=dice.choice(parts),
            )
        )
    return grids

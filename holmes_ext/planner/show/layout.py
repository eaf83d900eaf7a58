"""The request of a search, and the user's own layout beside the plans that it finds.

A layout is the parallel sizes of the user's command, with its micro-batch, recomputation and ZeRO stage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from holmes_ext.cli.show.training import Training
from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.megatron.command_line.refusals import refusals
from holmes_ext.patches.traits import ENGINES
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import REDUCTIONS, rules_of
from holmes_ext.plan.plan import Plan, load_plan
from holmes_ext.plan.shape import Shape, shape_of
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.launch_flags import limited
from holmes_ext.planner.search.as_plan import layout_candidate
from holmes_ext.planner.search.evaluate import Evaluator, is_allowed
from holmes_ext.planner.search.result import EQUAL, Candidate, SearchResult
from holmes_ext.planner.search.simulated import in_passes, timed
from holmes_ext.planner.search.space import Limits, parse_limits


def asked_for(
    network: Network, job: Training, batch: int, limits: Limits = Limits()
) -> SearchResult:
    """Return the settings of a search for a job on a network, as a SearchResult without candidates.

    search() takes such an object, and returns a copy with the plans that it has found (`candidates`).

    Args:
        network: Nodes and links of the job.
        job: The model, the framework and the options of the training job.
        batch: Sequences of a step.
        limits: Limits of the search space.
    """
    rules = rules_of(job.engine, job.options, job.is_gloo, overlap=job.overlap)
    if job.engine.hierarchical_zero is not None:
        # The framework itself can reduce hierarchically (under these ZeRO stages). Its flags choose
        # between flat and hierarchical reductions, so the search may try both.
        rules = replace(rules, reductions=REDUCTIONS)
    model = job.known_model
    if job.engine is ENGINES["megatron-lm"] and model.experts:
        # Megatron-LM trains experts on several tensor-parallel ranks with --sequence-parallel only. With a
        # single tensor-parallel rank the flag changes nothing.
        model = replace(model, sequence_parallel=True)

    # stock_overlap: gradient reductions that the framework overlaps without holmes; the engine's
    # default here, replaced below by the setting of the command line.
    request = SearchResult(
        network,
        model,
        global_batch=batch,
        limits=limits,
        rules=rules,
        engine=job.engine,
        stock_overlap=job.engine.overlaps,
    )
    command_line = job.command_line
    if not command_line.framework:  # no command line, or it describes no model
        return request
    return replace(
        request,
        stock_overlap=command_line.overlap,
        gather_overlap=command_line.gather_overlap,
    )


def framework_of_command(args: argparse.Namespace, job: Training) -> str:
    """Return the framework whose flags the command after -- has; "" if that is not known."""
    if job.command_line.framework:
        return job.command_line.framework
    names_ds_config = ds_config.from_arguments(list(args.command or ())) is not None
    return "deepspeed" if names_ds_config else ""


def limits_of(args: argparse.Namespace, job: Training) -> Limits:
    """Return the limits of the search: those of --limit and those of the framework, if one is named."""
    limits = parse_limits(args.limit)
    framework = args.framework or framework_of_command(args, job)
    if not framework:
        return limits
    return limited(limits, job.engine, framework, has_experts=bool(job.known_model.experts))


def global_batch(args: argparse.Namespace, job: Training, site: Site) -> int:
    """Return the sequences of a step on all nodes of `site`.

    The first of these that is given counts:

    1. --global-batch
    2. the global batch of the model
    3. number and size of the micro-batches, times the data-parallel size, all of the command line

    Raises:
        HolmesError: None of these is given.
    """
    model = job.known_model
    given: int | None = args.global_batch
    if given is not None:
        return given
    if model.global_batch:
        return model.global_batch
    # If the job's command line describes the model, `model` was read from it. Its micro-batches are then
    # those of the command line: their number in a step of each data-parallel rank, and their sequences.
    if job.command_line.model is not None and job.sizes is not None:
        sizes = job.sizes.complete(site.world_size, site.ranks_of_every_node)
        return model.micro_batches * model.micro_batch * sizes.data
    needed = "a search needs it, or --global-batch N (sequences of a step)"
    raise HolmesError(f"{model.source}: key 'global_batch' is missing; {needed}")


def beside(search_result: SearchResult, job: Training) -> tuple[SearchResult, Training]:
    """Simulate the user's layout, so that it can stand beside the plans of a search.

    The layout is the parallel sizes of the job's command line or of options (`job.sizes`).

    Args:
        search_result: Request or result of the search.
        job: The training job.

    Returns:
        The result with the layout as `user_layout`, and the job. If the layout is impossible: the
        result as it is, and the job with a line on the reason. Without parallel sizes there is no
        layout, and both are returned as they are.
    """
    if job.sizes is None:
        return search_result, job
    try:
        # complete(): computes the sizes that the user left out from the number of ranks.
        sizes = job.sizes.complete(
            search_result.network.world, search_result.network.site.ranks_of_every_node
        )
        plan = _plan_of_command(job, sizes)
        layout = timed(search_result, _candidate_of_layout(search_result, job, sizes, plan))
        if search_result.rules.splits:  # the framework can split backward passes
            # in_passes(): with a better order of passes; None if no order is faster
            layout = in_passes(search_result, layout) or layout
    except HolmesError as error:
        return search_result, replace(
            job, lines=(*job.lines, f"not possible: your layout: {error}")
        )
    return replace(search_result, user_layout=layout), job


def compared(result: SearchResult, limits: Limits) -> SearchResult:
    """Return the result of a search, compared with the user's layout.

    Two fields change. If the layout is faster than the plans of the search, it becomes the best plan.
    And `nearest` becomes the plan that the user gets with the smallest change: the sizes of the layout,
    but other numbers of layers on the stages. Without a layout, the result does not change.

    Args:
        result: The search, with the user's layout.
        limits: Limits of the user. A layout outside them is shown, but is not the best plan.
    """
    layout = result.user_layout
    if layout is None:
        return result
    if is_within(limits, layout):
        result = result.with_best_if_faster(layout)
    nearest = result.nearest or nearest_to(result, layout)
    return replace(result, nearest=nearest)


def is_within(limits: Limits, layout: Candidate) -> bool:
    """Return whether the user's limits on the search (--limit) allow the user's own layout."""
    return limits.allow_shape(layout.shape) and is_allowed(limits, layout.placement)


def nearest_to(result: SearchResult, layout: Candidate) -> Candidate | None:
    """Return the fastest plan that differs from the user's layout in the layers of each stage only.

    Its parallel sizes are those of the layout, but the stages have other numbers of layers.
    Example: a layout has 4 stages of 8 layers each. The first stage also has the embedding, the last
    stage the output layer, so a plan with 8, 9, 8 and 7 layers is faster.

    Returns:
        None if no such plan is faster than the layout, or the layout has no pipeline.
    """
    if layout.shape.pipeline == 1:
        return None
    shape = replace(layout.shape, virtual=1)  # chunks must have equally many layers
    evaluator = Evaluator(result)
    stages = evaluator.stage_bounds(shape, layout.placement)
    split = evaluator.good_split(stages)
    plans = [plan for plan in result.candidates if plan.shape == shape and plan.simulated_s]
    if split:
        plan = result.candidate(shape, layout.placement, split, flat=layout.flat)
        plans.append(timed(result, plan))
    others = [plan for plan in plans if plan.fits and plan.split != layout.split]
    best = min(others, key=lambda plan: plan.step_s, default=None)
    if best is None or best.step_s >= layout.step_s * (1 - EQUAL):
        return None
    return best


def _plan_of_command(job: Training, sizes: Sizes) -> Plan | None:
    """Return the plan of the command's --holmes-plan (the job will follow it); None without the flag.

    Args:
        job: The training job, with its command line.
        sizes: Complete parallel sizes of the command.

    Raises:
        HolmesError: The file cannot be read, or it is a plan for other sizes.
    """
    if not job.options.plan:
        return None
    plan = load_plan(job.options.plan)
    if plan.sizes is not None and plan.sizes != sizes:
        raise HolmesError(
            f"--holmes-plan {job.options.plan}: its parallel sizes are not those of the command; "
            "make the plan again with --output"
        )
    return plan


def alone(plan: Plan, network: Network, job: Training, model: Model) -> SearchResult:
    """Simulate a given plan without a search, and return a result with this plan only.

    The nodes are in the plan's order. The plan is both the best plan of the result and its
    `user_layout`.

    Args:
        plan: Plan with complete parallel sizes.
        network: Nodes and links of the job.
        job: The model, the framework and the options of the training job.
        model: Model of the job, with a global batch or a number of micro-batches.
    """
    assert plan.sizes is not None
    micro_batches = model.micro_batches_of(plan.sizes.data)
    # 0: the model has no global batch of its own any more, but this number of micro-batches.
    model = replace(model, global_batch=0, micro_batches=micro_batches)
    batch = micro_batches * model.micro_batch * plan.sizes.data
    request = asked_for(network, replace(job, model=model), batch)
    layout = timed(request, _candidate_of_layout(request, job, plan.sizes, plan))
    if request.rules.splits:  # the framework can split backward passes and list their order
        # in_passes(): with a better order of passes; None if no order is faster
        layout = in_passes(request, layout) or layout
    return replace(request, user_layout=layout, candidates=[layout])


def _candidate_of_layout(
    result: SearchResult, job: Training, sizes: Sizes, plan: Plan | None = None
) -> Candidate:
    """Return the candidate of the job's layout; raise HolmesError if the framework refuses it.

    Args:
        result: The search, with the network and the prices.
        job: The training job, with its command line.
        sizes: Complete parallel sizes.
        plan: Plan with the order of nodes and the layers of the stages, if there is one.
    """
    command = job.command_line
    options = job.options
    is_partitioned = bool(options.plan) or options.partition != "uniform"

    # refusals() yields the reasons why Megatron cannot run the command line; the first ends the
    # planning.
    for refusal in refusals(command, sizes, result.network.world, is_partitioned):
        raise HolmesError(refusal)
    shape = shape_of(result.model, sizes, *job.zero_and_chunks)
    layers = command.stage_layers
    nodes: Sequence[str] = ()
    if plan is not None:
        layers = plan.stage_layers or layers
        nodes = plan.nodes

    # needs_model: --holmes-partition balanced or the like, so that holmes is to choose the layers
    if shape.virtual > 1 and (layers or options.needs_model):
        _check_even_chunks(shape, layers)
        layers = ()  # even

    # A reduction can be hierarchical (first inside the clusters, then between them) depending on the
    # software that reduces the gradients:
    #   Megatron-LM (hierarchical_zero is set)   itself; hierarchical only with several instances of
    #                                            its distributed optimizer (`instances`)
    #   all others (None)                        holmes, hierarchically if that is faster
    engine_reduces = job.engine.hierarchical_zero is not None
    is_flat = engine_reduces and command.instances <= 1
    return layout_candidate(result, sizes, shape, split=layers, nodes=nodes, flat=is_flat)


def _check_even_chunks(shape: Shape, layers: tuple[int, ...]) -> None:
    """Raise HolmesError unless `layers` gives all chunks of an interleaved schedule equally many layers.

    A stage has several chunks of layers there. --holmes-partition may list the layers of all chunks,
    for example 2,2,2,2 for two stages with two chunks each.

    Args:
        shape: Parallel sizes, and the chunks of each stage.
        layers: Layers that --holmes-partition or a plan file lists; () if holmes is to choose them.

    Raises:
        HolmesError: The chunks are not even, their number is wrong, or holmes is to choose the layers
            (they may become uneven).
    """
    chunks = shape.pipeline * shape.virtual
    if len(layers) == chunks and len(set(layers)) == 1:
        return
    raise HolmesError(
        f"--holmes-partition: the command has {shape.virtual} chunks of layers on each stage (interleaved "
        "schedule), and only even ones can be planned; remove --holmes-partition, or "
        "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank"
    )

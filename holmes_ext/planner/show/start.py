"""How to start a plan, as text: changes to the user's command, or the flags of each framework."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace

from holmes_ext.cli.show.table import Screen
from holmes_ext.cli.show.training import Training, sizes_given
from holmes_ext.plan.engine import HIERARCHICAL
from holmes_ext.planner.launch_flags import Launch, launches
from holmes_ext.planner.search.as_plan import layout_candidate
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.simulated import in_passes, timed
from holmes_ext.planner.show.layout import framework_of_command
from holmes_ext.planner.simulate.deadline import TimeIsOver
from holmes_ext.planner.suggest import Request, edit_of, runs_already

#: Step of a job without a plan file, if there was no time to predict it.
UNKNOWN_S = 0.0
#: Beginning of a line that other code recognizes.
CANNOT = "cannot do this plan"
CHANGE = "change your command line"


def launches_of(
    result: SearchResult, args: argparse.Namespace, job: Training, plan: str | None = None
) -> dict[str, Launch]:
    """Return how to start the best plan: framework -> Launch.

    The framework is that of --for, else that of the training command. If neither is known, the result
    has all frameworks. If the training command has flags of the framework, the Launch also has the
    changes to this command.

    Args:
        result: Result of the search.
        args: Arguments of `holmes plan`, with the training command.
        job: The training job.
        plan: Plan file that the commands load; "" for none; None for the file of --output, if given.
    """
    if plan is None:
        plan = args.output or ""
    by_framework = launches(
        result.best,
        result.model,
        result.global_batch,
        result.rules.overlap,
        args.cluster,
        plan,
        job.options,
    )

    # Without a plan file, the job orders its nodes itself, and its step may take longer.
    step_s = result.best.step_s if plan else step_without_plan_file(result)
    by_framework = {name: replace(launch, step_s=step_s) for name, launch in by_framework.items()}
    framework_in_command = framework_of_command(args, job)  # "" if not known
    framework = args.framework or framework_in_command  # args.framework: option --for
    if not framework:
        return by_framework
    launch = by_framework[framework]

    # --for may name another framework than that of the command. Then the command cannot be changed.
    is_for_command = framework_in_command in ("", framework)
    if args.command and is_for_command:
        launch = _with_edit(launch, framework, result, args, job)
    return {framework: launch}


def _with_edit(
    launch: Launch,
    framework: str,
    result: SearchResult,
    args: argparse.Namespace,
    job: Training,
) -> Launch:
    """Return a launch with the changes that make the user's command run the best plan (`edit`).

    Args:
        launch: Flags that start the plan.
        framework: Framework whose flags the command has.
        result: The search; its best plan is to be started.
        args: Options of the command `holmes plan`.
        job: The training job, with the user's command line.
    """
    # Sizes in options of `holmes plan` are not those of the command.
    layout = None if sizes_given(args) else result.user_layout
    if runs_already(result.best, layout):
        # The best plan is the layout that the command has already. So the framework can run it
        # (nothing is lacking), and only the flags of holmes are new.
        holmes_flags = tuple(_holmes_flags(launch))
        launch = replace(launch, flags=holmes_flags, lacks=())
    sizes = job.command_line.sizes
    if sizes is not None and (sizes.tensor > 1 or sizes.context > 1):
        launch = replace(launch, environment="")  # the command runs with it already
    request = Request(
        words=tuple(args.command),
        command_line=job.command_line,
        framework=framework,
        candidate=result.best,
        layers=result.model.layers,
        layout=layout,
    )
    return replace(launch, edit=edit_of(request, launch))


def step_without_plan_file(result: SearchResult) -> float:
    """Return the seconds of a step with the best plan's flags, but without its plan file.

    A job without the plan file has the sizes and layers of the plan, but orders its nodes itself when
    it starts. This order may differ from the plan's, which was found by simulation.

    Returns:
        UNKNOWN_S if the deadline of simulations_until() passes.
    """
    try:
        # remember(): computes the duration once for this plan; later calls return the stored value.
        return result.remember("no plan file", result.best, lambda: _own_order_s(result))
    except TimeIsOver:
        return UNKNOWN_S


def _own_order_s(result: SearchResult) -> float:
    """Return the step time of a job with the best plan's flags and no plan file, in seconds.

    Without a plan file, the job arranges its nodes by itself when it starts, from the parallel sizes
    and without a search. If this order is that of the plan, the step takes as long as the plan's. The
    same is assumed if the plan was not simulated, or is breadth-first.
    """
    best = result.best
    # Some engines reduce hierarchically themselves, if the plan's flags turn it on. holmes reduces
    # hierarchically without a flag, where the engine cannot.
    needs_flag = result.engine.hierarchical_zero is not None
    has_flag = HIERARCHICAL in best.reductions
    candidate = layout_candidate(
        result,
        best.placement.sizes,
        best.shape,
        split=best.split,
        flat=needs_flag and not has_flag,
    )
    has_same_order = candidate.placement == best.placement
    if has_same_order or best.breadth_first or not best.simulated_s:
        return best.step_s
    candidate = timed(result, candidate)
    if best.schedule:  # the job computes the order of its passes when it starts, too
        with_order = in_passes(result, candidate)  # None: no order of passes is faster
        if with_order is not None:
            candidate = with_order
    return candidate.step_s


def start_line(result: SearchResult, starts: Mapping[str, Launch]) -> str:
    """Return a line on the order of the nodes in a job that is started without a plan file.

    Such a job chooses the order itself. So its step (`step_s` of a launch) may be longer than the
    printed plan's. --output writes a plan file, and with this file the job keeps to the printed plan.
    """
    best_text = f"{result.best.step_s:.4g}"
    if any(launch.step_s == UNKNOWN_S for launch in starts.values()):
        return (
            "the job orders its nodes itself when it starts, and the time was too short to predict its step "
            f"(--seconds S); with --output plan.json it takes the plan's order, and {best_text} s"
        )
    step_texts = {f"{launch.step_s:.4g}" for launch in starts.values()} - {best_text}
    if not step_texts:
        return "the job orders its nodes when it starts; --output plan.json fixes what is shown"
    return (
        f"the job orders its nodes itself when it starts, and then takes {', '.join(step_texts)} s a step; "
        f"with --output plan.json it takes the plan's order, and {best_text} s"
    )


def _holmes_flags(launch: Launch) -> list[str]:
    """Return the flags of holmes among the flags of a launch, with their values."""
    flags = []
    is_of_holmes = False
    for word in launch.flags:
        if word.startswith("--"):
            is_of_holmes = word.startswith("--holmes")
        if is_of_holmes:
            flags.append(word)
    return flags


def show_launches(
    screen: Screen, starts: Mapping[str, Launch], print_command: bool = False
) -> None:
    """Print how each framework starts a plan.

    Args:
        screen: The terminal.
        starts: Framework -> how to start the plan.
        print_command: Print the whole new command, too, if there is one.
    """
    lines_of = launch_lines(starts)
    for name, launch in starts.items():
        is_change = launch.edit is not None and not launch.lacks
        screen.line(f"{name}: {CHANGE}" if is_change else f"{name}:", "bold")
        for line in lines_of[name]:
            screen.line(f"  {line}")
        if launch.edit is None or launch.lacks:
            continue
        if print_command:
            screen.line(f"{name}: the new command", "bold")
            for line in launch.edit.whole_lines():
                screen.line(line)
        else:
            screen.line("  --print-command prints the whole new command", "dim")


def launch_lines(starts: Mapping[str, Launch]) -> dict[str, list[str]]:
    """Return framework -> lines to print: how it starts the plan, or why it cannot.

    If there is a command to change, the lines name the flags to remove, to change and to add.
    Otherwise they are the flags, then additions to the config file and to the script, if needed.
    """
    result = {}
    for name, launch in starts.items():
        if launch.lacks:  # properties of the plan that the framework does not support
            result[name] = [f"{CANNOT}: {'; '.join(launch.lacks)}; or search with --for {name}"]
            continue
        if launch.edit is not None:
            lines = launch.edit.lines()
        else:
            lines = [shlex.join(launch.flags)]
            if launch.config:
                lines.append(f"ds_config.json: {json.dumps(launch.config)}")
        if launch.script:
            lines.append(f"in the script: {launch.script}")
        if launch.environment:
            lines.append(f"in the environment: {launch.environment}")
        result[name] = lines
    return result

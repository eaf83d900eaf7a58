"""Output of a search by `holmes plan`: table of plans, seconds by cause, commands to start, and JSON.

A plan has a step time by the closed form (a quick formula) and, if it was simulated, a more exact time.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any, NamedTuple

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cli.show.training import Training, sizes_given
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.shape import Shape
from holmes_ext.planner.html.plan_pictures import of_limit
from holmes_ext.planner.launch_flags import Launch, added
from holmes_ext.planner.search.explain import NEGLIGIBLE, explain, thin_stages
from holmes_ext.planner.search.result import EQUAL, Candidate, SearchResult
from holmes_ext.planner.search.simulated import framework_schedule_s, memory_of
from holmes_ext.planner.search.stock import (
    CAUSES,
    are_reasons_simulated,
    best_stock,
    plan_names,
    reasons,
)
from holmes_ext.planner.show.start import show_launches, start_line
from holmes_ext.planner.simulate.deadline import simulations_until
from holmes_ext.units import format_bytes
from holmes_ext.words import counted

#: Columns of the table of plans. A column with a `drop` is left out on a narrow screen, the greatest first.
COLUMNS = (
    Column("", right=True),
    Column("sizes"),
    Column("batch", right=True),
    Column("recompute"),
    Column("ZeRO", right=True),
    Column("clusters", wrap=12),
    Column("reduce", drop=3),
    Column("step s", right=True),
    Column("closed form", right=True, drop=5),
    Column("token/s", right=True, drop=1),
    Column("TFLOP/s", right=True, drop=4),
    Column("memory", right=True, drop=2),
)
LEGEND = (
    "T tensor, P pipeline, C context, E expert, V chunks a stage, D data; batch: sequences x "
    "micro-batches; of each shape the best arrangement; step: simulated, ~ in closed form only"
)
#: Largest nvidia-smi reading / counted tensors of ten runs: docs/benchmarks/prediction.md (29 % missing).
READ_BESIDE_COUNTED = 1 / (1 - 0.29)
#: Line on a plan that nearly fills its GPUs.
MAY_NOT_FIT = (
    "these are tensors alone: nvidia-smi read up to 1.41 times as much in published runs (CUDA's context, "
    "NCCL's buffers, what torch's allocator keeps), which may not fit; a lower gpu_memory_bytes leaves room"
)
#: Beginning of a line that other code recognizes.
DOES_NOT_FIT = "your layout does not fit"
#: Text beside the memory of a plan if the memory of the GPUs is not known.
NO_LIMIT = "no memory limit assumed (key gpu or gpu_memory_bytes of cluster.toml)"
#: Causes below this share of the step have no row.
SMALL_CAUSE = 1e-4


class RankedPlan(NamedTuple):
    """A row of the table of plans."""

    name: str  # number, "yours", "nearest" or "all"
    candidate: Candidate
    result: SearchResult


class WhyTable(NamedTuple):
    """Table of a step's seconds by cause."""

    title: str
    head: list[str]
    rows: list[tuple[str, ...]]  # the last row is the step


def distinct(result: SearchResult) -> list[Candidate]:
    """Return the best candidate of every shape, the fastest first."""
    candidates: dict[Shape, Candidate] = {}
    for candidate in result.candidates:
        candidates.setdefault(candidate.shape, candidate)
    return list(candidates.values())


def ranked(result: SearchResult, count: int) -> list[RankedPlan]:
    """Return the rows of the table of plans: up to three to compare with, and the `count` best."""
    rows = []
    if result.user_layout:  # the layout of the user's command line
        rows.append(RankedPlan("yours", result.user_layout, result))
    if result.nearest and result.nearest.key != result.best.key:  # the best has a row of its own
        rows.append(RankedPlan("nearest", result.nearest, result))
    if result.on_all:  # the best plans use fewer nodes; this is the best plan on all nodes
        rows.append(RankedPlan("all", result.on_all.best, result.on_all))
    for number, candidate in enumerate(distinct(result)[:count], 1):
        rows.append(RankedPlan(str(number), candidate, result))
    return rows


def sizes_text(shape: Shape) -> str:
    """Return the parallel sizes above 1 as text, such as "T2 P2 V3 D16"; the data size is always there."""
    letters = {
        "T": shape.tensor,
        "P": shape.pipeline,
        "C": shape.context,
        "E": shape.expert,
        "V": shape.virtual,
    }
    parts = [f"{letter}{size}" for letter, size in letters.items() if size > 1]
    return " ".join([*parts, f"D{shape.data}"])


def split_text(split: Sequence[int]) -> str:
    """Return the layers of the stages as text: "9 9 8 8", or "8 x 4": 8 on each of 4 stages."""
    if len(set(split)) == 1:
        return f"{split[0]} x {len(split)}"
    return " ".join(map(str, split))


def show(
    result: SearchResult,
    args: argparse.Namespace,
    job: Training,
    starts: Mapping[str, Launch],
    end: float = inf,
) -> None:
    """Print the result of a search: table of plans, optimality gap, reasons, and how to start the best.

    Args:
        job: The training job, with lines on it that are printed first.
        starts: Framework -> how to start the best plan.
        end: Moment of time.monotonic() at which simulations for the output must have ended.
    """
    screen = Screen()
    best = result.best
    job.show(screen)
    _show_table(screen, result, ranked(result, args.rows))
    _show_counts(screen, result)
    if best.breadth_first:
        # The candidates are sorted by step, so this is the fastest plan in another order of passes.
        other = next(candidate for candidate in result.candidates if not candidate.breadth_first)
        text = f"breadth-first order (LoopedBFS): {best.step_s:.4g} s, {other.step_s:.4g} s without"
        screen.line(f"{text}; the optimality gap is of 1F1B's orders", "bold")
    clusters = result.describe(best)  # along the pipeline
    # The user's layout may be faster than the best plan only if --limit excludes the layout.
    layout = result.user_layout
    is_faster = layout is not None and layout.fits and layout.step_s < best.step_s * (1 - EQUAL)
    title = "best plan within --limit" if is_faster else "best plan"
    screen.line(f"{title}: {clusters}; layers of the stages: {split_text(best.split)}")
    if layout and is_faster:
        screen.line(
            f"your layout is faster: {layout.step_s:.4g} s a step; --limit excludes it from the search",
            "yellow",
        )
    if result.nearest and layout:  # nearest: the layout's sizes, other layers on the stages
        screen.line(
            f"nearest: your sizes with layers {split_text(result.nearest.split)}, "
            f"{result.nearest.step_s:.4g} s instead of {layout.step_s:.4g} s: add "
            f"--holmes-partition {','.join(map(str, result.nearest.split))}"
        )
    with simulations_until(end):
        _show_seconds_by_cause(screen, result, end)
    if args.explain:
        for line in explain(result):
            screen.line(line)
    if result.user_layout:
        screen.line("your layout: add to your command line", "bold")
        holmes_flags = added(result.user_layout, args.cluster, plan="")  # without a plan file
        screen.line(f"  {shlex.join(holmes_flags)}")
    show_launches(screen, starts, args.print_command)
    if not args.output:
        screen.line(start_line(result, starts))


def _show_counts(screen: Screen, result: SearchResult) -> None:
    """Print the optimality gap, the number of plans examined, and the measured networks."""
    if result.interrupted:
        screen.line("interrupted: the best so far", "yellow")
    gap = result.optimality_gap
    if gap:
        screen.line(f"best {gap.step_s:.4g} s, {gap}", "bold")
    screen.line(
        f"{counted(result.shapes, 'shape')}, {counted(len(result.candidates), 'plan')} worked out, "
        f"{result.pruned} left out by their bound, {result.misfits} too large, {result.seconds:.1f} s"
    )
    measured = result.network.links.measured
    if measured:
        screen.line(f"networks as holmes probe measured them: {', '.join(measured)}")


def show_given(
    result: SearchResult, args: argparse.Namespace, starts: Mapping[str, Launch]
) -> None:
    """Print the user's layout without a search: its row, seconds, memory and flags.

    Args:
        result: Result whose only candidate is the layout.
        starts: Framework -> how to start the layout.
    """
    screen = Screen()
    layout = result.best
    _show_table(screen, result, [RankedPlan(name="yours", candidate=layout, result=result)])
    _show_seconds_by_cause(screen, result)
    # A training command with its own sizes has all flags of the framework, and lacks only those of
    # holmes. Without a command, or if options of `holmes plan` such as --pipeline give the sizes, the
    # flags of the frameworks are printed, too.
    command_has_layout = bool(args.command) and not sizes_given(args)
    title = "your layout: add to your command line" if command_has_layout else "flags of holmes:"
    screen.line(title, "bold")
    holmes_flags = added(layout, args.cluster, plan=args.output or "")
    screen.line(f"  {shlex.join(holmes_flags)}")
    if not command_has_layout:
        show_launches(screen, starts, args.print_command)


def _show_table(screen: Screen, result: SearchResult, rows: Sequence[RankedPlan]) -> None:
    """Print the table of plans with its legend; plans that do not fit the memory are red."""
    styles = ["" if row.candidate.fits else "red" for row in rows]
    screen.table(COLUMNS, [row_cells(*row) for row in rows], title(result), styles)
    legend = LEGEND
    if result.user_layout:
        legend += "; yours: with holmes, as it is"
    if any(row.name == "nearest" for row in rows):
        legend += "; nearest: your tensor and pipeline sizes, other layers"
    if any(inf in row.candidate.limit_bytes for row in rows):
        legend += f"; memory: {NO_LIMIT}"
    if result.on_all:
        legend += "; all: the best of all nodes"
    screen.line(legend, "dim")


def title(result: SearchResult) -> str:
    """Return the model, the GPUs and the global batch as a title."""
    gpus = counted(result.network.world, "GPU")
    clusters = counted(len(result.network.site.clusters), "cluster")
    return f"{result.model.name}: {gpus}, {clusters}, global batch {result.global_batch}"


def row_cells(name: str, candidate: Candidate, result: SearchResult) -> tuple[str, ...]:
    """Return the texts of a plan's row in the table of plans, in the order of COLUMNS."""
    shape = candidate.shape
    tflops = result.flops_per_gpu(candidate) / 1e12
    closed_form_mark = "" if candidate.simulated_s else "~"
    misfit_mark = "" if candidate.fits else " !"
    return (
        name,
        sizes_text(shape),
        f"{shape.micro_batch}x{shape.micro_batches}",
        shape.recompute,
        str(shape.zero),
        result.describe(candidate),
        ", ".join(dict.fromkeys(candidate.reductions)),  # each name once
        f"{closed_form_mark}{candidate.step_s:.4g}",
        f"{candidate.formula_s:.4g}",
        f"{result.tokens_per_s(candidate):.0f}",
        f"{tflops:.3g}",
        format_bytes(candidate.peak_bytes) + misfit_mark,
    )


def _show_seconds_by_cause(screen: Screen, result: SearchResult, end: float = inf) -> None:
    """Print the seconds of the best plan's step by cause, and reasons for the properties of the plan.

    1. Sentences on the pipeline schedule, and on stages with very few layers ("thin" stages)
    2. A table of the seconds by cause
    3. Sentences on the speedup over other plans, and on the memory

    Args:
        end: Moment of time.monotonic() at which simulations must have ended.
    """
    for line in (*stage_link_lines(result, result.best), *thin_stages(result, result.best)):
        screen.line(line)
    title, head, rows = why_table(result)
    columns = [Column(head[0], wrap=14), *(Column(name, right=True) for name in head[1:])]
    styles = ["", *[""] * (len(rows) - 2), "bold"]  # the last row is the sum
    screen.table(columns, rows, title, styles)
    for line in why_lines(result, end):
        screen.line(line, "red" if line.startswith(DOES_NOT_FIT) else "")


def named_reasons(result: SearchResult) -> dict[str, dict[str, float]]:
    """Return name of a plan in the table (such as "this plan") -> cause -> seconds of a step."""
    names = plan_names(result)
    return {names[plan]: seconds for plan, seconds in reasons(result).items()}


def why_table(result: SearchResult) -> WhyTable:
    """Return the table of a step's seconds, with a column for each plan and a row for each larger cause."""
    best = result.best
    by_plan = named_reasons(result)
    seconds_of_cause = {}  # name of the cause -> its seconds in each plan
    for cause, text in CAUSES.items():
        seconds_of_cause[text] = [seconds[cause] for seconds in by_plan.values()]
    seconds_of_cause["step"] = [sum(column) for column in zip(*seconds_of_cause.values())]
    rows = []
    for text, seconds_by_plan in seconds_of_cause.items():
        if max(seconds_by_plan) > SMALL_CAUSE * best.step_s:
            rows.append((text, *(f"{value:.4g}" for value in seconds_by_plan)))
    origin = "closed form, mean of the stages"
    if are_reasons_simulated(result):
        origin = "simulated, mean of all ranks"
    elif best.simulated_s:  # the time sufficed to simulate the step, but not its causes
        origin += "; --seconds was too short to simulate"
    return WhyTable(f"where a step's seconds go ({origin})", ["", *by_plan], rows)


def why_lines(result: SearchResult, end: float = inf) -> list[str]:
    """Return sentences on the best plan's speedup over other plans, and on its memory.

    Simulations end before the moment `end` of time.monotonic().
    """
    best = result.best
    layout = result.user_layout
    lines = _speedup_lines(result, end)
    stage = _fullest_stage(best)
    used = of_limit(best.memory_bytes[stage], best.limit_bytes[stage])
    terms = _terms_text(memory_terms(result, best))
    note = f"; {NO_LIMIT}" if best.limit_bytes[stage] == inf else ""
    lines.append(f"memory of the fullest stage: {used} ({terms}){note}")
    # memory_bytes counts tensors alone. nvidia-smi showed up to READ_BESIDE_COUNTED times as many bytes.
    if best.memory_bytes[stage] * READ_BESIDE_COUNTED > best.limit_bytes[stage]:
        lines.append(MAY_NOT_FIT)
    if layout and not layout.fits:
        stage = _fullest_stage(layout)
        needed = of_limit(layout.memory_bytes[stage], layout.limit_bytes[stage])
        terms = _terms_text(memory_terms(result, layout))
        lines.append(f"{DOES_NOT_FIT}: stage {stage} needs {needed} ({terms})")
    return lines


def _speedup_lines(result: SearchResult, end: float) -> list[str]:
    """Return sentences on the best plan's speedup over the job without holmes and the user's layout."""
    layout = result.user_layout
    is_searched = layout is not result.best  # else the user's layout is the only plan
    # By plan (keys of reasons()): the seconds of all causes add up to those of the step.
    steps_s = {plan: sum(seconds.values()) for plan, seconds in reasons(result).items()}
    best_s = steps_s["holmes"]

    # The job without holmes ("stock") has the sizes of the user's layout, or else of the best plan.
    stock_name = "your layout as stock runs it" if layout and is_searched else "stock"
    layers = "as yours" if layout else "even"
    properties = (
        f"the launcher's order, all traffic on the network that all nodes share, layers {layers}"
    )
    lines = [f"{steps_s['stock'] / best_s:.2f} x {stock_name} ({properties})"]
    if "yours" in steps_s:  # the user's layout is not the best plan
        lines.append(f"{steps_s['yours'] / best_s:.2f} x your layout with holmes")
    fastest = best_stock(result, end) if is_searched else None  # with any sizes
    if fastest:  # None: no search, none fits, or the time is over
        batch = f"{fastest.shape.micro_batch}x{fastest.shape.micro_batches}"
        sizes = f"{sizes_text(fastest.shape)}, batch {batch}: {fastest.step_s:.4g} s"
        lines.append(f"{fastest.step_s / best_s:.2f} x stock with its best sizes ({sizes})")
    return lines


def _terms_text(bytes_of: dict[str, float]) -> str:
    return ", ".join(f"{name} {format_bytes(value)}" for name, value in bytes_of.items() if value)


def _fullest_stage(candidate: Candidate) -> int:
    """Return the stage that uses the largest share of its memory; without a limit, the most bytes."""
    shares = []
    for used, limit in zip(candidate.memory_bytes, candidate.limit_bytes):
        shares.append(used / limit if limit < inf else used)
    return shares.index(max(shares))


def memory_terms(result: SearchResult, candidate: Candidate) -> dict[str, float]:
    """Return the memory of the stage that uses most of its memory: term ("weights", ...) -> bytes."""
    return memory_of(result, candidate, _fullest_stage(candidate)).terms


def stage_link_lines(result: SearchResult, candidate: Candidate) -> list[str]:
    """Return a line on the gain of the plan's pipeline schedule over the framework's, and its memory.

    The plan's schedule either lists all passes of each stage, or changes only how many micro-batches a stage
    has in flight (started forward, not yet backward). The result is [] if the plan uses the framework's
    schedule, or gains next to nothing.
    """
    if not candidate.schedule and not candidate.in_flight:
        return []
    framework_s = framework_schedule_s(result, candidate)
    gain = (
        f"{candidate.step_s:.4g} s a step instead of {framework_s:.4g} s under the framework's own "
        "schedule"
    )
    if candidate.schedule:
        return [
            "pipeline passes: gradients of weights wait, in a listed order (--holmes-schedule auto): "
            f"{gain}"
        ]
    if abs(framework_s - candidate.step_s) < NEGLIGIBLE * candidate.step_s:
        return []
    loads = result.costs(candidate).loads(candidate.split)
    extra_bytes = []  # of each stage, for micro-batches that 1F1B would not have in flight
    for stage, (in_flight, load) in enumerate(zip(candidate.in_flight, loads)):
        in_flight_1f1b = min(len(loads) - stage, candidate.shape.micro_batches)
        # kept_bytes: activations that a micro-batch leaves on the stage until its backward pass
        extra_bytes.append((in_flight - in_flight_1f1b) * load.kept_bytes)
    most_bytes = max(extra_bytes)
    memory = ""
    if most_bytes:
        memory = f", which takes {format_bytes(most_bytes)} more of the memory of one stage"
    depths = "+".join(map(str, candidate.in_flight))
    return [
        f"stage links: sends that do not block, {depths} micro-batches in flight{memory}: {gain}"
    ]


def document(
    result: SearchResult,
    plan: Plan,
    job: Training,
    starts: Mapping[str, Launch],
    more: Mapping[str, Any],
) -> str:
    """Return the whole result of a search as JSON.

    A memory limit of null means no limit. step_seconds is the simulated step if available, else that of the
    closed form. not_expanded lists shapes that fit but have no candidate, with their lower bounds.

    Args:
        plan: The best plan, as --output writes it.
        job: The training job. Key "told" has its lines; without --json they are printed first.
        starts: Framework -> how to start the best plan.
        more: Additional keys.
    """
    expanded = {candidate.shape for candidate in result.candidates}
    proof = result.optimality_gap
    optimality_gap = None  # no step was simulated
    if proof:
        optimality_gap = {
            "proven": proof.proven,
            "gap": proof.gap,
            "step_seconds": proof.step_s,
            "bound_seconds": proof.bound_s,
        }
    content = {
        "gpus": result.network.world,
        "clusters": list(result.network.site.clusters),
        "global_batch": result.global_batch,
        "optimality_gap": optimality_gap,
        "interrupted": result.interrupted,
        "seconds": result.seconds,
        "counts": {
            "shapes": result.shapes,
            "plans": len(result.candidates),
            "pruned": result.pruned,
            "too_large": result.misfits,
        },
        "told": list(job.lines),
        "yours": row(result.user_layout, result) if result.user_layout else None,
        "candidates": [row(candidate, result) for candidate in result.candidates],
        "not_expanded": [
            {**asdict(shape), "bound_seconds": bound_s}
            for shape, bound_s in result.ideals.items()
            if shape not in expanded
        ],
        "where": reasons(result),  # seconds of a step by cause
        "memory_bytes": memory_terms(result, result.best),
        "framework_schedule_seconds": framework_schedule_s(result, result.best),
        "launch": {
            # null: there was no time to predict the step of a job without a plan file
            name: {**asdict(launch), "step_s": launch.step_s or None}
            for name, launch in starts.items()
        },
        "plan": json.loads(plan.to_json()),
        **more,
    }
    return json.dumps(content)


def row(candidate: Candidate, result: SearchResult) -> dict[str, Any]:
    """Return a plan as a dictionary for --json."""
    return {
        **asdict(candidate.shape),
        "clusters": result.describe(candidate),
        "order": candidate.placement.sizes.order,
        "breadth_first": candidate.breadth_first,
        "stage_layers": list(candidate.split),
        "reductions": list(candidate.reductions),
        "in_flight": list(candidate.in_flight),
        "schedule": list(candidate.schedule),
        "step_seconds": candidate.step_s,
        "closed_form_seconds": candidate.formula_s,
        "simulated_seconds": candidate.simulated_s or None,
        "tokens_per_second": result.tokens_per_s(candidate),
        "flops_per_gpu": result.flops_per_gpu(candidate),
        "memory_bytes": list(candidate.memory_bytes),
        "limit_bytes": [None if limit == inf else limit for limit in candidate.limit_bytes],
    }

"""What `holmes plan` says about a search: the ranked table, where the best plan's time goes, how to start it;
as JSON. The step is the simulated one where there is one; the closed form stands beside it.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cli.show.training import Training, sizes_given
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.shape import Shape
from holmes_ext.planner.html.plan_pictures import of_limit
from holmes_ext.planner.launch_flags import Launch, added, launches
from holmes_ext.planner.search.explain import NEGLIGIBLE, explain, thin_stages
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.simulated import memory_of, step_without
from holmes_ext.planner.search.stock import CAUSES, best_stock, causes, stock_like
from holmes_ext.units import format_bytes

#: Those that a narrow screen does not get have a number: the greatest goes first.
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
DOES_NOT_FIT, CANNOT = "your layout does not fit", "cannot do this plan"


def distinct(result: SearchResult) -> list[Candidate]:
    """Of every shape the best candidate, the fastest first."""
    candidates: dict[Shape, Candidate] = {}
    for candidate in result.candidates:
        candidates.setdefault(candidate.shape, candidate)
    return list(candidates.values())


def ranked(result: SearchResult, count: int) -> list[tuple[str, Candidate, SearchResult]]:
    """The rows of the table: the user's layout or the best of all nodes, then the best `count` by number."""
    first = [("yours", result.user_layout, result)] if result.user_layout else []
    first += [("all", result.on_all.best, result.on_all)] if result.on_all else []
    return first + [
        (str(i), candidate, result) for i, candidate in enumerate(distinct(result)[:count], 1)
    ]


def sizes_text(shape: Shape) -> str:
    """ "T2 P2 V3 D16": only what is above 1, data always."""
    letters = {
        "T": shape.tensor,
        "P": shape.pipeline,
        "C": shape.context,
        "E": shape.expert,
        "V": shape.virtual,
    }
    return " ".join(
        [f"{letter}{size}" for letter, size in letters.items() if size > 1] + [f"D{shape.data}"]
    )


def split_text(split: Sequence[int]) -> str:
    """ "9 9 8 8", or "8 x 4" when all are the same."""
    return f"{split[0]} x {len(split)}" if len(set(split)) == 1 else " ".join(map(str, split))


def show(
    result: SearchResult, args: argparse.Namespace, job: Training, starts: Mapping[str, Launch]
) -> None:
    screen, network, best, user_layout = Screen(), result.network, result.best, result.user_layout
    job.show(screen)
    _table(screen, result, ranked(result, args.rows))
    if result.interrupted:
        screen.line("interrupted: the best so far", "yellow")
    if result.optimality_gap:
        screen.line(f"best {result.optimality_gap.step_s:.4g} s, {result.optimality_gap}", "bold")
    counts = (
        f"{result.shapes} shapes, {len(result.candidates)} plans worked out, {result.pruned} left out "
        f"by their"
    )
    screen.line(f"{counts} bound, {result.misfits} too large, {result.seconds:.1f} s")
    if network.links.measured:
        screen.line(f"networks as holmes probe measured them: {', '.join(network.links.measured)}")
    if best.breadth_first:
        before = next(candidate for candidate in result.candidates if not candidate.breadth_first)
        text = (
            f"breadth-first order (LoopedBFS): {best.step_s:.4g} s, {before.step_s:.4g} s without"
        )
        screen.line(f"{text}; the optimality gap is of 1F1B's orders", "bold")
    screen.line(
        f"best plan: {result.describe(best)}; layers of the stages: {split_text(best.split)}"
    )
    _show_why(screen, result)
    if args.explain:
        for line in explain(result):
            screen.line(line)
    if user_layout:
        screen.line("your layout: add to your command line", "bold")
        screen.line(f"  {shlex.join(added(user_layout, args.cluster, ''))}")
    _show_launches(screen, starts)
    if not args.output:
        screen.line(
            "the job orders its nodes when it starts; --output plan.json fixes what is shown"
        )


def show_given(
    result: SearchResult, args: argparse.Namespace, starts: Mapping[str, Launch]
) -> None:
    """The user's layout alone, of a search's result that has only it: its row, seconds, memory and flags."""
    screen, user_layout = Screen(), result.best
    _table(screen, result, [("yours", user_layout, result)])
    _show_why(screen, result)
    asked = sizes_given(args) or not args.command  # else the command line has its sizes
    screen.line("flags of holmes:" if asked else "your layout: add to your command line", "bold")
    screen.line(f"  {shlex.join(added(user_layout, args.cluster, args.output or ''))}")
    if asked:
        _show_launches(screen, starts)


def _show_launches(screen: Screen, starts: Mapping[str, Launch]) -> None:
    for name, lines in launch_lines(starts).items():
        screen.line(f"{name}:", "bold")
        for line in lines:
            screen.line(f"  {line}")


def launch_lines(starts: Mapping[str, Launch]) -> dict[str, list[str]]:
    """For each framework its flags, what its config file and script need; or why it cannot do this plan."""
    result = {}
    for name, launch in starts.items():
        if launch.lacks:
            result[name] = [f"{CANNOT}: {'; '.join(launch.lacks)}; or search with --for {name}"]
            continue
        result[name] = [shlex.join(launch.flags)]
        result[name] += [f"ds_config.json: {json.dumps(launch.config)}"] if launch.config else []
        result[name] += [f"in the script: {launch.script}"] if launch.script else []
    return result


def _table(
    screen: Screen, result: SearchResult, rows: Sequence[tuple[str, Candidate, SearchResult]]
) -> None:
    styles = ["" if candidate.fits else "red" for _, candidate, _ in rows]
    screen.table(COLUMNS, [row_cells(*row) for row in rows], title(result), styles)
    more = "; yours: with holmes, as it is" if result.user_layout else ""
    screen.line(LEGEND + more + ("; all: the best of all nodes" if result.on_all else ""), "dim")


def title(result: SearchResult) -> str:
    network = result.network
    where = f"{network.world} GPUs, {len(network.site.clusters)} clusters"
    return f"{result.model.name}: {where}, global batch {result.global_batch}"


def row_cells(name: str, candidate: Candidate, result: SearchResult) -> tuple[str, ...]:
    shape, where = candidate.shape, result.describe(candidate)
    reductions = ", ".join(dict.fromkeys(candidate.reductions))
    step = f"{candidate.step_s:.4g}" if candidate.simulated_s else f"~{candidate.step_s:.4g}"
    rates = f"{result.tokens_per_s(candidate):.0f}", f"{result.flops_per_gpu(candidate) / 1e12:.3g}"
    memory = format_bytes(candidate.peak_bytes) + ("" if candidate.fits else " !")
    return (
        name,
        sizes_text(shape),
        f"{shape.micro_batch}x{shape.micro_batches}",
        shape.recompute,
        str(shape.zero),
        where,
        reductions,
        step,
        f"{candidate.formula_s:.4g}",
        *rates,
        memory,
    )


def reasons(result: SearchResult) -> dict[str, dict[str, float]]:
    """Seconds by cause: of the best plan, the user's layout, stock with its sizes (or as that layout)."""
    user_layout = result.user_layout
    by_who = {"holmes": causes(result, result.best)}
    by_who |= (
        {"yours": causes(result, user_layout)}
        if user_layout and user_layout is not result.best
        else {}
    )
    return by_who | {"stock": causes(*stock_like(result, user_layout or result.best))}


def _show_why(screen: Screen, result: SearchResult) -> None:
    for line in (*stage_link_lines(result, result.best), *thin_stages(result, result.best)):
        screen.line(line)
    title, head, rows = why_table(result)
    screen.table(
        [Column(head[0], wrap=20), *(Column(name, right=True) for name in head[1:])],
        rows,
        title,
        ["", *[""] * (len(rows) - 2), "bold"],
    )
    for line in why_lines(result):
        screen.line(line, "red" if line.startswith(DOES_NOT_FIT) else "")


def named_reasons(result: SearchResult) -> dict[str, dict[str, float]]:
    """reasons(), by what a reader calls them."""
    user_layout, alone = result.user_layout, result.user_layout is result.best
    names = {
        "holmes": "your layout" if alone else "this plan",
        "yours": "your layout",
        "stock": "your layout, stock" if user_layout else "stock, same sizes",
    }
    return {names[who]: seconds for who, seconds in reasons(result).items()}


def why_table(result: SearchResult) -> tuple[str, list[str], list[tuple[str, ...]]]:
    """Where a step's seconds go: title, head, rows; the last row is the step."""
    best, why = result.best, named_reasons(result)
    parts = {text: [why[who][part] for who in why] for part, text in CAUSES.items()}
    parts["step"] = [sum(column) for column in zip(*parts.values())]
    rows = [
        (text, *(f"{s:.4g}" for s in both))
        for text, both in parts.items()
        if max(both) > 1e-4 * best.step_s
    ]
    how = "simulated, mean of all ranks" if best.simulated_s else "closed form, mean of the stages"
    return f"where a step's seconds go ({how})", ["", *why], rows


def why_lines(result: SearchResult) -> list[str]:
    """What the plan is worth against stock, and what it takes of the memory."""
    best, user_layout, alone = result.best, result.user_layout, result.user_layout is result.best
    total, *others, before = (sum(causes.values()) for causes in reasons(result).values())
    stock = "the launcher's order, all traffic on the network that all nodes share, layers "
    stock += "as yours" if user_layout else "even"
    whose = "your layout as stock runs it" if user_layout and not alone else "stock"
    lines = [
        f"{before / total:.2f} x {whose} ({stock})",
        *(f"{other / total:.2f} x your layout with holmes" for other in others[:1]),
    ]
    if not alone and (least := best_stock(result)):
        ratio, sizes = least.step_s / total, sizes_text(least.shape)
        lines.append(
            f"{ratio:.2f} x stock with the sizes that suit it best ({sizes}: {least.step_s:.4g} s)"
        )
    stage = _fullest(best)
    used = of_limit(best.memory_bytes[stage], best.limit_bytes[stage])
    lines.append(f"memory of the fullest stage: {used} ({_terms(memory_terms(result, best))})")
    if user_layout and not user_layout.fits:
        stage = _fullest(user_layout)
        needs = of_limit(user_layout.memory_bytes[stage], user_layout.limit_bytes[stage])
        terms = _terms(memory_terms(result, user_layout))
        lines.append(f"{DOES_NOT_FIT}: stage {stage} needs {needs} ({terms})")
    return lines


def _terms(bytes_of: dict[str, float]) -> str:
    return ", ".join(f"{name} {format_bytes(value)}" for name, value in bytes_of.items() if value)


def _fullest(best: Candidate) -> int:
    shares = [
        used / (limit if limit < inf else 1.0)
        for used, limit in zip(best.memory_bytes, best.limit_bytes)
    ]
    return shares.index(max(shares))


def memory_terms(result: SearchResult, candidate: Candidate) -> dict[str, float]:
    """Bytes of a plan's fullest stage, by term."""
    stage = _fullest(candidate)
    return memory_of(result, candidate, stage).terms


def stage_link_lines(result: SearchResult, candidate: Candidate) -> list[str]:
    """What non-blocking sends and hidden stage links gain in a step, and what they cost in memory."""
    if not candidate.schedule and not candidate.in_flight:
        return []
    without = step_without(result, candidate)
    gain = f"{candidate.step_s:.4g} s a step instead of {without:.4g} s under the framework's own schedule"
    if candidate.schedule:
        return [
            "pipeline passes: gradients of weights wait, in a listed order (--holmes-schedule auto): "
            f"{gain}"
        ]
    if abs(without - candidate.step_s) < NEGLIGIBLE * candidate.step_s:
        return []
    held = "+".join(map(str, candidate.in_flight))
    loads = result.costs(candidate).loads(candidate.split)
    stock_in_flight = (
        min(count, candidate.shape.micro_batches) for count in range(len(loads), 0, -1)
    )
    more = max(
        (in_flight - stock) * load.kept_bytes
        for in_flight, stock, load in zip(candidate.in_flight, stock_in_flight, loads)
    )
    memory = f", which takes {format_bytes(more)} more of the memory of one stage" if more else ""
    return [f"stage links: sends that do not block, {held} micro-batches in flight{memory}: {gain}"]


def launches_of(
    result: SearchResult, args: argparse.Namespace, job: Training, plan: str | None = None
) -> dict[str, Launch]:
    """How to start the best plan, by framework: all, or the one asked for. plan: its file, or --output's."""
    framework, plan = (
        args.framework or job.said.framework,
        (args.output or "") if plan is None else plan,
    )
    how = result.best, result.model, result.global_batch, result.rules.overlap
    by_framework = launches(*how, args.cluster, plan)
    return {
        name: launch for name, launch in by_framework.items() if not framework or name == framework
    }


def document(
    result: SearchResult,
    plan: Plan,
    job: Training,
    starts: Mapping[str, Launch],
    more: Mapping[str, Any],
) -> str:
    """Everything that was found, and more, as JSON; a memory limit of null means none. step_seconds is the
    simulated step where there is one, closed_form_seconds the other; the optimality gap is of simulated ones;
    not_expanded: shapes that fit and have no candidate, with the seconds that none of theirs beats."""
    expanded, proof = {candidate.shape for candidate in result.candidates}, result.optimality_gap
    content = {
        "gpus": result.network.world,
        "clusters": list(result.network.site.clusters),
        "global_batch": result.global_batch,
        "optimality_gap": proof
        and {
            "proven": proof.proven,
            "gap": proof.gap,
            "step_seconds": proof.step_s,
            "bound_seconds": proof.bound_s,
        },
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
        "where": reasons(result),
        "memory_bytes": memory_terms(result, result.best),
        "framework_schedule_seconds": step_without(result, result.best),
        "launch": {name: asdict(launch) for name, launch in starts.items()},
        "plan": json.loads(plan.to_json()),
        **more,
    }
    return json.dumps(content)


def row(candidate: Candidate, result: SearchResult) -> dict[str, Any]:
    """Of a plan, for --json."""
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

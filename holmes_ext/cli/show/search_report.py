"""What `holmes plan` says about a search: the ranked table, where the winner's time goes, how to start it; and the same as JSON."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from math import inf
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.memory import TERMS
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.search.arrangement import Ground
from holmes_ext.plan.search.as_plan import plan_of
from holmes_ext.plan.search.breakdown import PARTS, best_stock, breakdown, stock
from holmes_ext.plan.search.refine import terms
from holmes_ext.plan.search.result import Candidate, Outcome
from holmes_ext.units import format_bytes

__all__ = ["document", "need_matplotlib", "pictures", "plan_of", "show"]


#: Of the table; those to the left; those that a narrow terminal does not get, the first ones first.
COLUMNS = ("", "sizes", "batch", "recompute", "ZeRO", "clusters", "reduce", "step s", "simulated", "token/s", "TFLOP/s", "memory")
LEFT = ("sizes", "recompute", "clusters", "reduce")
DROPPED = ("TFLOP/s", "reduce", "memory", "token/s")
#: Characters that the clusters get at least; longer ones are wrapped.
CLUSTERS_WIDTH = 12


def need_matplotlib() -> None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise HolmesError("--pictures needs matplotlib, which is missing; pip install 'holmes_ext[plot]'") from None
    matplotlib.use("Agg")


def pictures(outcome: Outcome, folder: Path) -> list[Path]:
    from holmes_ext.report.search_pictures import draw

    return draw(outcome, folder)


def distinct(outcome: Outcome) -> list[Candidate]:
    """Of every shape the best candidate, the fastest first."""
    found: dict = {}
    for one in outcome.candidates:
        found.setdefault(one.shape, one)
    return list(found.values())


def sizes_text(shape) -> str:
    """ "T2 P2 V3 D16": only what is above 1, data always."""
    letters = {"T": shape.tensor, "P": shape.pipeline, "C": shape.context, "E": shape.expert, "V": shape.virtual}
    return " ".join([f"{letter}{size}" for letter, size in letters.items() if size > 1] + [f"D{shape.data}"])


def reduction_text(candidate: Candidate) -> str:
    return ", ".join(dict.fromkeys(candidate.reductions))


def split_text(split) -> str:
    """ "9 9 8 8", or "8 x 4" when all are the same."""
    return f"{split[0]} x {len(split)}" if len(set(split)) == 1 else " ".join(map(str, split))


def show(outcome: Outcome, plan: Plan, args: argparse.Namespace) -> None:
    """Print all of it."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, emoji=False)
    ground, best = outcome.ground, outcome.best
    title = f"{outcome.model.name}: {ground.world} GPUs, {len(ground.ranks)} clusters, global batch {outcome.global_batch}"
    columns = list(COLUMNS)
    rows = [_cells(index, one, ground) for index, one in enumerate(distinct(outcome)[: args.rows])]
    for name in DROPPED:
        if sum(2 + _width(column, rows) for column in columns) > console.width:
            columns.remove(name)
    table = Table(title=escape(title), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name != "clusters")
    for row in rows:
        table.add_row(*(escape(row[name]) for name in columns))
    console.print(table)
    if len(columns) < len(COLUMNS):
        left = ", ".join(name for name in COLUMNS if name not in columns)
        console.print(f"too narrow for {left}: a terminal of 120 columns or --json shows all")
    console.print("T tensor, P pipeline, C context, E expert, V chunks a stage, D data; batch: sequences x micro-batches; of each shape the best arrangement")
    if outcome.interrupted:
        console.print("interrupted: the best so far", style="yellow")
    console.print(escape(f"closed form (step s): least {outcome.certificate.step_s:.4g} s, {outcome.certificate}"), style="bold")
    if outcome.simulated:
        console.print(escape(f"simulated: winner {outcome.simulated.step_s:.4g} s, {outcome.simulated}"), style="bold")
    console.print(
        f"{outcome.shapes} shapes, {len(outcome.candidates)} plans worked out, {outcome.pruned} left out by their bound, {outcome.misfits} too large,"
        f" {outcome.seconds:.1f} s"
    )
    if ground.links.measured:
        console.print(escape(f"networks as holmes probe measured them: {', '.join(ground.links.measured)}"))
    console.print(escape(f"winner: {best.arrangement.describe(ground)}; layers of the stages: {split_text(best.split)}"))
    _show_why(console, outcome)
    _show_flags(console, outcome, args)


def _width(name: str, rows: list[dict[str, str]]) -> int:
    """Characters that a column needs."""
    return CLUSTERS_WIDTH if name == "clusters" else max(len(name), *(len(row[name]) for row in rows))


def _cells(index: int, one: Candidate, ground: Ground) -> dict[str, str]:
    """A row of the table."""
    shape = one.shape
    cells = (str(index + 1), sizes_text(shape), f"{shape.micro_batch}x{shape.micro_batches}", shape.recompute, str(shape.zero))
    cells += (one.arrangement.describe(ground), reduction_text(one), f"{one.step_s:.4g}", f"{one.simulated_s:.4g}" if one.simulated_s else "")
    return dict(zip(COLUMNS, (*cells, f"{one.tokens_per_s:.0f}", f"{one.flops_per_gpu / 1e12:.3g}", format_bytes(one.peak_bytes))))


def reasons(outcome: Outcome) -> dict[str, dict[str, float]]:
    """Seconds by part, of the winner and of stock with the same sizes."""
    best = outcome.best
    today, split = stock(outcome, best.shape)
    return {"holmes": breakdown(outcome.stages(best), best.split), "stock": breakdown(today, split)}


def _show_why(console, outcome: Outcome) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    why = reasons(outcome)
    table = Table(title="where a step's seconds go (closed form)", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("winner", "stock, same sizes"):
        table.add_column(name, justify="right")
    for part, text in PARTS.items():
        ours, theirs = why["holmes"][part], why["stock"][part]
        if max(ours, theirs) > 1e-4 * outcome.best.step_s:
            table.add_row(text, f"{ours:.4g}", f"{theirs:.4g}")
    total, before = sum(why["holmes"].values()), sum(why["stock"].values())
    table.add_row("step", f"{total:.4g}", f"{before:.4g}", style="bold")
    console.print(table)
    console.print(f"{before / total:.2f} x stock (the launcher's order, all traffic on the network that all nodes share, layers even)")
    shape, least = best_stock(outcome)
    if least < inf:
        console.print(f"{least / total:.2f} x stock with the sizes that suit it best ({sizes_text(shape)}: {least:.4g} s)")
    used, limit = max(zip(outcome.best.memory_bytes, outcome.best.limit_bytes), key=lambda pair: pair[0] / pair[1] if pair[1] < inf else pair[0])
    memory = memory_terms(outcome)
    parts = ", ".join(f"{name} {format_bytes(value)}" for name, value in memory.items() if value)
    of = "" if limit == inf else f" of {format_bytes(limit)}"
    console.print(f"memory of the fullest stage: {format_bytes(used)}{of} ({parts})")


def memory_terms(outcome: Outcome) -> dict[str, float]:
    """Bytes of the winner's fullest stage, by term."""
    best = outcome.best
    stage = max(range(len(best.split)), key=lambda index: best.memory_bytes[index] / (best.limit_bytes[index] if best.limit_bytes[index] < inf else 1.0))
    found = terms(outcome.stages(best), stage, best.split)
    return {name: getattr(found, name) for name in TERMS}


def launches_of(outcome: Outcome, args: argparse.Namespace):
    from holmes_ext.patches.launch_flags import launches

    return launches(outcome.best, outcome.model, outcome.global_batch, outcome.overlap, args.cluster, args.output or "plan.json")


def _show_flags(console, outcome: Outcome, args: argparse.Namespace) -> None:
    from rich.markup import escape

    for name, launch in launches_of(outcome, args).items():
        console.print(escape(f"{name}:"), style="bold")
        if launch.lacks:
            console.print(escape(f"  cannot do this plan: {'; '.join(launch.lacks)}; or search with --for {name}"))
            continue
        console.print(escape("  " + shlex.join(launch.flags)), soft_wrap=True)
        if launch.config:
            console.print(escape(f"  ds_config.json: {json.dumps(launch.config)}"), soft_wrap=True)
    if not args.output:
        console.print("plan.json: add --output plan.json")


def document(outcome: Outcome, plan: Plan, args: argparse.Namespace) -> str:
    """Everything that was found, as JSON; a memory limit of null means none."""
    ground, certificate = outcome.ground, outcome.certificate
    found = {
        "gpus": ground.world,
        "clusters": list(ground.site.clusters),
        "global_batch": outcome.global_batch,
        "certificate": {"proven": certificate.proven, "gap": certificate.gap, "step_seconds": certificate.step_s, "bound_seconds": certificate.bound_s},
        "simulated": {"step_seconds": outcome.simulated.step_s, "bound_seconds": outcome.simulated.bound_s, "gap": outcome.simulated.gap}
        if outcome.simulated
        else None,
        "interrupted": outcome.interrupted,
        "seconds": outcome.seconds,
        "counts": {"shapes": outcome.shapes, "plans": len(outcome.candidates), "pruned": outcome.pruned, "too_large": outcome.misfits},
        "candidates": [_row(one, ground) for one in outcome.candidates],
        "not_expanded": [{"bound_seconds": bound, **asdict(shape)} for bound, shape in outcome.unseen],
        "where": reasons(outcome),
        "memory_bytes": memory_terms(outcome),
        "launch": {name: asdict(launch) for name, launch in launches_of(outcome, args).items()},
        "plan": json.loads(plan.to_json()),
    }
    return json.dumps(found)


def _row(one: Candidate, ground: Ground) -> dict:
    return {
        **asdict(one.shape),
        "clusters": one.arrangement.describe(ground),
        "order": one.arrangement.order,
        "stage_layers": list(one.split),
        "reductions": list(one.reductions),
        "step_seconds": one.step_s,
        "bound_seconds": one.bound_s,
        "simulated_seconds": one.simulated_s or None,
        "tokens_per_second": one.tokens_per_s,
        "flops_per_gpu": one.flops_per_gpu,
        "memory_bytes": list(one.memory_bytes),
        "limit_bytes": [None if limit == inf else limit for limit in one.limit_bytes],
    }

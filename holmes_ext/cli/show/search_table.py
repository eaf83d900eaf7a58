"""What `holmes plan` says about a search: the ranked table, where the best plan's time goes, how to start it; as JSON.

The step that leads is the simulated one (plan/search/ranking.py) wherever there is one, and what explains it adds up to
it; the closed form, which chose what was simulated, stands beside it.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from holmes_ext.cli.show.joined_plan import Beside
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cli.show.training import Training, sizes_given
from holmes_ext.patches.launch_flags import Launch, added, launches
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.search.arrangement import Ground
from holmes_ext.plan.search.compare import NOTHING, explain, thin_stages
from holmes_ext.plan.search.explanation import CAUSES, best_stock, causes, stock_like
from holmes_ext.plan.search.ranking import hybrid_s, step_without
from holmes_ext.plan.search.result import Candidate, Certificate, Outcome
from holmes_ext.plan.search.space import Shape
from holmes_ext.units import format_bytes

#: Those that a narrow screen does not get have a number: the greatest goes first.
COLUMNS = (
    Column("", right=True), Column("sizes"), Column("batch", right=True), Column("recompute"),
    Column("ZeRO", right=True), Column("clusters", wrap=12), Column("reduce", drop=3), Column("step s", right=True),
    Column("closed form", right=True, drop=5), Column("token/s", right=True, drop=1),
    Column("TFLOP/s", right=True, drop=4), Column("memory", right=True, drop=2),
)  # fmt: skip
LEGEND = (
    "T tensor, P pipeline, C context, E expert, V chunks a stage, D data; batch: sequences x micro-batches; of each"
    " shape the best arrangement; step: simulated, ~ in closed form only"
)
DOES_NOT_FIT, CANNOT = "your layout does not fit", "cannot do this plan"


def distinct(outcome: Outcome) -> list[Candidate]:
    """Of every shape the best candidate, the fastest first."""
    found: dict[Shape, Candidate] = {}
    for one in outcome.candidates:
        found.setdefault(one.shape, one)
    return list(found.values())


def ranked(outcome: Outcome, count: int) -> list[tuple[str, Candidate]]:
    """The rows of the table: the user's layout, then the best `count` by number."""
    first = [("yours", outcome.yours)] if outcome.yours else []
    return first + [(str(index), one) for index, one in enumerate(distinct(outcome)[:count], 1)]


def sizes_text(shape: Shape) -> str:
    """ "T2 P2 V3 D16": only what is above 1, data always."""
    letters = {"T": shape.tensor, "P": shape.pipeline, "C": shape.context, "E": shape.expert, "V": shape.virtual}
    return " ".join([f"{letter}{size}" for letter, size in letters.items() if size > 1] + [f"D{shape.data}"])


def split_text(split: Sequence[int]) -> str:
    """ "9 9 8 8", or "8 x 4" when all are the same."""
    return f"{split[0]} x {len(split)}" if len(set(split)) == 1 else " ".join(map(str, split))


def show(outcome: Outcome, args: argparse.Namespace, job: Training, starts: Mapping[str, Launch]) -> None:
    """Print all of it."""
    screen, ground, best, yours = Screen(), outcome.ground, outcome.best, outcome.yours
    job.show(screen)
    _table(screen, outcome, ranked(outcome, args.rows))
    if outcome.interrupted:
        screen.line("interrupted: the best so far", "yellow")
    if outcome.simulated:
        screen.line(f"simulated: best {outcome.simulated.step_s:.4g} s, {outcome.simulated}", "bold")
    style = "" if outcome.simulated else "bold"
    screen.line(f"closed form: best {outcome.formula.step_s:.4g} s, {outcome.formula}", style)
    counts = f"{outcome.shapes} shapes, {len(outcome.candidates)} plans worked out, {outcome.pruned} left out by their"
    screen.line(f"{counts} bound, {outcome.misfits} too large, {outcome.seconds:.1f} s")
    if ground.links.measured:
        screen.line(f"networks as holmes probe measured them: {', '.join(ground.links.measured)}")
    if best.breadth_first:
        before = next(one for one in outcome.candidates if not one.breadth_first)
        text = f"breadth-first order (LoopedBFS): {best.step_s:.4g} s, {before.step_s:.4g} s without"
        screen.line(f"{text}; the certificate is of 1F1B's orders", "bold")
    screen.line(f"best plan: {best.arrangement.describe(ground)}; layers of the stages: {split_text(best.split)}")
    for line in (*edge_lines(outcome, best), *thin_stages(outcome, best)):
        screen.line(line)
    _show_why(screen, outcome)
    if args.explain:
        for line in explain(outcome):
            screen.line(line)
    if yours:
        screen.line("your layout: add to your command line", "bold")
        screen.line(f"  {shlex.join(added(yours, args.cluster, ''))}")
    _show_launches(screen, starts)
    if not args.output:
        screen.line("the job works out the order of nodes when it starts; --output plan.json fixes what is shown")


def show_given(outcome: Outcome, args: argparse.Namespace, starts: Mapping[str, Launch]) -> None:
    """The user's layout alone, of a search's outcome that has only it: its row, seconds, memory and flags."""
    screen, yours = Screen(), outcome.best
    _table(screen, outcome, [("yours", yours)])
    for line in (*edge_lines(outcome, yours), *thin_stages(outcome, yours)):
        screen.line(line)
    _show_why(screen, outcome)
    asked = sizes_given(args) or not args.command  # else the command line has its sizes
    screen.line("flags of holmes:" if asked else "your layout: add to your command line", "bold")
    screen.line(f"  {shlex.join(added(yours, args.cluster, args.output or ''))}")
    if asked:
        _show_launches(screen, starts)


def _show_launches(screen: Screen, starts: Mapping[str, Launch]) -> None:
    for name, lines in launch_lines(starts).items():
        screen.line(f"{name}:", "bold")
        for line in lines:
            screen.line(f"  {line}")


def launch_lines(starts: Mapping[str, Launch]) -> dict[str, list[str]]:
    """For each framework its flags, what its config file and script need; or why it cannot do this plan."""
    found = {}
    for name, launch in starts.items():
        if launch.lacks:
            found[name] = [f"{CANNOT}: {'; '.join(launch.lacks)}; or search with --for {name}"]
            continue
        found[name] = [shlex.join(launch.flags)]
        found[name] += [f"ds_config.json: {json.dumps(launch.config)}"] if launch.config else []
        found[name] += [f"in the script: {launch.script}"] if launch.script else []
    return found


def _table(screen: Screen, outcome: Outcome, rows: Sequence[tuple[str, Candidate]]) -> None:
    cells = [row_cells(name, one, outcome) for name, one in rows]
    styles = ["" if fits(one) else "red" for _, one in rows]
    screen.table(COLUMNS, cells, title(outcome), styles)
    screen.line(LEGEND + ("; yours: with holmes, as it is" if outcome.yours else ""), "dim")


def title(outcome: Outcome) -> str:
    ground = outcome.ground
    where = f"{ground.world} GPUs, {len(ground.ranks)} clusters"
    return f"{outcome.model.name}: {where}, global batch {outcome.global_batch}"


def fits(one: Candidate) -> bool:
    return all(used <= limit for used, limit in zip(one.memory_bytes, one.limit_bytes))


def row_cells(name: str, one: Candidate, outcome: Outcome) -> tuple[str, ...]:
    """A row of the table."""
    shape, where = one.shape, one.arrangement.describe(outcome.ground)
    batch, reductions = f"{shape.micro_batch}x{shape.micro_batches}", ", ".join(dict.fromkeys(one.reductions))
    of_shape = (name, sizes_text(shape), batch, shape.recompute, str(shape.zero))
    step = f"{one.step_s:.4g}" if one.simulated_s else f"~{one.step_s:.4g}"
    rates = f"{outcome.tokens_per_s(one):.0f}", f"{outcome.flops_per_gpu(one) / 1e12:.3g}"
    memory = format_bytes(one.peak_bytes) + ("" if fits(one) else " !")
    return (*of_shape, where, reductions, step, f"{one.formula_s:.4g}", *rates, memory)


def reasons(outcome: Outcome) -> dict[str, dict[str, float]]:
    """Seconds by cause, of the best plan and of stock: with the same sizes, or as the user's layout runs today."""
    yours = outcome.yours
    found = {"holmes": causes(outcome, outcome.best)}
    found |= {"yours": causes(outcome, yours)} if yours and yours is not outcome.best else {}
    return found | {"stock": causes(*stock_like(outcome, yours or outcome.best))}


def _show_why(screen: Screen, outcome: Outcome) -> None:
    title, head, rows = why_table(outcome)
    screen.table([Column(head[0], wrap=20), *(Column(name, right=True) for name in head[1:])], rows, title,
                 ["", *[""] * (len(rows) - 2), "bold"])
    for line in why_lines(outcome):
        screen.line(line, "red" if line.startswith(DOES_NOT_FIT) else "")


def named_reasons(outcome: Outcome) -> dict[str, dict[str, float]]:
    """reasons(), by what a reader calls them."""
    yours, alone = outcome.yours, outcome.yours is outcome.best
    names = {"holmes": "your layout" if alone else "this plan", "yours": "your layout",
             "stock": "your layout, stock" if yours else "stock, same sizes"}
    return {names[who]: causes for who, causes in reasons(outcome).items()}


def why_table(outcome: Outcome) -> tuple[str, list[str], list[tuple[str, ...]]]:
    """Where a step's seconds go: title, head, rows; the last row is the step."""
    best, why = outcome.best, named_reasons(outcome)
    parts = {text: [why[who][part] for who in why] for part, text in CAUSES.items()}
    parts["step"] = [sum(each) for each in zip(*parts.values())]
    rows = [(text, *(f"{s:.4g}" for s in both)) for text, both in parts.items() if max(both) > 1e-4 * best.step_s]
    how = "simulated, mean of all ranks" if best.simulated_s else "closed form, mean of the stages"
    return f"where a step's seconds go ({how})", ["", *why], rows


def why_lines(outcome: Outcome) -> list[str]:
    """What the plan is worth against stock, and what it takes of the memory."""
    best, yours, alone = outcome.best, outcome.yours, outcome.yours is outcome.best
    total, *others, before = (sum(causes.values()) for causes in reasons(outcome).values())
    stock = "the launcher's order, all traffic on the network that all nodes share, layers "
    stock += "as yours" if yours else "even"
    whose = "your layout as stock runs it" if yours and not alone else "stock"
    lines = [f"{before / total:.2f} x {whose} ({stock})"]
    if others:
        lines.append(f"{others[0] / total:.2f} x your layout with holmes")
    if not alone and (least := best_stock(outcome)):
        ratio, sizes = least.step_s / total, sizes_text(least.shape)
        lines.append(f"{ratio:.2f} x stock with the sizes that suit it best ({sizes}: {least.step_s:.4g} s)")
    stage = _fullest(best)
    limit = best.limit_bytes[stage]
    of = "" if limit == inf else f" of {format_bytes(limit)}"
    terms = _terms(memory_terms(outcome, best))
    lines.append(f"memory of the fullest stage: {format_bytes(best.memory_bytes[stage])}{of} ({terms})")
    if yours and not fits(yours):
        stage = _fullest(yours)
        needs, has = (format_bytes(each) for each in (yours.memory_bytes[stage], yours.limit_bytes[stage]))
        what = f"stage {stage} needs {needs} of {has} ({_terms(memory_terms(outcome, yours))})"
        lines.append(f"{DOES_NOT_FIT}: {what}")
    return lines


def _terms(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {format_bytes(value)}" for name, value in found.items() if value)


def _fullest(best: Candidate) -> int:
    shares = [used / (limit if limit < inf else 1.0) for used, limit in zip(best.memory_bytes, best.limit_bytes)]
    return shares.index(max(shares))


def memory_terms(outcome: Outcome, one: Candidate) -> dict[str, float]:
    """Bytes of a plan's fullest stage, by term."""
    stage = _fullest(one)
    held = one.in_flight[stage] if one.in_flight else 0
    return outcome.pricing(one.shape).memory(stage, one.split[stage], held).terms


def edge_lines(outcome: Outcome, one: Candidate) -> list[str]:
    """What it gives that sends do not block and edges are hidden, and what that costs in memory."""
    if not one.in_flight:
        return []
    without, held = step_without(outcome, one), "+".join(map(str, one.in_flight))
    if abs(without - one.step_s) < NOTHING * one.step_s:
        return []
    loads = outcome.costs(one).loads(one.split)
    own = (min(count, one.shape.micro_batches) for count in range(len(loads), 0, -1))
    more = max((here - least) * load.kept_bytes for here, least, load in zip(one.in_flight, own, loads))
    memory = f", which takes {format_bytes(more)} more of the memory of one stage" if more else ""
    gain = f"{one.step_s:.4g} s a step instead of {without:.4g} s under the framework's own schedule"
    return [f"pipeline edges: sends that do not block, {held} micro-batches in flight{memory}: {gain}"]


def launches_of(outcome: Outcome, args: argparse.Namespace, job: Training) -> dict[str, Launch]:
    """How to start the best plan, by framework: all, or the one that is asked for."""
    framework = args.framework or job.framework
    how = outcome.best, outcome.model, outcome.global_batch, outcome.overlap
    hybrid = hybrid_s(outcome, outcome.best) if framework in ("", "fsdp2") else 0.0  # a simulation
    found = launches(*how, args.cluster, args.output or "", hybrid)
    return {name: launch for name, launch in found.items() if not framework or name == framework}


def document(
    outcome: Outcome, plan: Plan, job: Training, starts: Mapping[str, Launch], joined: Beside | None = None
) -> str:
    """Everything that was found, as JSON; a memory limit of null means none. step_seconds is the simulated step where
    there is one, closed_form_seconds the other; certificate is the former's, closed_form the latter's."""
    found = {
        "gpus": outcome.ground.world,
        "clusters": list(outcome.ground.site.clusters),
        "global_batch": outcome.global_batch,
        "certificate": _certificate(outcome.certificate),
        "closed_form": _certificate(outcome.formula),
        "simulated": _certificate(outcome.simulated) if outcome.simulated else None,
        "interrupted": outcome.interrupted,
        "seconds": outcome.seconds,
        "counts": {
            "shapes": outcome.shapes,
            "plans": len(outcome.candidates),
            "pruned": outcome.pruned,
            "too_large": outcome.misfits,
        },
        "told": list(job.lines),
        "yours": _row(outcome.yours, outcome, outcome.ground) if outcome.yours else None,
        "candidates": [_row(one, outcome, outcome.ground) for one in outcome.candidates],
        "not_expanded": [{"bound_seconds": bound, **asdict(shape)} for bound, shape in outcome.unseen],
        "where": reasons(outcome),
        "memory_bytes": memory_terms(outcome, outcome.best),
        "framework_schedule_seconds": step_without(outcome, outcome.best),
        "launch": {name: asdict(launch) for name, launch in starts.items()},
        "plan": json.loads(plan.to_json()),
        **({"joined": joined.document()} if joined else {}),
    }
    return json.dumps(found)


def _certificate(one: Certificate) -> dict[str, Any]:
    return {"proven": one.proven, "gap": one.gap, "step_seconds": one.step_s, "bound_seconds": one.bound_s}


def _row(one: Candidate, outcome: Outcome, ground: Ground) -> dict[str, Any]:
    return {
        **asdict(one.shape),
        "clusters": one.arrangement.describe(ground),
        "order": one.arrangement.order,
        "breadth_first": one.breadth_first,
        "stage_layers": list(one.split),
        "reductions": list(one.reductions),
        "in_flight": list(one.in_flight),
        "step_seconds": one.step_s,
        "closed_form_seconds": one.formula_s,
        "bound_seconds": one.bound_s,
        "simulated_seconds": one.simulated_s or None,
        "tokens_per_second": outcome.tokens_per_s(one),
        "flops_per_gpu": outcome.flops_per_gpu(one),
        "memory_bytes": list(one.memory_bytes),
        "limit_bytes": [None if limit == inf else limit for limit in one.limit_bytes],
    }

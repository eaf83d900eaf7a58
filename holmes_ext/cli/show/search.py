"""`holmes plan` without parallel sizes: search them all, rank what is found, explain the best, say how to start it."""

from __future__ import annotations

import argparse
import sys
import time
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from holmes_ext.cli.show import search_table
from holmes_ext.cli.show.matrix import show_wan
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.patches.launch_flags import LIMITS
from holmes_ext.patches.megatron.arguments import model_from_arguments
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model, load_model, on_clusters
from holmes_ext.plan.search.as_plan import plan_of
from holmes_ext.plan.search.ranking import rank
from holmes_ext.plan.search.search import search
from holmes_ext.plan.search.space import Limits, parse_limits
from holmes_ext.report import pictures

#: Seconds of silence before the progress bar shows.
SILENCE_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `holmes plan` about the search."""
    what = "search (when no sizes are given, and --model or a command line says what to train)"
    add = parser.add_argument_group(what).add_argument
    add("--global-batch", type=int, metavar="N", help="sequences of a step (default: the model's)")
    add("--limit", action="append", default=[], metavar="NAME=V,...",
        help="only these values, such as tensor=1,2 or recompute=none; memory=60GB; repeat")
    add("--for", dest="framework", choices=tuple(LIMITS), help="only what this framework can do")
    add("--seconds", type=float, default=inf, metavar="S", help="the best after so long (default: until it is proven)")
    add("--rows", type=int, default=10, metavar="N", help="of the table (default 10)")
    add("--pictures", metavar="DIR", help="placement.png, timeline.png and ethernet.png there (needs matplotlib)")
    what = "a Megatron or DeepSpeed command line that names the model"
    parser.add_argument("command", nargs="*", metavar="-- SCRIPT ARGS", help=what)


def wanted(args: argparse.Namespace) -> bool:
    """Whether these arguments ask for a search: something says what to train, nothing says the sizes."""
    sizes = (args.sizes, args.pipeline, args.tensor, args.context, args.expert, args.order)
    of_search = args.global_batch is not None or args.limit or args.framework or args.pictures or args.command
    if (args.explain or args.picture) and not of_search:
        return False
    return bool(args.model or args.command or args.global_batch) and all(size is None for size in sizes)


def run(args: argparse.Namespace) -> int:
    """Search and report; 0, or 130 after Ctrl-C with the best so far. HolmesError on bad input."""
    if args.rows < 1:
        raise HolmesError(f"--rows is {args.rows}; it must be 1 or more")
    if not args.seconds > 0:
        raise HolmesError(f"--seconds is {args.seconds}; it must be above 0")
    if args.pictures:
        pictures.pyplot("--pictures needs")
    spec = load_spec(args.cluster)
    model = on_clusters(_model(args), spec)
    batch, limits, links, overlap = _global_batch(args, model), _limits(args), Links.of_spec(spec), args.overlap == "on"
    with _Bar(quiet=args.json) as bar:
        outcome = search(site_from_spec(spec), model, batch, limits, overlap, args.seconds, bar.told, args.rows, links)
    if not outcome.interrupted:
        outcome = rank(outcome)
    plan = plan_of(outcome, outcome.best)
    if args.output:
        plan.save(args.output)
    if args.json:
        print(search_table.document(outcome, plan, args))
    else:
        search_table.show(outcome, plan, args)
        show_wan(links.site(outcome.ground.site), spec.notes)
    for path in pictures.draw_search(outcome, Path(args.pictures)) if args.pictures else ():
        print(f"written: {path}", file=sys.stderr if args.json else sys.stdout)
    if args.output and not args.json:
        print(f"written: {args.output}")
    return 130 if outcome.interrupted else 0


def _model(args: argparse.Namespace) -> Model:
    if args.model:
        return load_model(args.model)
    model = model_from_arguments(args.command) if args.command else None
    if model is None:
        given = "the command line names no model (--num-layers, --hidden-size, ...)"
        what = given if args.command else "nothing says what to train"
        raise HolmesError(f"{what}; give --model FILE (examples/models has some)")
    return model


def _global_batch(args: argparse.Namespace, model: Model) -> int:
    if args.global_batch is None and not model.global_batch:
        needed = "a search needs it, or --global-batch N (sequences of a step)"
        raise HolmesError(f"{model.source}: key 'global_batch' is missing; {needed}")
    return model.global_batch if args.global_batch is None else args.global_batch


def _limits(args: argparse.Namespace) -> Limits:
    limits = parse_limits(args.limit)
    allowed = dict(limits.allowed)
    can: dict[str, tuple[Any, ...]] = dict(LIMITS[args.framework]) if args.framework else {}
    for name, values in can.items():
        allowed[name] = tuple(value for value in limits.allowed.get(name, values) if value in values)
        if not allowed[name]:
            given = f"--limit {name}={','.join(map(str, limits.allowed[name]))}"
            raise HolmesError(f"{given}: {args.framework} can only {', '.join(map(str, values))}")
    return Limits(allowed, limits.memory_bytes)


class _Bar(Progress):
    """A progress bar on stderr once the search has taken SILENCE_S; nothing where stderr is no terminal."""

    def __init__(self, quiet: bool):
        text = TextColumn("{task.completed:.0f} of {task.total:.0f}")
        console = Console(stderr=True)
        shown = console.is_terminal and not quiet
        super().__init__(TextColumn("{task.description}"), BarColumn(), text, TimeElapsedColumn(), console=console,
                         transient=True, disable=not shown)
        self.begin, self.task = time.monotonic(), self.add_task("searching", visible=False)

    def told(self, done: int, left: int, best: float) -> None:
        """search's Progress."""
        text = "searching" if best == inf else f"best so far {best:.4g} s"
        visible = time.monotonic() - self.begin > SILENCE_S
        self.update(self.task, description=text, completed=done, total=done + left, visible=visible)

"""`holmes plan` without parallel sizes: search them all, rank what was found, explain the winner, and say how to start it."""

from __future__ import annotations

import argparse
import sys
import time
from math import inf
from pathlib import Path
from typing import Any

from holmes_ext.cli.show import search_report as report
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model, load_model, on_clusters
from holmes_ext.plan.search.ranking import rank
from holmes_ext.plan.search.search import search
from holmes_ext.plan.search.space import Limits, parse_limits

#: Seconds of silence before the progress bar shows.
SILENCE_S = 2.0
FRAMEWORKS = ("megatron-lm", "deepspeed", "megatron-deepspeed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `holmes plan` about the search."""
    group = parser.add_argument_group("search (when no sizes are given, and --model or a command line says what to train)")
    group.add_argument("--global-batch", type=int, metavar="N", help="sequences of a step (default: the model's)")
    group.add_argument("--limit", action="append", default=[], metavar="NAME=V,...", help="only these values, such as tensor=1,2 or recompute=none; memory=60GB; repeat")
    group.add_argument("--for", dest="framework", choices=FRAMEWORKS, help="only what this framework can do")
    group.add_argument("--seconds", type=float, default=inf, metavar="S", help="the best so far after so long (default: until it is proven)")
    group.add_argument("--rows", type=int, default=10, metavar="N", help="of the table (default 10)")
    group.add_argument("--pictures", metavar="DIR", help="placement.png, timeline.png and ethernet.png there (needs matplotlib)")
    parser.add_argument("command", nargs="*", metavar="-- SCRIPT ARGS", help="a Megatron or DeepSpeed command line that names the model")


def wanted(args: argparse.Namespace) -> bool:
    """Whether these arguments ask for a search: something says what to train, nothing says the sizes."""
    sizes = [args.sizes, args.pipeline, args.tensor, args.context, args.expert, args.order]
    if args.global_batch is None and not (args.limit or args.framework or args.pictures or args.command) and (args.explain or args.picture):
        return False
    return bool(args.model or args.command or args.global_batch) and all(size is None for size in sizes)


def run(args: argparse.Namespace) -> int:
    """Search and report; 0, or 130 after Ctrl-C with the best so far. HolmesError on bad input."""
    if args.rows < 1:
        raise HolmesError(f"--rows is {args.rows}; it must be 1 or more")
    if not args.seconds > 0:
        raise HolmesError(f"--seconds is {args.seconds}; it must be above 0")
    if args.pictures:
        report.need_matplotlib()
    spec = load_spec(args.cluster)
    site = site_from_spec(spec)
    model = on_clusters(_model(args), spec)
    limits = _limits(args)
    with _Bar(quiet=args.json) as bar:
        outcome = search(site, model, _global_batch(args, model), limits, args.overlap == "on", args.seconds, bar.told, max(args.rows, 1), Links.of_spec(spec))
    if not outcome.interrupted:
        outcome = rank(outcome)
    plan = report.plan_of(outcome, outcome.best)
    if args.output:
        plan.save(args.output)
    if args.json:
        print(report.document(outcome, plan, args))
    else:
        report.show(outcome, plan, args)
    if args.pictures:
        for path in report.pictures(outcome, Path(args.pictures)):
            print(f"written: {path}", file=sys.stderr if args.json else sys.stdout)
    if args.output and not args.json:
        print(f"written: {args.output}")
    return 130 if outcome.interrupted else 0


def _model(args: argparse.Namespace) -> Model:
    if args.model:
        return load_model(args.model)
    from holmes_ext.patches.megatron.arguments import model_from_arguments

    model = model_from_arguments(args.command) if args.command else None
    if model is None:
        what = "the command line names no model (--num-layers, --hidden-size, ...)" if args.command else "nothing says what to train"
        raise HolmesError(f"{what}; give --model FILE (examples/models has some)")
    return model


def _global_batch(args: argparse.Namespace, model: Model) -> int:
    if args.global_batch is not None:
        return args.global_batch
    if not model.global_batch:
        raise HolmesError(f"{model.source}: key 'global_batch' is missing; a search needs it, or --global-batch N (sequences of a step)")
    return model.global_batch


def _limits(args: argparse.Namespace) -> Limits:
    limits = parse_limits(args.limit)
    if not args.framework:
        return limits
    from holmes_ext.patches.launch_flags import LIMITS

    allowed: dict[str, Any] = dict(limits.allowed)
    for name, values in LIMITS[args.framework].items():
        both = tuple(value for value in allowed.get(name, values) if value in values)
        if not both:
            raise HolmesError(f"--limit {name}={','.join(map(str, allowed[name]))}: {args.framework} can only {', '.join(map(str, values))}")
        allowed[name] = both
    return Limits(allowed, limits.memory_bytes)


class _Bar:
    """A progress bar on stderr once the search has taken SILENCE_S; nothing where stderr is no terminal."""

    def __init__(self, quiet: bool):
        self.start, self.bar, self.task, self.quiet = time.monotonic(), None, None, quiet

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.stop()

    def told(self, done: int, left: int, best: float) -> None:
        """search's Progress."""
        if self.quiet or time.monotonic() - self.start < SILENCE_S or not sys.stderr.isatty():
            return
        if self.bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f}"), TimeElapsedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task("searching")
        text = "searching" if best == inf else f"best so far {best:.4g} s"
        self.bar.update(self.task, description=text, completed=done, total=done + left)

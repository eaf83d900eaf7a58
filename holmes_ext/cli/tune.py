"""`holmes tune -- COMMAND`: a few measured steps of a job, and the plan to start the real run with."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import STOP
from holmes_ext.plan import partition as stages
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.profile import load_profile

_ABOUT = """Runs the job for a few steps, measures its stages, and leaves the plan to start the real run with.
COMMAND is the whole command (torchrun ..., deepspeed ..., holmes lab run ...); it runs under holmes, ends by
itself after the steps that are measured, and needs no flag. On several machines run it on each, with the same
files. Exit status: 0, 1 when COMMAND failed, 2 on bad input or when nothing was measured."""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="measure a job for a few steps, and write the plan to start the real run with",
        description=_ABOUT,
    )
    add = parser.add_argument
    add(
        "--cluster",
        metavar="FILE",
        help="cluster.toml, unless COMMAND names one or the nodes' NICs tell",
    )
    add(
        "--steps",
        type=int,
        default=5,
        metavar="N",
        help="steps to measure, after 2 of warm-up (default: 5)",
    )
    add(
        "--profile",
        default="profile.json",
        metavar="FILE",
        help="what was measured (default: profile.json)",
    )
    add("--output", default="plan.json", metavar="FILE", help="the plan (default: plan.json)")
    add(
        "--partition",
        choices=stages.METHODS,
        default="balanced",
        help="layers of each stage: as the framework splits them, by the Holmes paper's formula, or for the "
        "least predicted step (default: balanced)",
    )
    add(
        "--alpha",
        type=float,
        default=1.0,
        metavar="X",
        help="the paper's alpha, for --partition speed (default: 1)",
    )
    add(
        "--overlap",
        choices=("on", "off"),
        default="on",
        help="the real run reduces gradients under the last backward (default: on)",
    )
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what starts the job")


def run(args: argparse.Namespace) -> int:
    """0: plan.json is there; 1: COMMAND failed; HolmesError: it measured nothing, or bad input."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise HolmesError(
            "holmes tune: no command; write it after --, for example:"
            " holmes tune -- torchrun --nproc-per-node 8 train.py"
        )
    if shutil.which(command[0]) is None:
        raise HolmesError(f"holmes tune: {command[0]}: no such command")
    if not 0 < args.steps < 100_000:
        raise HolmesError(f"holmes tune: --steps {args.steps} is not 1 or more")
    profile = Path(args.profile).absolute()
    profile.unlink(missing_ok=True)
    env = {**os.environ, "HOLMES": "1", "HOLMES_PROFILE": f"{args.steps},{profile}{STOP}"}
    if args.cluster:
        env["HOLMES_CLUSTER"] = str(Path(args.cluster).absolute())
    status = subprocess.run(command, env=env).returncode
    if status:
        print(
            f"holmes tune: {command[0]} ended with status {status}; nothing was planned",
            file=sys.stderr,
        )
        return 1
    if not profile.exists():
        raise HolmesError(
            f"holmes tune: the command ended without writing {profile}: rank 0 ran on another "
            f"machine (use the plan there), or it trained fewer than {args.steps + 2} steps, "
            "or it used neither DeepSpeed's pipeline engine nor megatron-core's schedules"
        )
    return make(args, profile)


def make(args: argparse.Namespace, path: Path) -> int:
    profile = load_profile(path)
    plan = build_plan(
        Site.from_dict(profile.site),
        profile.sizes,
        partition=args.partition,
        alpha=args.alpha,
        overlap=args.overlap == "on",
        profile=profile,
    )
    plan.save(args.output)
    now = [len(stage.blocks) for stage in profile.stages]
    layers, measured = ("+".join(map(str, counts)) for counts in (plan.stage_layers or now, now))
    print(
        f"holmes: {args.output}: layers {layers} ({plan.partition}), measured with {measured}; a step took"
        f" {profile.step_s:.4g} s, predicted are {plan.predicted['step_seconds']:.4g} s"
    )
    print(
        f"holmes: start the real run with --holmes --holmes-plan {args.output}"
        " (and the --holmes-cluster FILE of this one, if any)"
    )
    return 0

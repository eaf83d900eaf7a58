"""Command `holmes tune`: measures a few steps of a job and writes a plan for the real run.

The job runs under --holmes-profile, which writes the measured times into a file and ends the job.
From this file, the plan says how many layers each pipeline stage gets, and how groups of ranks
communicate.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import STOP
from holmes_ext.plan import partition as stages
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.profile import load_profile

_ABOUT = """Run a job for a few steps, measure its stages, and write the plan for the real run. COMMAND is the
whole command (torchrun ..., deepspeed ..., holmes lab run ...). It runs under holmes without a flag and ends
after the measured steps. On several machines, run holmes tune on each with the same files. Exit status: 0 if
the plan was written, 1 if COMMAND failed, 2 on bad input or if nothing was measured."""
#: Steps before the measured ones.
_WARM_UP_STEPS = 2
_MOST_STEPS = 100_000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `tune` with its options to the parser of `holmes`."""
    parser = subparsers.add_parser(
        "tune",
        help="measure a job for a few steps and write the plan for the real run",
        description=_ABOUT,
    )
    add = parser.add_argument
    add(
        "--cluster",
        metavar="FILE",
        help="cluster.toml, unless COMMAND names it or the NICs identify the clusters",
    )
    add(
        "--steps",
        type=int,
        default=5,
        metavar="N",
        help="measure N steps, after 2 of warm-up (default: 5)",
    )
    add(
        "--profile",
        default="profile.json",
        metavar="FILE",
        help="write the measured times here (default: profile.json)",
    )
    add(
        "--output",
        default="plan.json",
        metavar="FILE",
        help="write the plan here (default: plan.json)",
    )
    add(
        "--partition",
        choices=stages.METHODS,
        default="balanced",
        help="split layers as the framework does, by the Holmes paper's formula, or for the shortest "
        "predicted step (default: balanced)",
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
        help="plan for gradients that are reduced under the last backward pass (default: on)",
    )
    add(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="the command that starts the job",
    )


def run(args: argparse.Namespace) -> int:
    """Run a training command for a few steps, measure its pipeline stages, and write its plan.

    The command is run as a child process. There, holmes writes the measured seconds of each layer
    into the file of --profile, and ends the job. The plan is then computed from this file.

    Returns:
        The exit status: 0 if the plan was written, 1 if the job failed.

    Raises:
        HolmesError: the input is bad, or nothing was measured.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise HolmesError(
            "holmes tune: no command; write it after --, for example:"
            " holmes tune -- torchrun --nproc-per-node 8 train.py"
        )
    if shutil.which(command[0]) is None:
        raise HolmesError(f"holmes tune: {command[0]}: no such command")
    if not 0 < args.steps < _MOST_STEPS:  # the upper limit only keeps nonsense out
        raise HolmesError(f"holmes tune: --steps {args.steps} is not 1 or more")
    profile = Path(args.profile).absolute()
    profile.unlink(missing_ok=True)  # if it exists after the job, this job has written it
    # STOP after the file's name ends the job when the profile has been written.
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
            f"machine (use the plan there), or it trained fewer than {args.steps + _WARM_UP_STEPS} steps, "
            "or it used neither DeepSpeed's pipeline engine nor megatron-core's schedules"
        )
    return make_plan(args, profile)


def make_plan(args: argparse.Namespace, path: Path) -> int:
    """Write the plan for a measured job, print the layers of its stages, and return 0.

    Args:
        args: Arguments of `holmes tune`.
        path: File with the measured times.

    Raises:
        HolmesError: a file cannot be read or written.
    """
    profile = load_profile(path)
    plan = build_plan(
        Site.from_dict(profile.site),
        profile.sizes,
        partition=args.partition,
        alpha=args.alpha,  # of the Holmes paper's formula for layers, with --partition speed
        overlap=args.overlap == "on",
        profile=profile,
    )
    plan.save(args.output)
    measured_layers = [
        len(stage.blocks) for stage in profile.stages
    ]  # of the job that was measured
    layers = plan.stage_layers or measured_layers
    print(
        f"holmes: {args.output}: layers {_with_plus(layers)} ({plan.partition}), measured with "
        f"{_with_plus(measured_layers)}; a step took {profile.step_s:.4g} s, predicted are "
        f"{plan.predicted['step_seconds']:.4g} s"
    )
    print(
        f"holmes: start the real run with --holmes --holmes-plan {args.output}"
        " (and the --holmes-cluster FILE of this one, if any)"
    )
    return 0


def _with_plus(layers: Sequence[int]) -> str:
    """Return the layers of the stages as text: "5+3"."""
    return "+".join(map(str, layers))

"""Counts the steps of a job while network rates change, with a plan that adapts and with fixed plans.

These are the cases "ENGINE trace" of adapt.py. TRACE compresses an hour into minutes: the rate of
Ethernet changes, a link fails, and a rank becomes slow. In each part of the trace the steps are counted,
for the job that adapts and for a job with each fixed plan.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Row, Runs
from holmes_lab import Lab
from holmes_lab.compare import Variant


@dataclass(frozen=True)
class Part:
    """Period in which the Ethernet rate and the accelerator speed of node b0 stay the same.

    TRACE is a sequence of such periods. Every measured job trains while its network changes by
    TRACE.
    """

    seconds: float
    rate: float  # in units of the rate that makes an activation take half of a stage's time
    link: bool = True  # whether the Ethernet cable of node b0 is plugged in
    speed: float = 1.0  # of the accelerator of node b0


TRACE = (
    Part(30, 4.0),
    Part(30, 1.0),
    Part(30, 0.5),
    Part(4, 0.5, link=False),
    Part(30, 4.0),
    Part(15, 0.25),
    Part(20, 1.0, speed=0.5),
    Part(20, 1.0),
    Part(30, 2.0),
)
#: Fixed plans, as values of --holmes-inflight: micro-batches in flight in excess of those of 1F1B.
FIXED = ("off", "0", "4")


def rows(
    name: str,
    script: Sequence[str],
    accelerator: dict[str, Any],
    half_bps: float,
    write: Callable[[Path, float], Path],
    variant: Callable[..., Variant],
    runs: Runs,
) -> list[Row]:
    """Count the steps of a job on a changing network, with an adaptive plan and with fixed plans.

    TRACE is the sequence of network rates, link failures and GPU speeds, the same for all jobs. The
    job "learns" changes its number of micro-batches in flight while it runs. Each other job keeps a
    value of FIXED (values of the option --holmes-inflight).

    Args:
        name: Name of the case in the results.
        script: The training script and its arguments.
        accelerator: Settings of the emulated accelerator.
        half_bps: Rate that makes an activation take half of a stage's time, in bits/s.
        write: write(folder, rate) writes a cluster file and returns its path.
        variant: variant(name, file, *flags) makes a job on the clusters of a file.
        runs: Results of earlier runs.

    Returns:
        No rows if no time is left for a run.
    """
    counts: dict[str, list[int]] = {}
    for plan in ("learns", *FIXED):
        flags = () if plan == "learns" else ("--holmes-inflight", plan, "--holmes-adapt", "off")

        def run(flags: tuple[str, ...] = flags) -> list[int]:
            """Run the job through all periods of TRACE; return the number of its steps in each period."""
            with tempfile.TemporaryDirectory() as directory:
                file = write(Path(directory), half_bps)
                return _steps_of(
                    variant("", file, *flags), script, accelerator, half_bps, Path(directory)
                )

        steps = runs.of(f"{name} {plan}", run)
        if steps is None:
            return []
        counts[plan] = steps
    best = [max(counts[plan][part] for plan in FIXED) for part in range(len(TRACE))]
    totals = {plan: sum(parts) for plan, parts in counts.items()}
    fixed = max(totals[plan] for plan in FIXED)
    return [
        Row.median(
            name,
            "steps, learns : the best fixed plan of each part",
            [totals["learns"] / sum(best)],
            unit="x",
            emulated=True,
            target=">= 0.95",
        ),
        Row.median(
            name,
            "steps, learns : the best one fixed plan",
            [totals["learns"] / fixed],
            unit="x",
            emulated=True,
            target=">= 1",
        ),
        *(
            Row.median(name, f"steps, {plan}", [total], unit="steps", emulated=True)
            for plan, total in totals.items()
        ),
    ]


def _steps_of(
    variant: Variant,
    script: Sequence[str],
    accelerator: dict[str, Any],
    half_bps: float,
    folder: Path,
) -> list[int]:
    """Run one job while the network changes, and return its number of steps in each period.

    TRACE has the periods (Part), each with an Ethernet rate and an accelerator speed. The job is
    killed after the last period.

    Args:
        variant: The job's clusters, order of nodes and flags.
        script: The training script and its arguments.
        accelerator: Settings of the emulated accelerator.
        half_bps: Unit of the rates in TRACE, in bits/s. At this rate an activation takes half of a
            stage's time.
        folder: For the job's log and the speeds of its accelerators.
    """
    log = folder / "log.jsonl"  # the job writes a line for each step
    throttle = folder / "throttle.json"  # the emulated accelerators read their speeds there
    with Lab(variant.spec, realtime=True) as lab:
        command = [sys.executable, *script, "--steps", "100000", "--log", str(log), *variant.flags]
        job = lab.start(
            command,
            order=variant.order,
            accelerator={**accelerator, "throttle": str(throttle)},
            env={"DS_ACCELERATOR": "cpu"},
            preload=("torch",),
            timeout=900,
        )
        while _lines(log) < 3:  # the first steps, which warm up
            if job.poll() is not None:
                raise SystemExit(f"adapt.py: {job.poll().outputs}")
            time.sleep(0.1)
        counts = []
        for part in TRACE:
            before = _lines(log)
            for node in lab.nodes:
                lab.set_rate(node.name, "eth0", round(part.rate * half_bps))
            lab.set_link("b0", "eth0", part.link)
            # Renamed, so that no accelerator reads a half-written file.
            new = throttle.with_suffix(".new")
            new.write_text(json.dumps({"b0": part.speed}))
            new.rename(throttle)
            time.sleep(part.seconds)
            counts.append(_lines(log) - before)
        job.kill()
        job.wait()
    return counts


def _lines(log: Path) -> int:
    """Return the number of lines in a log: the number of finished steps."""
    return len(log.read_text().splitlines()) if log.exists() else 0

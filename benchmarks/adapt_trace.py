"""Rates that change while a job runs: adapt.py's "ENGINE trace".

An hour in minutes: rates of Ethernet change, a link is gone, a rank becomes slow (TRACE). Counted are the
steps that end in each of its parts, of a job that learns and of one for each fixed plan.
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
    """Of a trace. rate: times that at which an activation takes half a stage's time; link: b0's cable is
    plugged in; speed: of b0's accelerator."""

    seconds: float
    rate: float
    link: bool = True
    speed: float = 1.0


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
#: More micro-batches in flight than 1F1B has.
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
    """Steps in each part of the trace, by plan; [] while a run is missing. write(folder, rate): a cluster
    file; variant(name, file, *flags)."""
    counts: dict[str, list[int]] = {}
    for plan in ("learns", *FIXED):
        flags = () if plan == "learns" else ("--holmes-inflight", plan, "--holmes-adapt", "off")

        def run(flags: tuple[str, ...] = flags) -> list[int]:
            with tempfile.TemporaryDirectory() as directory:
                file = write(Path(directory), half_bps)
                return _steps_of(
                    variant("", file, *flags), script, accelerator, half_bps, Path(directory)
                )

        if (steps := runs.of(f"{name} {plan}", run)) is None:
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
            "x",
            True,
            ">= 0.95",
        ),
        Row.median(
            name,
            "steps, learns : the best one fixed plan",
            [totals["learns"] / fixed],
            "x",
            True,
            ">= 1",
        ),
        *(
            Row.median(name, f"steps, {plan}", [total], "steps", True)
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
    log, throttle = folder / "log.jsonl", folder / "throttle.json"
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
        while _lines(log) < 3:
            if job.poll() is not None:
                raise SystemExit(f"adapt.py: {job.poll().outputs}")
            time.sleep(0.1)
        counts = []
        for part in TRACE:
            before = _lines(log)
            for node in lab.nodes:
                lab.set_rate(node.name, "eth0", round(part.rate * half_bps))
            lab.set_link("b0", "eth0", part.link)
            new = throttle.with_suffix(".new")
            new.write_text(json.dumps({"b0": part.speed}))
            new.rename(throttle)
            time.sleep(part.seconds)
            counts.append(_lines(log) - before)
        job.kill()
        job.wait()
    return counts


def _lines(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0

"""Measures the cost of telemetry and watchdog of holmes in a step.

    python benchmarks/telemetry.py --json FILE [--cases operation,2+2,turns] [--repetitions 5] [--steps 14]

The cases:

    operation  a small operation over gloo in one process: the cost of the patched methods of torch's process
               groups
    2+2        the case 2+2 of two_clusters.py (DeepSpeed's pipeline engine, emulated accelerator), with and
               without both in turn
    turns      The same case, where telemetry records every second step of a run (telemetry_turns.py).
               Differences between runs thus do not count. A run that records nothing shows the noise.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from harness import Row, chosen_cases, finish, parser, tell
from holmes_lab import interleave
from holmes_lab.compare import Series, Variant, compare, max_loss_difference
from two_clusters import CASES, Case, loss_row, run, script

from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.samples import examples

#: Prints the median seconds of an all-reduce of 16 bytes in a group of one process. Arguments: the
#: options of holmes_ext.enable() as a Python expression, and "watched" for a recorder that keeps no
#: times (which the watchdog needs) or "no".
SMALL_ALL_REDUCE = """
import sys, time, torch, torch.distributed as dist
import holmes_ext
holmes_ext.enable(**eval(sys.argv[1]))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from holmes_ext.runtime import session
from holmes_ext.runtime.measure import telemetry
if sys.argv[2] == "watched":
    telemetry.set_recorder(telemetry.Recorder(0, None))
tensor, times = torch.ones(4), []
for block in range(60):
    begin = time.perf_counter()
    for _ in range(200):
        dist.all_reduce(tensor)
    times.append((time.perf_counter() - begin) / 200)
    if telemetry.recorder is not None:
        telemetry.recorder.step_done("program")
dist.barrier()
dist.destroy_process_group()
print(sorted(times)[len(times) // 2])
"""


def two_and_two() -> tuple[Case, SiteSpec, tuple[str, ...]]:
    """Return the job "2+2" of two_clusters.py, its clusters, and the flags that switch holmes on.

    The job is a DeepSpeed pipeline on two emulated clusters of two nodes.
    """
    case = next(case for case in CASES if case.name == "2+2")
    file = examples() / "clusters" / case.file
    sizes = ("--holmes-sizes", f"pipeline={case.stages}")
    return case, load_spec(file), ("--holmes", "--holmes-cluster", str(file), *sizes)


def steps(repetitions: int, count: int) -> list[Row]:
    """Compare steps with neither telemetry nor watchdog, with both, and with neither again (the noise).

    Args:
        repetitions: Runs of each variant.
        count: Training steps of a run.
    """
    case, spec, flags = two_and_two()
    with tempfile.TemporaryDirectory() as directory:
        variants = [
            Variant("neither", spec, interleave(spec), flags=(*flags, "--holmes-watchdog", "off")),
            Variant(
                "telemetry and watchdog",
                spec,
                interleave(spec),
                flags=(*flags, "--holmes-telemetry", directory),
            ),
            Variant(
                "neither again", spec, interleave(spec), flags=(*flags, "--holmes-watchdog", "off")
            ),
        ]
        series = run("telemetry", variants, case, repetitions, count)
    without, all_of_it, again = (series[variant.name] for variant in variants)
    pairs = [a / b - 1 for a, b in zip(all_of_it.medians, without.medians)]
    noise = [a / b - 1 for a, b in zip(again.medians, without.medians)]
    difference = max_loss_difference(without, all_of_it)
    rows = [
        Row.of(
            "2+2",
            f"step, {measured.name}",
            measured.median,
            unit="s",
            spread=measured.spread,
            emulated=measured.emulated,
        )
        for measured in series.values()
    ]
    emulated = without.emulated
    rows.append(
        Row.of(
            "2+2",
            "what both add to a step",
            all_of_it.median / without.median - 1,
            unit="of a step",
            spread=(min(pairs), max(pairs)),
            emulated=emulated,
            target="<= 0.005",
        )
    )
    rows.append(
        Row.of(
            "2+2",
            "A/A difference (noise)",
            again.median / without.median - 1,
            unit="of a step",
            spread=(min(noise), max(noise)),
            emulated=emulated,
        )
    )
    rows.append(loss_row("2+2", difference))
    return rows


def turns(repetitions: int, count: int) -> list[Row]:
    """Measure how much telemetry adds to a step, by recording only every second step of a training run.

    Steps that are recorded are compared with the other steps of the same run. Differences between
    runs thus do not count. A run without any recorded step shows the noise.

    Args:
        repetitions: Runs with telemetry, and as many without it.
        count: A run has 4 x `count` steps, of which the first four are not measured.
    """
    case, spec, flags = two_and_two()
    with tempfile.TemporaryDirectory() as directory:
        variants = [
            Variant("on", spec, interleave(spec), flags=(*flags, "--holmes-telemetry", directory)),
            Variant("off", spec, interleave(spec), flags=(*flags, "--holmes-watchdog", "off")),
        ]
        series = compare(
            variants,
            [str(Path(__file__).with_name("telemetry_turns.py")), *script(case)],
            repetitions=repetitions,
            steps=4 * count,
            skip=4,
            accelerator={"flops": case.flops, "classes": ["Block"]},
            on_run=lambda variant, _: tell(f"turns: {variant}"),
        )

    def added(measured: Series) -> list[float]:
        """Return for each run the time that the recorder adds to a step, as a part of the step.

        The recorder is on in every second step, from step 0 on.
        """
        return [
            statistics.median(run[::2]) / statistics.median(run[1::2]) - 1 for run in measured.steps
        ]

    return [
        Row.median(
            "turns",
            "what the recorder adds to a step",
            added(series["on"]),
            unit="of a step",
            emulated=True,
            target="<= 0.005",
        ),
        Row.median(
            "turns",
            "the same without one (noise)",
            added(series["off"]),
            unit="of a step",
            emulated=True,
        ),
    ]


class SmallJob(NamedTuple):
    """Settings of a short program that times an all-reduce of 16 bytes with holmes switched on."""

    options: str  # options of holmes_ext.enable(), as a Python expression
    recorder: str = "no"  # "watched": with a recorder that keeps no times
    disabled: str = ""  # features of holmes that are off (HOLMES_DISABLE)


def operation(repetitions: int) -> list[Row]:
    """Measure the time that holmes adds to a small operation: an all-reduce of 16 bytes in one process.

    holmes patches the methods of torch's process groups, so that a recorder can time them. The
    variants:

        patches off     the methods are not patched (the feature "telemetry" is disabled)
        nobody looks    they are patched, but there is no recorder
        watchdog        a recorder keeps only the operation that runs, as the watchdog needs it
        telemetry       a recorder keeps the times of all operations
    """
    with tempfile.TemporaryDirectory() as directory:
        no_watchdog = "dict(watchdog='off')"
        # No thread of the watchdog runs in any variant: the cost of the recorder is measured.
        variants = {
            "patches off": SmallJob(no_watchdog, disabled="telemetry"),
            "nobody looks": SmallJob(no_watchdog),
            "watchdog": SmallJob(no_watchdog, recorder="watched"),
            "telemetry": SmallJob(f"dict(watchdog='off', telemetry={directory!r})"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(repetitions):
            for name, job in variants.items():
                env = {**os.environ, "HOLMES_DISABLE": job.disabled}
                command = [sys.executable, "-c", SMALL_ALL_REDUCE, job.options, job.recorder]
                result = subprocess.run(
                    command, capture_output=True, text=True, env=env, check=True
                )
                seconds[name].append(float(result.stdout.strip().splitlines()[-1]))
    return [
        Row.median(
            "one operation",
            f"all-reduce of 16 bytes, {name}",
            [run_s * 1e6 for run_s in times],
            unit="us",
            emulated=False,
        )
        for name, times in seconds.items()
    ]


def main() -> int:
    """Measure the cost of telemetry and watchdog, and print and write the table of results.

    The cases:

        operation    a small all-reduce in one process, with and without the patched methods
        2+2          steps of a job on two clusters of two nodes, with and without both
        turns        steps of a single run; every second step is recorded
    """
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=14)
    args = arguments.parse_args()
    makers = {
        "operation": lambda: operation(args.repetitions),
        "2+2": lambda: steps(args.repetitions, args.steps),
        "turns": lambda: turns(args.repetitions, args.steps),
    }
    rows = [row for name in chosen_cases(args.cases, makers) for row in makers[name]()]
    return finish(rows, args.json, "What telemetry and the watchdog cost")


if __name__ == "__main__":
    sys.exit(main())

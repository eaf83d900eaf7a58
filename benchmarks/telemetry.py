"""What telemetry and the watchdog cost a healthy step: holmes without them against holmes with both.

    python benchmarks/telemetry.py --json FILE [--repetitions 5] [--steps 14]

The 2+2 scene of two_clusters.py (DeepSpeed's pipeline engine, emulated accelerator), the variants in turn; and the time
of one small operation over gloo in one process, which is what the patched methods of torch's process groups add to
each.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

from harness import Row, finish, parser, tell
from two_clusters import SCENES, run

from holmes_ext.cluster.spec import load_spec
from holmes_ext.lab import interleave
from holmes_ext.lab.compare import Variant, max_loss_difference
from holmes_ext.lab.samples import examples

SMALL = """
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


def steps(repetitions: int, count: int) -> list[Row]:
    """A step with neither, with both, and with neither once more (the noise)."""
    scene = next(one for one in SCENES if one.name == "2+2")
    file = examples() / "clusters" / scene.file
    spec = load_spec(file)
    flags = ("--holmes", "--holmes-cluster", str(file), "--holmes-sizes", f"pipeline={scene.stages}")
    with tempfile.TemporaryDirectory() as directory:
        variants = [
            Variant("neither", spec, interleave(spec), (*flags, "--holmes-watchdog", "off")),
            Variant("telemetry and watchdog", spec, interleave(spec), (*flags, "--holmes-telemetry", directory)),
            Variant("neither again", spec, interleave(spec), (*flags, "--holmes-watchdog", "off")),
        ]
        series = run("telemetry", variants, scene, repetitions, count)
    without, all_of_it, again = (series[variant.name] for variant in variants)
    pairs = [a / b - 1 for a, b in zip(all_of_it.medians, without.medians)]
    noise = [a / b - 1 for a, b in zip(again.medians, without.medians)]
    difference = max_loss_difference(without, all_of_it)
    rows = [Row.of("2+2", f"step, {one.name}", one.median, "s", one.spread, one.emulated) for one in series.values()]
    emulated = without.emulated
    for metric, series_of, each, target in (
        ("what both add to a step", all_of_it, pairs, "<= 0.005"), ("A/A difference (noise)", again, noise, ""),
    ):  # fmt: skip
        share = series_of.median / without.median - 1
        rows.append(Row.of("2+2", metric, share, "of a step", (min(each), max(each)), emulated, target))
    spread = (difference, difference)
    rows.append(Row.of("2+2", "largest loss difference", difference, "nats", spread, False, "<= 1e-6"))
    return rows


def operation(repetitions: int) -> list[Row]:
    """Seconds of an all-reduce of 16 bytes in one process: with the patches off, on without a recorder, watched, and
    written down."""
    with tempfile.TemporaryDirectory() as directory:
        ways = {
            "patches off": ("dict(watchdog='off')", "no", "telemetry"),
            "nobody looks": ("dict(watchdog='off')", "no", ""),
            "watchdog": ("dict(watchdog='off')", "watched", ""),
            "telemetry": (f"dict(watchdog='off', telemetry={directory!r})", "no", ""),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repetitions):
            for name, (options, watched, off) in ways.items():
                env = {**os.environ, "HOLMES_DISABLE": off}
                command = [sys.executable, "-c", SMALL, options, watched]
                result = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
                seconds[name].append(float(result.stdout.strip().splitlines()[-1]))
    rows = []
    for name, times in seconds.items():
        spread = (min(times) * 1e6, max(times) * 1e6)
        metric = f"all-reduce of 16 bytes, {name}"
        rows.append(Row.of("one operation", metric, statistics.median(times) * 1e6, "us", spread, False))
    return rows


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=14)
    args = arguments.parse_args()
    makers = {"operation": lambda: operation(args.repetitions), "2+2": lambda: steps(args.repetitions, args.steps)}
    wanted = [name for name in args.scenes.split(",") if name]
    unknown = [name for name in wanted if name not in makers]
    if unknown:
        tell(f"telemetry.py: no scene {unknown[0]!r}; there are {', '.join(makers)}")
        return 2
    rows = [row for name, make in makers.items() if not wanted or name in wanted for row in make()]
    return finish(rows, args.json, "What telemetry and the watchdog cost")


if __name__ == "__main__":
    sys.exit(main())

"""Joined jobs over a WAN in the lab: the same jobs apart, joined, and one synchronous job over that link.

    python benchmarks/joined.py --json FILE [--repetitions 3] [--steps 60]

examples/plain_torch on 2 + 2 emulated nodes, 40 ms round trip and 20 Mb/s, shared, between the clusters (layers sleep
as long as an accelerator of 2 GFLOP/s would compute). "apart": two jobs that know nothing of each other; "joined":
--holmes-join, every 16 steps in 4 fragments, one step under way; "synchronous": one job of four, --holmes (two
levels). Alternating; tokens per second of all nodes together, of the steps after the first period.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness import Row, finish, parser, tell

from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.lab import Lab
from holmes_ext.lab.samples import examples

CLUSTERS = """version = 2 [ethernet] rate = "1Gb/s" [[cluster]] name = "a" kind = "ib" rate = "1Gb/s" nodes =
["a[0-1]"] processes = 1 [[cluster]] name = "b" kind = "roce" rate = "1Gb/s" nodes = ["b[0-1]"] processes = 1
[[between]] clusters = ["a", "b"] rate = "20Mb/s" latency = "20ms"
"""
SIZE = "--layers 4 --hidden 128 --heads 4 --sequence 64 --micro-batch 2 --micro-batches 2".split()
TOKENS = 2 * 2 * 64  # of a rank in a step
ACCELERATOR = {"flops": 2e9, "classes": ["Block"]}
TOKEN, PORT, SKIP = "benchmark", 29600, 16
OUTER = "min=2,every=16,fragments=4,delay=1,timeout=60"


def run(lab: Lab, jobs: dict[str, list[str]], flags: dict[str, list[str]], directory: Path, steps: int) -> float:
    """Tokens per second of all jobs, each on its nodes."""
    script = str(examples() / "plain_torch" / "train.py")
    running = []
    for seed, (name, nodes) in enumerate(jobs.items()):
        log = directory / f"{name}.jsonl"
        command = [sys.executable, script, *SIZE, "--steps", str(steps), "--seed", str(seed + 1)]
        command += ["--log-file", str(log)]
        running.append((name, len(nodes), log, lab.start(
            [*command, *flags.get(name, [])], order=nodes, preload=("torch",), timeout=500, accelerator=ACCELERATOR,
            env={"HOLMES_JOIN_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"})))  # fmt: skip
    total = 0.0
    for name, ranks, log, job in running:
        result = job.wait()
        if result.returncode:
            raise SystemExit(f"{name}: status {result.returncode}\n" + "\n".join(result.outputs.values())[-3000:])
        seconds = [json.loads(line)["seconds"] for line in log.read_text().splitlines()][SKIP:]
        total += ranks * TOKENS / statistics.fmean(seconds)
    return total


def measure(spec: SiteSpec, file: Path, steps: int, repetitions: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"apart": [], "joined": [], "synchronous": []}
    halves = {"east": ["a0", "a1"], "west": ["b0", "b1"]}
    with Lab(spec) as lab, tempfile.TemporaryDirectory() as directory:
        address = next(node.address for node in lab.nodes if node.name == "a0")
        serve = lab.start(
            [sys.executable, "-m", "holmes_ext.cli.main", "join", "serve", "--port", str(PORT)], order=["a0"],
            env={"HOLMES_JOIN_TOKEN": TOKEN})  # fmt: skip
        try:
            time.sleep(3)
            joins = {name: ["--holmes", "--holmes-join", f"{name}@{address}:{PORT}", "--holmes-outer", OUTER,
                            "--holmes-preflight", "off"] for name in halves}  # fmt: skip
            ways = {
                "apart": (halves, {name: ["--holmes", "--holmes-preflight", "off"] for name in halves}),
                "joined": (halves, joins),
                "synchronous": ({"all": [*halves["east"], *halves["west"]]},
                                {"all": ["--holmes", "--holmes-cluster", str(file)]}),
            }
            for repetition in range(repetitions):
                for way, (jobs, flags) in ways.items():
                    count = min(steps, SKIP + 14) if way == "synchronous" else steps
                    found[way].append(run(lab, jobs, flags, Path(directory), count))
                    tell(f"joined: {way}, repetition {repetition + 1}: {found[way][-1]:.0f} token/s")
        finally:
            serve.kill()
    return found


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=80)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cluster.toml"
        file.write_text(CLUSTERS)
        found = measure(load_spec(file), file, args.steps, args.repetitions)
    rows = [Row.median("2 + 2, 40 ms, 20 Mb/s", f"tokens/s, {way}", values, "token/s", True)
            for way, values in found.items()]  # fmt: skip
    for other, target in (("apart", ">= 0.97"), ("synchronous", ">= 5")):
        ratios = [a / b for a, b in zip(found["joined"], found[other])]
        rows.append(Row.median("2 + 2, 40 ms, 20 Mb/s", f"joined / {other}", ratios, "", True, target))
    return finish(rows, args.json, f"joined jobs in the lab, {args.repetitions} repetitions")


if __name__ == "__main__":
    sys.exit(main())

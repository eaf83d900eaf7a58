"""Joined jobs over a WAN in the lab: the same jobs apart, joined, and one synchronous job over that link.

    python benchmarks/joined.py --json FILE [--repetitions 3] [--steps 60]

examples/plain_torch on 2 + 2 emulated nodes, 40 ms round trip and 20 Mb/s, shared, between the clusters (layers sleep
as long as an accelerator of 2 GFLOP/s would compute). "apart": two jobs that know nothing of each other; "joined":
--holmes-join, every 16 steps in 4 fragments, one step under way; "synchronous": one job of four, --holmes (two
levels). Alternating; tokens per second of all nodes together, of the steps after the first period.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from harness import Row, finish, parser, tell

from holmes_ext.cluster.spec import load_spec
from holmes_ext.lab import Lab
from holmes_ext.lab.joined import CLUSTERS, NODES, TOKENS, join_flags, meeting_point, start

SKIP = 16
OUTER = "min=2,every=16,fragments=4,delay=1,timeout=60"
SCENE = "2 + 2, 40 ms, 20 Mb/s"


def run(lab: Lab, jobs: dict[str, tuple[list[str], list[str]]], directory: Path, steps: int) -> float:
    """Tokens per second of all jobs together; jobs: {name: (nodes, flags)}."""
    running = [
        (len(nodes), start(lab, name, nodes, flags, steps, seed, directory / f"{name}.jsonl"))
        for seed, (name, (nodes, flags)) in enumerate(jobs.items(), 1)
    ]
    total = 0.0
    for ranks, one in running:
        one.wait()
        total += ranks * TOKENS / statistics.fmean(line["seconds"] for line in one.steps()[SKIP:])
    return total


def measure(file: Path, steps: int, repetitions: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"apart": [], "joined": [], "synchronous": []}
    alone, together = ["--holmes", "--holmes-preflight", "off"], [*NODES["east"], *NODES["west"]]
    with Lab(load_spec(file)) as lab, tempfile.TemporaryDirectory() as directory:
        for repetition in range(repetitions):
            for way in found:
                with meeting_point(lab) as (where, _):
                    jobs = {
                        "apart": {name: (nodes, alone) for name, nodes in NODES.items()},
                        "joined": {name: (nodes, join_flags(name, where, OUTER)) for name, nodes in NODES.items()},
                        "synchronous": {"all": (together, ["--holmes", "--holmes-cluster", str(file)])},
                    }[way]
                    count = min(steps, SKIP + 14) if way == "synchronous" else steps
                    found[way].append(run(lab, jobs, Path(directory), count))
                tell(f"joined: {way}, repetition {repetition + 1}: {found[way][-1]:.0f} token/s")
    return found


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=80)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cluster.toml"
        file.write_text(CLUSTERS)
        found = measure(file, args.steps, args.repetitions)
    rows = [Row.median(SCENE, f"tokens/s, {way}", values, "token/s", True) for way, values in found.items()]
    for other, target in (("apart", ">= 0.97"), ("synchronous", ">= 5")):
        ratios = [a / b for a, b in zip(found["joined"], found[other])]
        rows.append(Row.median(SCENE, f"joined / {other}", ratios, "", True, target))
    return finish(rows, args.json, f"joined jobs in the lab, {args.repetitions} repetitions")


if __name__ == "__main__":
    sys.exit(main())

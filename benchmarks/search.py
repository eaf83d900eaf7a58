"""How long `holmes plan` searches, and how much memory it takes: 1,024 GPUs in 4 clusters, 16,384 in 8.

    python benchmarks/search.py --json FILE

Each search runs in a process of its own, which is waited for; the certificate's gap is a row too. Targets: under 10 s,
under 60 s, under 2 GiB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import harness

EXAMPLES = Path(__file__).parents[1] / "examples"
SCENES = {  # name: (clusters, model, global batch, seconds allowed)
    "1,024 GPUs in 4 clusters": ("four_clusters_1024", "gpt_128_layers", 2048, 10),
    "16,384 GPUs in 8 clusters": ("eight_clusters_16384", "gpt_128_layers", 16384, 60),
}
RUNS = 3
METRICS = (
    ("time", "s", ""), ("CPU time", "s", ""), ("memory", "GiB", "<= 2"),
    ("gap of the certificate", "fraction", ""), ("gap of the simulated certificate", "fraction", ""),
)


def measure(clusters: str, model: str, batch: int) -> tuple[float, ...]:
    """What METRICS names, of one `holmes plan --json`."""
    files = ("--cluster", EXAMPLES / "clusters" / f"{clusters}.toml", "--model", EXAMPLES / "models" / f"{model}.toml")
    holmes = [sys.executable, "-m", "holmes_ext.cli.main", "plan", *map(str, files)]
    start = time.monotonic()
    process = subprocess.Popen([*holmes, "--global-batch", str(batch), "--json"], stdout=subprocess.PIPE)
    found = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, status
    gaps = found["closed_form"]["gap"], found["certificate"]["gap"]
    return time.monotonic() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20, *gaps


def main() -> int:
    args = harness.parser(__doc__.splitlines()[0]).parse_args()
    rows = []
    for name, (clusters, model, batch, allowed) in SCENES.items():
        if args.scenes and name.split()[0] not in args.scenes.split(";"):
            continue
        runs = [measure(clusters, model, batch) for _ in range(RUNS)]
        for (metric, unit, target), *values in zip(METRICS, *runs):
            target = f"<= {allowed}" if metric == "time" else target
            middle, spread = sorted(values)[RUNS // 2], (min(values), max(values))
            rows.append(harness.Row.of(name, metric, middle, unit, spread, False, target))
    return harness.finish(rows, args.json, "holmes plan: the search")


if __name__ == "__main__":
    sys.exit(main())

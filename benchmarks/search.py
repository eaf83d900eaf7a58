"""Measures how far `holmes plan` proves its best step within 60 s on two cores, and its time and memory.

    python benchmarks/search.py --json FILE

The clusters are that of the Holmes paper, 1,024 GPUs in 4 clusters, and 16,384 GPUs in 8 clusters. Each
is planned with the usual batch, half of it and twice of it. A search runs in processes of its own. `was`
is the simulated step that the search by closed form with 30 simulations found (commit ed25aad). The step
must not be above it.

"nodes of 30 random sites" is `holmes plan --nodes N --from-cluster FILE --seconds 10` of GPT-3 XL on
sites of 200 nodes in two to four clusters (tests/random_clusters.py). The result is the number of choices
that are proven to be the best.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from random_clusters import random_site  # noqa: E402

EXAMPLES = Path(__file__).parents[1] / "examples"
PAPER, FOUR = ("paper_4_roce_4_ib", "gpt_7.5b"), ("four_clusters_1024", "gpt_128_layers")
EIGHT = ("eight_clusters_16384", "gpt_128_layers")
# name: (clusters, model, global batch, gap allowed, simulated step of the search before this one or 0)
CASES = {
    "paper, batch 256": (*PAPER, 256, 0.05, 3.8550),
    "paper, batch 512": (*PAPER, 512, 0.05, 7.1547),
    "paper, batch 1,024": (*PAPER, 1024, 0.05, 12.5698),
    "paper, batch 768": (*PAPER, 768, 0.05, 0),
    "paper, batch 1,536": (*PAPER, 1536, 0.05, 17.9849),
    "paper, batch 3,072": (*PAPER, 3072, 0.05, 34.2302),
    "1,024 GPUs in 4 clusters, batch 1,024": (*FOUR, 1024, 0.05, 7.1086),
    "1,024 GPUs in 4 clusters, batch 2,048": (*FOUR, 2048, 0.05, 12.5786),
    "1,024 GPUs in 4 clusters, batch 4,096": (*FOUR, 4096, 0.05, 23.4536),
    "16,384 GPUs in 8 clusters, batch 2,048": (*EIGHT, 2048, 0.10, 0),
    "16,384 GPUs in 8 clusters, batch 4,096": (*EIGHT, 4096, 0.10, 0),
    "16,384 GPUs in 8 clusters, batch 8,192": (*EIGHT, 8192, 0.10, 0),
}
SECONDS = 60
SITES, SITE_SECONDS = "nodes of 30 random sites", 10


def measure(clusters: str, model: str, batch: int) -> dict[str, float]:
    """Run `holmes plan --json` once, and return metric -> value, with the metrics of UNITS.

    Args:
        clusters: Name of a file in examples/clusters, without .toml.
        model: Name of a file in examples/models, without .toml.
        batch: Global batch size.
    """
    files = (
        "--cluster",
        EXAMPLES / "clusters" / f"{clusters}.toml",
        "--model",
        EXAMPLES / "models" / f"{model}.toml",
    )
    holmes = [
        sys.executable,
        "-m",
        "holmes_ext.cli.main",
        "plan",
        *map(str, files),
        "--seconds",
        str(SECONDS),
    ]
    start = time.monotonic()
    process = subprocess.Popen(
        [*holmes, "--global-batch", str(batch), "--json"], stdout=subprocess.PIPE
    )
    result = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, status
    return {
        "search": result["seconds"],
        "whole command": time.monotonic() - start,
        "memory of its first process": usage.ru_maxrss / 2**20,
        "step": result["optimality_gap"]["step_seconds"],
        "optimality gap (simulated)": result["optimality_gap"]["gap"],
    }


def measure_sites() -> list[harness.Row]:
    """Run 30 searches for nodes, and return the rows of results."""
    took, gaps = [], []
    with tempfile.TemporaryDirectory() as folder:
        cluster, model = Path(folder, "cluster.toml"), EXAMPLES / "models" / "gpt3_xl.toml"
        for seed in range(1000, 1030):
            _, toml, pipeline, count = random_site(seed, 200)
            cluster.write_text(toml)
            files = (
                "--from-cluster",
                cluster,
                "--model",
                model,
                "--sizes",
                f"pipeline={pipeline},tensor=8",
            )
            asked = (
                "--nodes",
                count,
                "--global-batch",
                8 * count // pipeline,
                "--seconds",
                SITE_SECONDS,
                "--json",
            )
            start = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "holmes_ext.cli.main", "plan", *map(str, (*files, *asked))],
                stdout=subprocess.PIPE,
                check=True,
            )
            took.append(time.monotonic() - start)
            gaps.append(json.loads(done.stdout)["gap"])
            print(f"site {seed}: gap {gaps[-1]:.2%}, {took[-1]:.1f} s", file=sys.stderr, flush=True)
    proven, middle = sum(gap < 1e-6 for gap in gaps), sorted(took)[len(took) // 2]
    return [
        harness.Row.median(
            SITES,
            "proven to be the best",
            [proven],
            unit="sites",
            emulated=False,
            target="",
        ),
        harness.Row.of(
            SITES,
            "gap",
            max(gaps),
            unit="fraction",
            spread=(min(gaps), max(gaps)),
            emulated=False,
            target="",
        ),
        harness.Row.of(
            SITES,
            "whole command",
            middle,
            unit="s",
            spread=(min(took), max(took)),
            emulated=False,
            target="",
        ),
    ]


UNITS = {
    "search": "s",
    "whole command": "s",
    "memory of its first process": "GiB",
    "step": "s",
    "optimality gap (simulated)": "fraction",
}


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    args = harness.parser(__doc__.splitlines()[0]).parse_args()
    names = [*CASES, SITES]
    parts = args.cases.split(";")
    chosen = [name for name in names if not args.cases or any(part in name for part in parts)]
    rows = harness.kept(args.json, chosen)
    for name in chosen:
        if name == SITES:
            rows += measure_sites()
            harness.write(rows, args.json)
            continue
        clusters, model, batch, gap, was = CASES[name]
        targets = {
            "search": f"<= {SECONDS + 3}",
            "memory of its first process": "<= 2",
            "optimality gap (simulated)": f"<= {gap}",
            "step": f"<= {was}" if was else "",
        }
        for metric, value in measure(clusters, model, batch).items():
            known = UNITS[metric], (value, value), False, targets.get(metric, "")
            rows.append(harness.Row.of(name, metric, value, *known))
        rows.sort(key=lambda row: names.index(row.case))
        harness.write(rows, args.json)
    return harness.finish(rows, args.json, "holmes plan: the search")


if __name__ == "__main__":
    sys.exit(main())

"""Training with compressed gradients between two clusters: loss curves beside the uncompressed one, and the bytes that cross.

    python benchmarks/compression.py --json FILE [--picture FILE.png] [--steps 300]

examples/plain_torch, data-parallel over 2 + 2 emulated nodes, each way of --holmes-compress from the same weights on the same text. Nothing
is emulated but the clusters: the losses are those of real training. Needs matplotlib for the picture.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from harness import Row, finish, parser, tell

from holmes_ext.cluster.spec import load_spec
from holmes_ext.lab import Lab, interleave
from holmes_ext.lab.samples import examples

KINDS = ("off", "bf16", "int8")
CLUSTERS = examples() / "clusters" / "two_clusters_4.toml"
#: 0.23 M parameters; 512 bytes of text in a micro-batch of each rank.
MODEL = "--layers 4 --hidden 64 --heads 4 --sequence 64 --micro-batch 8 --micro-batches 1 --lr 3e-3".split()
#: Losses are noisy from step to step: curves and figures are means over so many.
WINDOW = 25


def train(lab: Lab, kind: str, steps: int) -> tuple[list[float], float]:
    """Losses, and the bytes that one cluster's Ethernet NICs sent for each step."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "log.jsonl")
        script = str(examples() / "plain_torch" / "train.py")
        command = [sys.executable, script, *MODEL, "--steps", str(steps), "--log-file", str(log)]
        before = lab.counters()
        flags = ["--holmes", "--holmes-cluster", str(CLUSTERS), "--holmes-compress", kind]
        result = lab.run([*command, *flags], order=interleave(lab.spec), preload=("torch",), timeout=600)
        if result.returncode:
            raise SystemExit(f"compression.py: status {result.returncode}:\n{result.outputs[result.first_failed or 0]}")
        after = lab.counters()
        sent = sum(after[node]["eth0"][1] - before[node]["eth0"][1] for node in lab.spec.clusters[0].nodes)
        return [json.loads(line)["loss"] for line in log.read_text().splitlines()], sent / steps


def means(losses: list[float]) -> list[float]:
    """Of each window of steps."""
    return [statistics.fmean(losses[k : k + WINDOW]) for k in range(0, len(losses) - WINDOW + 1, WINDOW)]


def rows(losses: dict[str, list[float]], sent: dict[str, float]) -> list[Row]:
    made = []
    for kind in KINDS:
        last, first = means(losses[kind])[-1], losses[kind][0]
        made.append(Row.of("compression", f"loss, mean of the last {WINDOW} steps, {kind} (first step {first:.4g})", last, "nats", (last, last), False))
    for kind in KINDS[1:]:
        differences = [abs(a - b) for a, b in zip(means(losses[kind]), means(losses["off"]))]
        made.append(Row.of("compression", f"largest difference of a {WINDOW}-step mean, {kind}", max(differences), "nats", (min(differences), max(differences)), False))
    for kind in KINDS:
        made.append(Row.of("compression", f"sent by a cluster's Ethernet NICs, {kind}", sent[kind] / 1e3, "kB/step", (sent[kind] / 1e3,) * 2, False))
    for kind in KINDS[1:]:
        share = sent[kind] / sent["off"]
        made.append(Row.of("compression", f"bytes that cross, {kind} : off", share, "x", (share, share), False))
    return made


def draw(losses: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for kind, colour, style in zip(KINDS, ("black", "tab:blue", "tab:orange"), ("-", "--", ":")):
        smooth = [statistics.fmean(losses[kind][max(0, k - 9) : k + 1]) for k in range(len(losses[kind]))]
        left.plot(range(1, len(smooth) + 1), smooth, style, color=colour, linewidth=1.3, label=kind)
        if kind != "off":
            places = [WINDOW * k + WINDOW // 2 for k in range(len(means(losses[kind])))]
            difference = [a - b for a, b in zip(means(losses[kind]), means(losses["off"]))]
            right.plot(places, difference, style, marker=".", color=colour, linewidth=1.3, label=f"{kind} - off")
    left.set(xlabel="step", ylabel="loss, nats (mean of 10 steps)", title="Gradients compressed between the clusters")
    right.set(xlabel="step", ylabel=f"nats (means of {WINDOW} steps)", title="Difference to uncompressed")
    right.axhline(0, color="black", linewidth=0.8)
    left.legend()
    right.legend()
    figure.savefig(path, dpi=90)


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--picture", type=Path, metavar="FILE", help="draw the curves there (png)")
    arguments.add_argument("--steps", type=int, default=300)
    args = arguments.parse_args()
    losses, sent = {}, {}
    with Lab(load_spec(CLUSTERS), realtime=True) as lab:
        for kind in KINDS:
            tell(f"compression: {kind}")
            losses[kind], sent[kind] = train(lab, kind, args.steps)
    if args.picture:
        draw(losses, args.picture)
    return finish(rows(losses, sent), args.json, f"Compressed gradients between two clusters, {args.steps} steps")


if __name__ == "__main__":
    sys.exit(main())

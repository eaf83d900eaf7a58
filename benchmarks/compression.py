"""Compares training losses with compressed and uncompressed gradients between two clusters.

    python benchmarks/compression.py --json FILE [--picture FILE.png] [--steps 1500] [--seeds 3]

examples/plain_torch trains data-parallel on 2 + 2 emulated nodes, once for each value of
--holmes-compress-gradients. Weights, text and seeds are the same. Only the clusters are emulated: the
losses are those of real training. The bytes between the clusters are counted, too.

"flat" is the control: the same job without holmes. Its flat ring adds the same numbers in another
order. It shows how far two trainings drift apart that differ by rounding only. The picture needs
matplotlib.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import Row, finish, parser, tell, write
from holmes_lab import Lab, interleave

from holmes_ext.cluster.spec import load_spec
from holmes_ext.samples import examples

KINDS = ("off", "flat", "bf16", "int8")
#: Kinds that send the same bytes as "off", and differ from it by rounding only.
CONTROLS = ("off", "flat", "nudged")
CLUSTERS = examples() / "clusters" / "two_clusters_4.toml"
#: 0.23 M parameters; 512 bytes of text in a micro-batch of each rank.
MODEL = "--layers 4 --hidden 64 --heads 4 --sequence 64 --micro-batch 8 --micro-batches 1 --lr 3e-3".split()
#: Number of steps of an average of losses, because they are noisy from step to step.
WINDOW = 50


def train(lab: Lab, kind: str, steps: int, seed: int) -> tuple[list[float], float]:
    """Train once, and return the losses and the bytes that the Ethernet NICs of a cluster sent for each step.

    Args:
        lab: The emulated nodes.
        kind: A name in KINDS. "flat" runs without holmes.
        steps: Number of training steps.
        seed: Seed of the weights and of the order of the text.

    Raises:
        SystemExit: The training failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "log.jsonl")
        script = str(examples() / "plain_torch" / "train.py")
        command = [
            sys.executable,
            script,
            *MODEL,
            "--seed",
            str(seed),
            "--steps",
            str(steps),
            "--log-file",
            str(log),
        ]
        before = lab.counters()
        flags = (
            ["--holmes", "--holmes-cluster", str(CLUSTERS), "--holmes-compress-gradients", kind]
            if kind != "flat"
            else []
        )
        # holmes chooses the NIC of each group. Without it, gloo needs the NIC that all nodes share.
        env = {} if flags else {"GLOO_SOCKET_IFNAME": "eth0"}
        result = lab.run(
            [*command, *flags],
            order=interleave(lab.spec),  # nodes of both clusters in turn
            env=env,
            preload=("torch",),  # imported once; the ranks are forked from that process
            timeout=600,
        )
        if result.returncode:
            rank = result.first_failed or 0  # None, e.g. after a time-out: show rank 0
            raise SystemExit(f"compression.py: status {result.returncode}:\n{result.outputs[rank]}")
        after = lab.counters()  # node -> NIC -> (bytes received, bytes sent)
        sent = sum(
            after[node]["eth0"][1] - before[node]["eth0"][1] for node in lab.spec.clusters[0].nodes
        )
        return [json.loads(line)["loss"] for line in log.read_text().splitlines()], sent / steps


def curves(
    what: str,
    kinds: Sequence[str],
    seeds: int,
    train: Callable[[str, int], tuple[list[float], float]],
    path: Path | None,
) -> tuple[dict[str, list[list[float]]], dict[str, list[float]]]:
    """Train with each kind of compression and each seed, and return losses and sent bytes by kind.

    The results file is written after each seed.

    Args:
        what: Name of the case.
        kinds: Kinds of compression, and the control. They run in turn for each seed.
        seeds: Number of seeds.
        train: train(kind, seed) returns the losses of the steps, and the bytes sent for each step.
        path: The results file.

    Returns:
        Kind -> losses of each seed, and kind -> bytes of a step for each seed.
    """
    losses: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    sent: dict[str, list[float]] = {kind: [] for kind in kinds}
    for seed in range(1, seeds + 1):
        for kind in kinds:
            tell(f"{what}: seed {seed}, {kind}")
            curve, bytes_of_step = train(kind, seed)
            losses[kind].append(curve)
            sent[kind].append(bytes_of_step)
        write(rows(what, losses, sent), path)
    return losses, sent


def means(losses: list[float]) -> list[float]:
    """Return the mean loss of each window of WINDOW steps."""
    return [
        statistics.fmean(losses[k : k + WINDOW]) for k in range(0, len(losses) - WINDOW + 1, WINDOW)
    ]


def differences(losses: dict[str, list[list[float]]], kind: str) -> list[list[float]]:
    """Return for each seed the mean loss in each window, minus that without compression ("off")."""
    pairs = zip(losses[kind], losses["off"])
    return [[a - b for a, b in zip(means(curve), means(off))] for curve, off in pairs]


def rows(
    case: str, losses: dict[str, list[list[float]]], sent: dict[str, list[float]]
) -> list[Row]:
    """Return the rows of results.

    Args:
        case: Name of the case in the results.
        losses: Kind -> losses of each seed. "off" is the first kind, then the control if there is one.
        sent: Kind -> bytes of a step for each seed.
    """
    table = []

    def row(metric: str, values: list[float], unit: str) -> None:
        """Append a row with the mean of the values of all seeds to the table."""
        table.append(
            Row.of(
                case,
                metric,
                statistics.fmean(values),
                unit=unit,
                spread=(min(values), max(values)),
                emulated=False,
            )
        )

    for kind in losses:
        row(
            f"loss, mean of the last {WINDOW} steps, {kind}",
            [means(curve)[-1] for curve in losses[kind]],
            "nats",
        )
    for kind in list(losses)[1:]:
        apart = differences(losses, kind)
        row(
            f"difference to off, mean of the last {WINDOW} steps, {kind}",
            [curve[-1] for curve in apart],
            "nats",
        )
        row(
            f"largest difference of a {WINDOW}-step mean, {kind}",
            [max(map(abs, curve)) for curve in apart],
            "nats",
        )
    for kind in losses:
        row(
            f"sent by a cluster's Ethernet NICs, {kind}",
            [value / 1e3 for value in sent[kind]],
            "kB/step",
        )
    for kind in losses:
        if kind in CONTROLS:
            continue
        ratios = [compressed / full for compressed, full in zip(sent[kind], sent["off"])]
        row(f"bytes that cross, {kind} : off", ratios, "x")
    return table


def draw(losses: dict[str, list[list[float]]], path: Path, what: str) -> None:
    """Draw the loss curves, and their differences to "off", into a PNG file.

    Args:
        losses: Kind of compression -> losses of each seed.
        path: The PNG file.
        what: Title of the loss curves.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    colours = {
        "off": "black",
        "flat": "tab:gray",
        "nudged": "tab:gray",
        "bf16": "tab:blue",
        "int8": "tab:orange",
    }
    for kind in losses:
        for number, (curve, difference) in enumerate(zip(losses[kind], differences(losses, kind))):
            label = kind if number == 0 else None  # a single entry of the legend for all seeds
            steps = [
                WINDOW * k + WINDOW // 2 for k in range(len(means(curve)))
            ]  # centre of a window
            left.plot(steps, means(curve), color=colours[kind], linewidth=0.9, label=label)
            if kind != "off":
                right.plot(
                    steps,
                    difference,
                    color=colours[kind],
                    linewidth=0.9,
                    label=label and f"{kind} - off",
                )
    left.set(
        xlabel="step",
        ylabel=f"loss, nats (means of {WINDOW} steps)",
        title=f"{what}, {len(losses['off'])} seeds",
    )
    right.set(xlabel="step", ylabel="nats", title='Difference to "off" with the same seed')
    right.axhline(0, color="black", linewidth=0.8)
    left.legend()
    right.legend()
    figure.savefig(path, dpi=90)


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the curves there (png)"
    )
    arguments.add_argument("--steps", type=int, default=1500)
    arguments.add_argument(
        "--seeds", type=int, default=3, help="how many, of weights and of the order of the text"
    )
    args = arguments.parse_args()
    with Lab(load_spec(CLUSTERS), realtime=True) as lab:
        losses, sent = curves(
            "compression",
            KINDS,
            seeds=args.seeds,
            train=lambda kind, seed: train(lab, kind, args.steps, seed),
            path=args.json,
        )
    if args.picture:
        draw(losses, args.picture, "Gradients compressed between the clusters")
    title = f"Compressed gradients between two clusters, {args.steps} steps, {args.seeds} seeds"
    return finish(rows("compression", losses, sent), args.json, title)


if __name__ == "__main__":
    sys.exit(main())

"""Compares training losses with compressed and uncompressed activations between two clusters.

    python benchmarks/compressed_activations.py --json FILE [--picture FILE.png] [--steps 1500] [--seeds 3]

examples/deepspeed_pipeline trains with two pipeline stages on 1 + 1 emulated nodes, once for each value
of --holmes-compress-activations. Weights, text and seeds are the same, in float32. Only the clusters are
emulated: the losses are those of real training. The bytes between the clusters are counted, too.

"nudged" is the control: no compression, and a learning rate that is 0.2 % larger (2^-9, the largest
relative change of a number that is rounded to bf16). It shows how far two trainings drift apart that
differ by so little. The picture needs matplotlib.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from compression import curves, draw, rows
from harness import finish, parser, toml
from holmes_lab import Lab

from holmes_ext.cluster.spec import load_spec
from holmes_ext.samples import examples

KINDS = ("off", "nudged", "bf16", "int8")
#: 0.23 M parameters; 1024 bytes of text in a step.
MODEL = "--layers 4 --hidden 64 --heads 4 --sequence 64 --micro-batch 8 --micro-batches 2 --stages 2".split()
LEARNING_RATE = 3e-3
BF16_ERROR = 2**-9  # largest relative error of a number that is rounded to bf16


def train(lab: Lab, file: Path, kind: str, steps: int, seed: int) -> tuple[list[float], float]:
    """Train once, and return the losses and the bytes that both Ethernet NICs sent for each step.

    Args:
        lab: The emulated nodes.
        file: The cluster file of the emulated nodes.
        kind: A value of --holmes-compress-activations (KINDS). Or "nudged", the control:
            without compression, but with a learning rate that is 2^-9 (0.2 %) larger. This is the
            largest relative error of rounding to bf16, so that the control shows how far so small a
            change carries.
        steps: Number of training steps.
        seed: Seed of the weights and of the order of the text.

    Raises:
        SystemExit: The training failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "log.jsonl")
        script = str(examples() / "deepspeed_pipeline" / "train.py")
        rate = LEARNING_RATE
        if kind == "nudged":
            rate = LEARNING_RATE * (1 + BF16_ERROR)
        length = ["--lr", str(rate), "--seed", str(seed), "--steps", str(steps)]
        command = [sys.executable, script, *MODEL, *length, "--log", str(log)]
        stage_links = "off" if kind == "nudged" else kind
        flags = [
            "--holmes",
            "--holmes-cluster",
            str(file),
            "--holmes-compress-activations",
            stage_links,
        ]
        before = lab.counters()
        env = {"DS_ACCELERATOR": "cpu"}
        # These modules are imported once, and the ranks are forked from that process.
        result = lab.run([*command, *flags], env=env, preload=("torch", "deepspeed"), timeout=600)
        if result.returncode:
            rank = result.first_failed or 0  # None, e.g. after a time-out: show rank 0
            output = result.outputs[rank]
            raise SystemExit(f"compressed_activations.py: status {result.returncode}:\n{output}")
        after = lab.counters()
        sent = sum(after[node]["eth0"][1] - before[node]["eth0"][1] for node in after)
        return [json.loads(line)["loss"] for line in log.read_text().splitlines()], sent / steps


def main() -> int:
    """Compare training losses with and without compressed activations between two clusters.

    The training runs with each kind of compression in KINDS and each seed. The table of results is
    printed and written to the results file. The kind "nudged" is the control: no compression, but a
    slightly larger learning rate. It shows how much losses differ by chance.
    """
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the curves there (png)"
    )
    arguments.add_argument("--steps", type=int, default=1500)
    arguments.add_argument(
        "--seeds", type=int, default=3, help="how many, of weights and of the order of the text"
    )
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cluster.toml")
        # Each cluster is given as "name, kind of NIC, rate, nodes". Rates do not affect the losses.
        file.write_text(toml("a ib 1Gb/s a0", "b roce 1Gb/s b0", ethernet="1Gb/s"))
        with Lab(load_spec(file)) as lab:
            # Trains with each kind and each seed, and writes the results file after each seed.
            # losses: of each kind and seed, step by step. sent: bytes of a step over Ethernet.
            losses, sent = curves(
                "compressed activations",
                KINDS,
                seeds=args.seeds,
                train=lambda kind, seed: train(lab, file, kind, args.steps, seed),
                path=args.json,
            )
    # In the titles, "narrowed" links carry compressed activations: fewer bits for each number.
    if args.picture:
        draw(losses, args.picture, "Stage links narrowed between the clusters")
    title = f"Narrower stage links between two clusters, {args.steps} steps, {args.seeds} seeds"
    return finish(rows("compressed activations", losses, sent), args.json, title)


if __name__ == "__main__":
    sys.exit(main())

"""Pipeline edges that cross: a step with a slow edge against the same with a free one, with and without holmes's edges.

    python benchmarks/edges.py --json FILE [--scenes "deepspeed 8,..."] [--repetitions 3]

DeepSpeed's pipeline engine and megatron-core's 1F1B on 2 + 2 emulated nodes, two stages of 64 ms a micro-batch (layers
sleep as long as an accelerator of 4.1 GFLOP/s would compute); Ethernet between the stages takes half of that for one
activation (6 Mb/s), or next to nothing (1 Gb/s). "engine": --holmes-inflight off, the engine's own schedule with sends
that block; "holmes": as many micro-batches in flight as hide the edge. Alternating; medians of the repetitions'
medians.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness import Row, chosen, finish, parser, tell
from two_clusters import ratio_row, step_rows

from holmes_ext.cluster.spec import load_spec
from holmes_ext.lab import interleave
from holmes_ext.lab.compare import Variant, compare, max_loss_difference
from holmes_ext.lab.samples import examples

MODEL = "--layers 6 --hidden 192 --heads 4 --sequence 32 --micro-batch 1".split()
MODEL_TOML = """version = 1
layers = 6
hidden = 192
heads = 4
sequence = 32
vocabulary = 256
tied = false
[training]
micro_batch = 1
micro_batches = {micro_batches}
activation_width = 4
gradient_width = 4
state_bytes = 16
[gpu]
flops = {flops}
"""
CLUSTERS = """version = 1
[ethernet]
rate = "{rate}"
[[cluster]]
name = "a"
kind = "ib"
rate = "1Gb/s"
nodes = ["a[0-1]"]
[[cluster]]
name = "b"
kind = "roce"
rate = "1Gb/s"
nodes = ["b[0-1]"]
"""
FLOPS = 4.1e9
RATES = {"free": "1Gb/s", "slow": "6Mb/s"}
#: Micro-batches -> (what a step with the slow edge may take of one with the free edge).
TARGETS = {8: "<= 1.15", 16: "<= 1.08"}


#: Engine -> its example, the flag for stages, what the emulated accelerator paces.
ENGINES = {
    "deepspeed": ("deepspeed_pipeline", "--stages", {"classes": ["Block"]}),
    "megatron": ("megatron_core", "--pipeline", {"classes": ["TransformerLayer"], "layout": "sbh"}),
}


def edges(engine: str, micro_batches: int, repetitions: int, steps: int) -> list[Row]:
    scene, (example, stages, paced) = f"{engine} {micro_batches}", ENGINES[engine]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model.toml")
        model.write_text(MODEL_TOML.format(micro_batches=micro_batches, flops=FLOPS))
        variants = []
        for edge, rate in RATES.items():
            file = Path(folder, f"{edge}.toml")
            file.write_text(CLUSTERS.format(rate=rate))
            spec = load_spec(file)
            flags = ("--holmes", "--holmes-cluster", str(file), "--holmes-sizes", "pipeline=2", "--holmes-model",
                     str(model))
            variants.append(Variant(f"holmes, {edge}", spec, interleave(spec), flags))
            variants.append(Variant(f"engine, {edge}", spec, interleave(spec), (*flags, "--holmes-inflight", "off")))
        train = examples() / example / "train.py"
        script = [str(train), *MODEL, stages, "2", "--micro-batches", str(micro_batches)]
        started = iter(range(1, repetitions * len(variants) + 1))
        total = repetitions * len(variants)
        series = compare(
            variants, script, repetitions=repetitions, steps=steps, skip=4,
            accelerator={"flops": FLOPS, **paced},
            on_run=lambda variant, _: tell(f"{scene}: run {next(started)} of {total}: {variant}"))
    rows = []
    for name, target in (("holmes", TARGETS.get(micro_batches, "")), ("engine", "")):
        rows.append(ratio_row(scene, f"{name}: slow edge : free edge", series[f"{name}, slow"],
                              series[f"{name}, free"], target))
    rows.append(ratio_row(scene, "slow edge, engine : holmes", series["engine, slow"], series["holmes, slow"], ""))
    difference = max_loss_difference(series["engine, slow"], series["holmes, slow"])
    rows.append(Row.median(scene, "largest loss difference", [difference], "nats", False, "<= 1e-6"))
    return rows + step_rows(scene, series)


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=12)
    given = arguments.parse_args()
    makers = {f"{engine} {count}": (engine, count) for engine in ENGINES for count in TARGETS}
    names = chosen(given.scenes, makers)
    rows = [row for name in names for row in edges(*makers[name], given.repetitions, given.steps)]
    return finish(rows, given.json, "Edges between clusters (emulated accelerator)")


if __name__ == "__main__":
    sys.exit(main())

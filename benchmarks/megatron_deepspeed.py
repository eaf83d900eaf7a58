"""Megatron-DeepSpeed's own pretrain_gpt.py, unmodified, on emulated clusters: stock, with --holmes, and the
all-RDMA bound.

    python benchmarks/megatron_deepspeed.py --json FILE
        [--scenes 4+4,2+2,"tied 4+4","slow stage link"]

The checkout (tests/checkouts.py) is copied and started as integration_tests/megatron_deepspeed does
it. On the emulated accelerator, layers sleep as long as a GPU of the scene's FLOP/s would compute.
pretrain_gpt.py, its data, DeepSpeed's engine and optimizer, gloo, the sockets and their limited rates are
real. Bytes are the vocabulary, so that embeddings are as small a part of this small model as they are of a
large one. Step times and losses are those of the script's own log.

"tied 4+4": with GPT-2's vocabulary, whose embedding the first and the last stage share: its gradient crosses
in two levels, or by pairs of ranks as the engine does it (HOLMES_DISABLE=deepspeed-tied); predicted as in
benchmarks/edges.py.

"slow stage link": the scene "deepspeed 8" of benchmarks/edges.py with the unmodified script. 2 + 2 nodes, two
stages of 64 ms a micro-batch. On Ethernet, which lies between them, one activation of 32 KiB takes half of
that (7.4 Mb/s), or next to nothing (1 Gb/s). "holmes" keeps as many micro-batches in flight as hide the link;
"engine" is --holmes-inflight off: the engine's own schedule, whose sends block. The embedding is not tied, so
that only activations, their gradients and a few numbers cross. Each variant is predicted as in edges.py.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from edges import FLOPS as LINK_FLOPS
from edges import (
    HIDDEN,
    INFLIGHT,
    LAYERS,
    MODEL_TOML,
    SEQUENCE,
    medians,
    predicted_step,
    prediction_rows,
    two,
)
from emulated import forward_s
from harness import Row, chosen, find_checkout, finish, kept, parser, tell, why_missing
from two_clusters import ratio_row, step_rows

from holmes_ext.cluster.spec import load_spec
from holmes_ext.lab import Lab, interleave
from holmes_ext.lab.compare import Series, Variant, all_rdma, max_loss_difference
from holmes_ext.lab.samples import examples
from holmes_ext.options import Options
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.model_file import load_model
from holmes_ext.plan.sizes import Sizes

sys.path.insert(0, str(Path(__file__).parents[1] / "integration_tests" / "megatron_deepspeed"))
from job import Checkout, byte_vocabulary, read_log  # noqa: E402

MODEL = ("--num-layers 6 --hidden-size 288 --num-attention-heads 4 --seq-length 16 --max-position-embeddings "
         "16".split())
SKIP = 3  # warm-up steps of every run
#: name: file of examples/clusters, micro-batches, FLOP/s of the emulated GPU, targets of holmes : stock and
#: holmes : all-RDMA.
SCENES = {
    "4+4": ("two_clusters_8.toml", 4, 2.3e9, ">= 1.6", ">= 0.97"),
    "2+2": ("two_clusters_4.toml", 8, 6.7e9, "", ""),
}


#: "slow stage link": Ethernet's rate, and micro-batches a step.
LINK_SCENE, LINK_RATES, LINK_MICRO_BATCHES = "slow stage link", {"free": "1Gb/s", "slow": "7.4Mb/s"}, 8
LINK_MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQUENCE}"
    f" --max-position-embeddings {SEQUENCE} --untie-embeddings-and-output-weights"
).split()
#: "tied 4+4": the same, and rows of the embedding (GPT-2's 50,257, made divisible).
TIED, TIED_SCENE, TIED_ROWS = "deepspeed-tied", "tied 4+4", 50264


def command_of(checkout: Checkout, micro_batches: int, ranks: int, steps: int,
               model: list[str] = MODEL) -> list[str]:
    batch = micro_batches * ranks // 2
    config = checkout.config(train_batch_size=batch, train_micro_batch_size_per_gpu=1)
    return checkout.arguments(
        steps, "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1", "--global-batch-size",
        str(batch), "--make-vocab-size-divisible-by", "8", config=config, shape=model,
    )


def prepared(source: Path, folder: Path) -> Checkout:
    """Return a copy of the checkout `source` in `folder`, with its corpus in the vocabulary of bytes."""
    checkout = Checkout(source, folder, byte_vocabulary(source, folder))
    checkout.compile_adam()
    return checkout


def scene(name: str, checkout: Checkout, repetitions: int, steps: int) -> list[Row]:
    file, micro_batches, flops, ratio, bound = SCENES[name]
    path = examples() / "clusters" / file
    spec = load_spec(path)
    flags = ("--holmes", "--holmes-cluster", str(path))
    variants = [
        Variant("stock", spec, interleave(spec)),
        Variant("holmes", spec, interleave(spec), flags),
        all_rdma(spec),
        Variant("holmes, overlap off", spec, interleave(spec), (*flags, "--holmes-overlap", "off")),
        Variant("stock again", spec, interleave(spec)),
    ]
    command = command_of(checkout, micro_batches, len(variants[0].order), steps)
    series = {variant.name: Series(variant.name) for variant in variants}
    with ExitStack() as stack:
        labs = {variant.spec.digest: variant.spec for variant in variants}
        labs = {digest: stack.enter_context(Lab(site, realtime=True)) for digest, site in labs.items()}
        for repetition in range(repetitions):
            turn = repetition % len(variants)
            for variant in (*variants[turn:], *variants[:turn]):
                tell(f"{name}: repetition {repetition + 1} of {repetitions}: {variant.name}")
                measure(labs[variant.spec.digest], variant, checkout, command, flops, steps,
                        series[variant.name])
    return rows_of(name, series, ratio, bound)


def measure(lab: Lab, variant: Variant, checkout: Checkout, command: list[str], flops: float, steps: int,
            series: Series) -> None:
    """One run; its step times, losses and bytes go into `series`."""
    before = lab.counters()
    result = lab.run(
        [sys.executable, *command, *variant.flags], order=variant.order,
        env={**checkout.env, **checkout.stand_ins(variant.flags), **variant.env},
        cwd=checkout.folder, preload=("torch", "deepspeed"), timeout=280,
        accelerator={"flops": flops, "classes": ["ParallelTransformerLayer"], "layout": "sbh"},
    )
    log, after = read_log(result), lab.counters()
    assert list(log.losses) == list(range(1, steps + 1)), log
    assert not any("not as planned" in line for line in log.lines), log.lines
    series.add([log.seconds[step] for step in log.losses], list(log.losses.values()), SKIP, result, before,
               after)
    series.lines = log.lines


def tied(source: Path, folder: Path, repetitions: int, steps: int) -> list[Row]:
    file, micro_batches, flops, *_ = SCENES["4+4"]
    path = examples() / "clusters" / file
    spec = load_spec(path)
    checkout = Checkout(source, folder)
    checkout.compile_adam()
    flags, order = ("--holmes", "--holmes-cluster", str(path)), interleave(spec)
    variants = [Variant("two levels", spec, order, flags), Variant("pairs", spec, order, flags,
                                                                   {"HOLMES_DISABLE": TIED})]
    command = command_of(checkout, micro_batches, len(order), steps)
    series = {variant.name: Series(variant.name) for variant in variants}
    with Lab(spec, realtime=True) as lab:
        for repetition in range(repetitions):
            for variant in variants if repetition % 2 else variants[::-1]:
                tell(f"{TIED_SCENE}: repetition {repetition + 1} of {repetitions}: {variant.name}")
                measure(lab, variant, checkout, command, flops, steps, series[variant.name])
    levels, pairs = (series[variant.name] for variant in variants)
    forward = forward_s(288, 16, flops)
    model = Model(6, 288, 4, 16, TIED_ROWS, micro_batches=micro_batches, activation_width=4)
    seconds = [
        predicted_step("deepspeed", spec, model, Sizes(pipeline=2), forward,
                       Options(off=frozenset() if cut else frozenset({TIED})), cut) for cut in (True, False)]
    saved = [b - a for a, b in zip(levels.medians, pairs.medians)]
    difference = max_loss_difference(pairs, levels)
    return [
        ratio_row(TIED_SCENE, "pairs : two levels", pairs, levels, ""),
        Row.median(TIED_SCENE, "seconds saved", saved, "s", True),
        Row.median(TIED_SCENE, "seconds saved, predicted", [seconds[1] - seconds[0]], "s", True),
        Row.median(TIED_SCENE, "largest loss difference", [difference], "nats", False, "<= 1e-5"),
        *step_rows(TIED_SCENE, series),
    ]


def slow_stage_link(checkout: Checkout, repetitions: int, steps: int) -> list[Row]:
    """Return the rows of holmes and of the engine's own schedule, over a slow and over a free link."""
    forward = forward_s(HIDDEN, SEQUENCE, LINK_FLOPS)
    variants, predicted = [], {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model_file = Path(directory, "model.toml")
        model_file.write_text(MODEL_TOML.format(micro_batches=LINK_MICRO_BATCHES, flops=LINK_FLOPS))
        model = load_model(str(model_file))
        for link, rate in LINK_RATES.items():
            file = Path(directory, f"{link}.toml")
            file.write_text(two(rate))
            spec = load_spec(file)
            for how in ("holmes", "engine"):
                inflight = INFLIGHT[how]
                flags = ("--holmes", "--holmes-cluster", str(file), "--holmes-model", str(model_file),
                         "--holmes-inflight", inflight)
                name = f"{how}, {link}"
                variants.append(Variant(name, spec, interleave(spec), flags))
                predicted[name] = predicted_step("deepspeed", spec, model, Sizes(pipeline=2), forward,
                                                 Options(inflight=inflight))
        command = command_of(checkout, LINK_MICRO_BATCHES, len(variants[0].order), steps, LINK_MODEL)
        labs = {variant.spec.digest: variant.spec for variant in variants}
        started = {digest: stack.enter_context(Lab(spec, realtime=True)) for digest, spec in labs.items()}
        series = {variant.name: Series(variant.name) for variant in variants}
        for repetition in range(repetitions):
            for variant in variants if repetition % 2 else variants[::-1]:
                tell(f"{LINK_SCENE}: repetition {repetition + 1} of {repetitions}: {variant.name}")
                measure(started[variant.spec.digest], variant, checkout, command, LINK_FLOPS, steps,
                        series[variant.name])
    difference = max_loss_difference(series["engine, slow"], series["holmes, slow"])
    return [
        ratio_row(LINK_SCENE, "holmes: slow link : free link", series["holmes, slow"],
                  series["holmes, free"], "<= 1.15"),
        ratio_row(LINK_SCENE, "engine: slow link : free link", series["engine, slow"],
                  series["engine, free"], ""),
        ratio_row(LINK_SCENE, "slow link, engine : holmes", series["engine, slow"], series["holmes, slow"],
                  ""),
        Row.median(LINK_SCENE, "largest loss difference", [difference], "nats", False, "<= 0"),
        *prediction_rows(LINK_SCENE, medians(series), predicted),
        *step_rows(LINK_SCENE, series),
    ]


def rows_of(name: str, series: dict[str, Series], ratio: str, bound: str) -> list[Row]:
    stock, all_fast = series["stock"], series["all-RDMA"]
    rows = []
    # Buckets of another size, and the hierarchical sum of the tied embedding, add four gradients in another
    # order than stock, so the last digit of the log may differ.
    loss_limit = "<= 1e-5"
    for which, targets in (("holmes", (ratio, bound, loss_limit)),
                           ("holmes, overlap off", ("", "", loss_limit))):
        difference = max_loss_difference(stock, series[which])
        rows += [
            ratio_row(name, f"{which} : stock", stock, series[which], targets[0]),
            ratio_row(name, f"{which} : all-RDMA", all_fast, series[which], targets[1]),
            Row.of(name, f"{which}: largest loss difference", difference, "nats", (difference, difference),
                   False, targets[2]),
        ]
    noise = abs(series["stock again"].median / stock.median - 1)
    rows += [
        ratio_row(name, "stock : all-RDMA", all_fast, stock, ""),
        Row.of(name, "A/A difference (noise)", noise, "of a step", (noise, noise), stock.emulated),
    ]
    return rows + step_rows(name, series)


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=12)
    args = arguments.parse_args()
    wanted = chosen(args.scenes, [*SCENES, TIED_SCENE, LINK_SCENE])
    source = find_checkout("Megatron-DeepSpeed")
    if source is None:
        tell(f"megatron_deepspeed.py: skipped; {why_missing('Megatron-DeepSpeed')}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = kept(args.json, wanted)
        if TIED_SCENE in wanted:
            rows += tied(source, Path(folder, "tied"), args.repetitions, args.steps)
        if others := [name for name in wanted if name != TIED_SCENE]:
            checkout = prepared(source, Path(folder))
            for name in others:
                if name == LINK_SCENE:
                    rows += slow_stage_link(checkout, args.repetitions, args.steps)
                else:
                    rows += scene(name, checkout, args.repetitions, args.steps)
    return finish(rows, args.json,
                  "Megatron-DeepSpeed: stock, holmes and the all-RDMA bound (step times on the emulated "
                  "accelerator)")


if __name__ == "__main__":
    sys.exit(main())

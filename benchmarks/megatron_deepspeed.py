"""Megatron-DeepSpeed's own pretrain_gpt.py, unmodified, on emulated clusters: stock, with --holmes, and the
all-RDMA bound.

    python benchmarks/megatron_deepspeed.py --json FILE
        [--scenes 4+4,2+2,"tied 4+4"]

The checkout (tests/checkouts.py) is copied and started as integration_tests/megatron_deepspeed does
it. On the emulated accelerator, layers sleep as long as a GPU of the scene's FLOP/s would compute.
pretrain_gpt.py, its data, DeepSpeed's engine and optimizer, gloo, the sockets and their limited rates are
real. Bytes are the vocabulary, so that embeddings are as small a part of this small model as they are of a
large one. Step times and losses are those of the script's own log.

"tied 4+4": with GPT-2's vocabulary, whose embedding the first and the last stage share: its gradient crosses
in two levels, or by pairs of ranks as the engine does it (HOLMES_DISABLE=deepspeed-tied); predicted as in
benchmarks/edges.py.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from edges import predicted_step
from emulated import forward_s
from harness import Row, chosen, find_checkout, finish, kept, parser, tell, why_missing
from two_clusters import ratio_row, step_rows

from holmes_ext.cluster.spec import load_spec
from holmes_ext.lab import Lab, interleave
from holmes_ext.lab.compare import Series, Variant, all_rdma, max_loss_difference
from holmes_ext.lab.samples import examples
from holmes_ext.options import Options
from holmes_ext.plan.cost.model import Model
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


#: "tied 4+4": the same, and rows of the embedding (GPT-2's 50,257, made divisible).
TIED, TIED_SCENE, TIED_ROWS = "deepspeed-tied", "tied 4+4", 50264


def command_of(checkout: Checkout, micro_batches: int, ranks: int, steps: int) -> list[str]:
    batch = micro_batches * ranks // 2
    config = checkout.config(train_batch_size=batch, train_micro_batch_size_per_gpu=1)
    return checkout.arguments(
        steps, "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1", "--global-batch-size",
        str(batch), "--make-vocab-size-divisible-by", "8", config=config, shape=MODEL,
    )


def prepared(source: Path, folder: Path) -> Checkout:
    """A copy of the checkout `source` in `folder`, with its corpus in the vocabulary of bytes."""
    return Checkout(source, folder, byte_vocabulary(source, folder))


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
    series.add([log.seconds[step] for step in log.losses], list(log.losses.values()), SKIP, result, before,
               after)
    series.lines = log.lines


def tied(source: Path, folder: Path, repetitions: int, steps: int) -> list[Row]:
    file, micro_batches, flops, *_ = SCENES["4+4"]
    path = examples() / "clusters" / file
    spec, checkout = load_spec(path), Checkout(source, folder)
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


def rows_of(name: str, series: dict[str, Series], ratio: str, bound: str) -> list[Row]:
    stock, all_fast = series["stock"], series["all-RDMA"]
    rows = []
    # Buckets of another size let the ring add four summands in another order: the last digit of the log may
    # differ.
    for which, targets in (("holmes", (ratio, bound, "<= 1e-5")),
                           ("holmes, overlap off", ("", "", "<= 1e-6"))):
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
    wanted = chosen(args.scenes, [*SCENES, TIED_SCENE])
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
            rows += [row for name in others for row in scene(name, checkout, args.repetitions, args.steps)]
    return finish(rows, args.json,
                  "Megatron-DeepSpeed: stock, holmes and the all-RDMA bound (step times on the emulated "
                  "accelerator)")


if __name__ == "__main__":
    sys.exit(main())

"""Measures Megatron-DeepSpeed's unmodified pretrain_gpt.py on emulated clusters, with and without holmes.

    python benchmarks/megatron_deepspeed.py --json FILE
        [--scenes 4+4,"4+4 three times slower",2+2,"tied 4+4","slow stage link"]

pretrain_gpt.py comes from the checkout (tests/checkouts.py), of which a copy is trained. It, its data,
DeepSpeed's engine and optimizer, gloo, the sockets and their limited rates are real. GPUs are emulated: each
transformer layer sleeps as long as a GPU of the scene's FLOP/s would compute. The vocabulary consists of the
256 bytes, so that embeddings have as small a part in this small model as they have in a large one. Step times
and losses are those that the script prints.

"4+4" and "2+2" have that many nodes in two clusters, and compare five variants:

    stock                  without holmes
    holmes                 the same with holmes
    all-RDMA               without holmes, on a single InfiniBand cluster: the bound
    holmes, overlap off    gradients are reduced after the last backward pass, not during it
    stock again            shows how much two runs of the same differ (noise)

"4+4 three times slower" is "4+4" with an accelerator and networks at a third of the speed. Its steps last
longer, but need no more CPU time, so that the measurement does not depend on this machine's cores.

"tied 4+4" has GPT-2's vocabulary, whose embedding the first and the last stage share (tied weights). Its
gradient is reduced hierarchically by holmes, or between pairs of ranks by the engine
(HOLMES_DISABLE=deepspeed-tied).

"slow stage link" has 2 + 2 nodes and one pipeline stage in each cluster, which computes 64 ms for each
micro-batch. Ethernet connects the stages. It takes 32 ms for an activation of 32 KiB at 7.4 Mb/s ("slow"),
and next to nothing at 1 Gb/s ("free"). "holmes" keeps enough micro-batches in flight to hide the link.
"engine" is DeepSpeed's own schedule, whose sends block (--holmes-inflight off). The embedding is not tied, so
that only activations, their gradients and a few numbers cross the link. It is the scene "deepspeed 8" of
benchmarks/edges.py.

The steps of the last two scenes are also predicted, as in benchmarks/edges.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import edges
from edges import predicted_step
from emulated import forward_s
from harness import Row, chosen, find_checkout, finish, kept, parser, tell, why_missing
from two_clusters import ratio_row, step_rows

from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.lab import Lab, interleave
from holmes_ext.lab.compare import Series, Variant, all_rdma, max_loss_difference
from holmes_ext.lab.samples import examples
from holmes_ext.options import Options
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.model_file import load_model
from holmes_ext.plan.sizes import Sizes

sys.path.insert(0, str(Path(__file__).parents[1] / "integration_tests" / "megatron_deepspeed"))
from job import Checkout, byte_vocabulary, read_log  # noqa: E402

LAYERS, HIDDEN, HEADS, SEQUENCE = 6, 288, 4, 16  # of the model of all scenes but "slow stage link"
MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQUENCE}"
    f" --max-position-embeddings {SEQUENCE}"
).split()
WARM_UP_STEPS = 3  # of every run; they are not counted


class Scene(NamedTuple):
    """One emulated site, and the work of a step on it."""

    cluster_file: str  # in examples/clusters
    micro_batches: int  # of a step
    flops: float  # FLOP/s of an emulated GPU, before it is made slower
    slower: int = 1  # the accelerator and all networks have 1 / slower of their speed
    stock_target: str = ""  # the project's target for the speed-up over stock
    bound_target: str = ""  # the project's target for the speed relative to all-RDMA


SCENES = {
    "4+4": Scene("two_clusters_8.toml", 4, 2.3e9, stock_target=">= 1.6", bound_target=">= 0.97"),
    "4+4 three times slower": Scene(
        "two_clusters_8.toml", 4, 2.3e9, slower=3, stock_target=">= 1.6", bound_target=">= 0.97"
    ),
    "2+2": Scene("two_clusters_4.toml", 8, 6.7e9),
}

LINK_SCENE = "slow stage link"
LINK_RATES = {"free": "1Gb/s", "slow": "7.4Mb/s"}  # of Ethernet
LINK_MICRO_BATCHES = 8  # of a step
LINK_MODEL = (
    f"--num-layers {edges.LAYERS} --hidden-size {edges.HIDDEN} --num-attention-heads 4"
    f" --seq-length {edges.SEQUENCE} --max-position-embeddings {edges.SEQUENCE}"
    " --untie-embeddings-and-output-weights"
).split()

TIED_SCENE = "tied 4+4"
TIED_FEATURE = "deepspeed-tied"  # of holmes: the hierarchical all-reduce of tied weights
GPT2_TOKENS = 50264  # rows of the embedding: GPT-2's 50,257, rounded up to a multiple of 8


def command_of(
    checkout: Checkout, micro_batches: int, ranks: int, steps: int, model: Sequence[str] = MODEL
) -> list[str]:
    """Return pretrain_gpt.py and its arguments, with 2 pipeline stages.

    Args:
        micro_batches: Micro-batches of a step in each data-parallel replica, of one sample each.
        model: The flags for the sizes of the model.
    """
    data_parallel_replicas = ranks // 2
    batch = micro_batches * data_parallel_replicas
    config = checkout.config(train_batch_size=batch, train_micro_batch_size_per_gpu=1)
    flags = (
        f"--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size {batch}"
        " --make-vocab-size-divisible-by 8"
    ).split()
    return checkout.arguments(steps, *flags, config=config, shape=model)


def copy_checkout(source: Path, folder: Path) -> Checkout:
    """Copy the checkout `source` into `folder`, and prepare the copy: its corpus has bytes as tokens."""
    checkout = Checkout(source, folder, byte_vocabulary(source, folder))
    checkout.compile_adam()
    return checkout


def run_in_turns(
    scene_name: str,
    variants: Sequence[Variant],
    checkout: Checkout,
    command: list[str],
    *,
    flops: float,
    slower: int = 1,
    steps: int,
    repetitions: int,
    order_of: Callable[[Sequence[Variant], int], Sequence[Variant]],
) -> dict[str, Series]:
    """Run each variant once in every repetition, and return the measurements of each, by its name.

    Args:
        flops: FLOP/s of an emulated GPU.
        slower: All networks have 1 / slower of their speed.
        order_of: Returns the variants in the order of a repetition. The order changes, so that no variant is
            always the first, or always follows the same one.
    """
    site_by_digest = {variant.spec.digest: variant.spec for variant in variants}
    series = {variant.name: Series(variant.name) for variant in variants}
    with ExitStack() as stack:
        lab_by_digest = {
            digest: stack.enter_context(Lab(site, scale=1 / slower, realtime=True))
            for digest, site in site_by_digest.items()
        }
        for repetition in range(repetitions):
            for variant in order_of(variants, repetition):
                tell(f"{scene_name}: repetition {repetition + 1} of {repetitions}: {variant.name}")
                lab = lab_by_digest[variant.spec.digest]
                measure(lab, variant, checkout, command, flops, steps, series[variant.name])
    return series


def rotated(variants: Sequence[Variant], repetition: int) -> Sequence[Variant]:
    """Return the variants, starting with the next one in each repetition."""
    first = repetition % len(variants)
    return [*variants[first:], *variants[:first]]


def reversed_in_turns(variants: Sequence[Variant], repetition: int) -> Sequence[Variant]:
    """Return the variants, backwards in every other repetition."""
    is_even = repetition % 2 == 0
    return variants[::-1] if is_even else variants


def measure(lab: Lab, variant: Variant, checkout: Checkout, command: list[str], flops: float, steps: int,
            series: Series) -> None:
    """Run pretrain_gpt.py once, and add its step times, losses and bytes to `series`."""
    bytes_before = lab.counters()
    result = lab.run(
        [sys.executable, *command, *variant.flags],
        order=variant.order,
        env={**checkout.env, **checkout.stand_ins(variant.flags), **variant.env},
        cwd=checkout.folder,
        preload=("torch", "deepspeed"),
        timeout=400,
        accelerator={"flops": flops, "classes": ["ParallelTransformerLayer"], "layout": "sbh"},
    )
    log = read_log(result)
    assert list(log.losses) == list(range(1, steps + 1)), log
    assert not any("not as planned" in line for line in log.lines), log.lines
    seconds = [log.seconds[step] for step in log.losses]
    losses = list(log.losses.values())
    series.add(seconds, losses, WARM_UP_STEPS, result, bytes_before, lab.counters())
    series.lines = log.lines


def scene(name: str, checkout: Checkout, repetitions: int, steps: int) -> list[Row]:
    """Return the rows of a scene in SCENES."""
    measured = SCENES[name]
    cluster_file = examples() / "clusters" / measured.cluster_file
    spec = load_spec(cluster_file)
    order = interleave(spec)
    flags = ("--holmes", "--holmes-cluster", str(cluster_file))
    variants = [
        Variant("stock", spec, order),
        Variant("holmes", spec, order, flags),
        all_rdma(spec),
        Variant("holmes, overlap off", spec, order, (*flags, "--holmes-overlap", "off")),
        Variant("stock again", spec, order),
    ]
    command = command_of(checkout, measured.micro_batches, len(order), steps)
    series = run_in_turns(
        name, variants, checkout, command,
        flops=measured.flops / measured.slower, slower=measured.slower,
        steps=steps, repetitions=repetitions, order_of=rotated,
    )
    return rows_of(name, series, measured)


def rows_of(name: str, series: dict[str, Series], measured: Scene) -> list[Row]:
    """Return the rows that compare the variants of a scene in SCENES."""
    stock, bound = series["stock"], series["all-RDMA"]
    rows = []
    for variant in ("holmes", "holmes, overlap off"):
        has_targets = variant == "holmes"
        stock_target = measured.stock_target if has_targets else ""
        bound_target = measured.bound_target if has_targets else ""
        difference = max_loss_difference(stock, series[variant])
        rows += [
            ratio_row(name, f"{variant} : stock", stock, series[variant], stock_target),
            ratio_row(name, f"{variant} : all-RDMA", bound, series[variant], bound_target),
            # Not 0: buckets of another size, and the hierarchical all-reduce of the tied embedding, add four
            # gradients in another order than stock, so the last printed digit of a loss may differ.
            Row.median(name, f"{variant}: largest loss difference", [difference], "nats", False, "<= 1e-5"),
        ]
    noise = abs(series["stock again"].median / stock.median - 1)
    rows += [
        ratio_row(name, "stock : all-RDMA", bound, stock, ""),
        Row.median(name, "A/A difference (noise)", [noise], "of a step", stock.emulated),
    ]
    return rows + step_rows(name, series)


def tied(source: Path, folder: Path, repetitions: int, steps: int) -> list[Row]:
    """Return the rows of "tied 4+4"."""
    measured = SCENES["4+4"]
    cluster_file = examples() / "clusters" / measured.cluster_file
    spec = load_spec(cluster_file)
    order = interleave(spec)
    checkout = Checkout(source, folder)  # with GPT-2's vocabulary
    checkout.compile_adam()
    flags = ("--holmes", "--holmes-cluster", str(cluster_file))
    variants = [
        Variant("two levels", spec, order, flags),
        Variant("pairs", spec, order, flags, env={"HOLMES_DISABLE": TIED_FEATURE}),
    ]
    command = command_of(checkout, measured.micro_batches, len(order), steps)
    series = run_in_turns(
        TIED_SCENE, variants, checkout, command,
        flops=measured.flops, steps=steps, repetitions=repetitions, order_of=reversed_in_turns,
    )

    two_levels, pairs = series["two levels"], series["pairs"]
    seconds_saved = [slow - fast for fast, slow in zip(two_levels.medians, pairs.medians)]
    predicted_pairs = predicted_tied_step(spec, measured, hierarchical=False)
    predicted_two_levels = predicted_tied_step(spec, measured, hierarchical=True)
    difference = max_loss_difference(pairs, two_levels)
    return [
        ratio_row(TIED_SCENE, "pairs : two levels", pairs, two_levels, ""),
        Row.median(TIED_SCENE, "seconds saved", seconds_saved, "s", True),
        Row.median(TIED_SCENE, "seconds saved, predicted", [predicted_pairs - predicted_two_levels], "s",
                   True),
        Row.median(TIED_SCENE, "largest loss difference", [difference], "nats", False, "<= 1e-5"),
        *step_rows(TIED_SCENE, series),
    ]


def predicted_tied_step(spec: SiteSpec, measured: Scene, hierarchical: bool) -> float:
    """Return the predicted seconds of a step of "tied 4+4".

    Args:
        hierarchical: Whether holmes reduces the embedding's gradient in two levels.
    """
    forward_seconds = forward_s(HIDDEN, SEQUENCE, measured.flops)
    model = Model(
        LAYERS, HIDDEN, HEADS, SEQUENCE, GPT2_TOKENS,
        micro_batches=measured.micro_batches, activation_width=4,
    )
    disabled = frozenset() if hierarchical else frozenset({TIED_FEATURE})
    options = Options(off=disabled)
    return predicted_step(
        "deepspeed", spec, model, Sizes(pipeline=2), forward_seconds, options, cut=hierarchical
    )


def slow_stage_link(checkout: Checkout, repetitions: int, steps: int) -> list[Row]:
    """Return the rows of "slow stage link": holmes and the engine's schedule, each over both links."""
    forward_seconds = forward_s(edges.HIDDEN, edges.SEQUENCE, edges.FLOPS)
    variants = []
    predicted = {}  # name of a variant -> seconds of a step
    with tempfile.TemporaryDirectory() as directory:
        model_file = Path(directory, "model.toml")
        model_file.write_text(edges.MODEL_TOML.format(micro_batches=LINK_MICRO_BATCHES, flops=edges.FLOPS))
        model = load_model(str(model_file))
        for link, rate in LINK_RATES.items():
            cluster_file = Path(directory, f"{link}.toml")
            cluster_file.write_text(edges.two(rate))
            spec = load_spec(cluster_file)
            for schedule in ("holmes", "engine"):
                inflight = edges.INFLIGHT[schedule]
                flags = ("--holmes", "--holmes-cluster", str(cluster_file), "--holmes-model",
                         str(model_file), "--holmes-inflight", inflight)
                name = f"{schedule}, {link}"
                variants.append(Variant(name, spec, interleave(spec), flags))
                predicted[name] = predicted_step("deepspeed", spec, model, Sizes(pipeline=2),
                                                 forward_seconds, Options(inflight=inflight))
        ranks = len(variants[0].order)
        command = command_of(checkout, LINK_MICRO_BATCHES, ranks, steps, LINK_MODEL)
        series = run_in_turns(
            LINK_SCENE, variants, checkout, command,
            flops=edges.FLOPS, steps=steps, repetitions=repetitions, order_of=reversed_in_turns,
        )

    holmes_slow, holmes_free = series["holmes, slow"], series["holmes, free"]
    engine_slow, engine_free = series["engine, slow"], series["engine, free"]
    difference = max_loss_difference(engine_slow, holmes_slow)
    return [
        ratio_row(LINK_SCENE, "holmes: slow link : free link", holmes_slow, holmes_free, "<= 1.15"),
        ratio_row(LINK_SCENE, "engine: slow link : free link", engine_slow, engine_free, ""),
        ratio_row(LINK_SCENE, "slow link, engine : holmes", engine_slow, holmes_slow, ""),
        Row.median(LINK_SCENE, "largest loss difference", [difference], "nats", False, "<= 0"),
        *edges.prediction_rows(LINK_SCENE, edges.medians(series), predicted),
        *step_rows(LINK_SCENE, series),
    ]


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=12)
    args = arguments.parse_args()
    names = chosen(args.scenes, [*SCENES, TIED_SCENE, LINK_SCENE])
    source = find_checkout("Megatron-DeepSpeed")
    if source is None:
        tell(f"megatron_deepspeed.py: skipped; {why_missing('Megatron-DeepSpeed')}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = kept(args.json, names)  # of scenes that an earlier run has measured
        if TIED_SCENE in names:
            rows += tied(source, Path(folder, "tied"), args.repetitions, args.steps)
        scenes_of_bytes = [name for name in names if name != TIED_SCENE]  # they share one copy and its corpus
        if scenes_of_bytes:
            checkout = copy_checkout(source, Path(folder))
        for name in scenes_of_bytes:
            if name == LINK_SCENE:
                rows += slow_stage_link(checkout, args.repetitions, args.steps)
            else:
                rows += scene(name, checkout, args.repetitions, args.steps)
    return finish(rows, args.json,
                  "Megatron-DeepSpeed: stock, holmes and the all-RDMA bound (step times on the emulated "
                  "accelerator)")


if __name__ == "__main__":
    sys.exit(main())

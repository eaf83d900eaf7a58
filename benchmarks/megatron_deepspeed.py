"""Measures Megatron-DeepSpeed's unmodified pretrain_gpt.py on emulated clusters, with and without holmes.

    python benchmarks/megatron_deepspeed.py --json FILE
        [--cases 4+4,"4+4 three times slower",2+2,"tied 4+4","slow stage link"]

Real are the script (from a copy of the checkout that tests/checkouts.py finds), its data, DeepSpeed, gloo,
and the sockets with their limited rates. GPUs are emulated: each transformer layer sleeps as long as a GPU of
a given FLOP/s would compute. Step times and losses are read from the script's log.

A case is an emulated site with a model. Several variants of it are compared:

    stock                  without holmes
    holmes                 the same with holmes
    all-RDMA               without holmes, on a single InfiniBand cluster: no variant can be faster
    holmes, overlap off    gradients are reduced after the last backward pass, not during it
    stock again            its difference to "stock" is the noise of the measurement

The cases with these variants:

    4+4                       two clusters of 4 nodes
    2+2                       two clusters of 2 nodes
    4+4 three times slower    GPUs and networks have a third of the speed. Steps last longer with the same CPU
                              work, so that their time depends less on this machine's cores

Two further cases compare ways of holmes and DeepSpeed to communicate. Their steps are also predicted:

    tied 4+4           The first and the last pipeline stage share GPT-2's embedding (tied weights). holmes
                       reduces its gradient hierarchically ("hierarchical") or leaves it to DeepSpeed, which
                       reduces it between pairs of ranks ("pairs").
    slow stage link    Two pipeline stages, one in each cluster, compute 64 ms for each micro-batch. The
                       Ethernet between them takes 32 ms for an activation at 7.4 Mb/s ("slow"), and next to
                       nothing at 1 Gb/s ("free"). "holmes" keeps enough micro-batches in flight to hide this
                       time. "engine" is DeepSpeed's schedule, whose sends block. The embedding is not tied.
                       It is the case "deepspeed 8" of benchmarks/stage_links.py.

In all cases but "tied 4+4" the vocabulary consists of the 256 bytes. So embeddings have as small a part in
this small model as they have in a large one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import stage_links
from emulated import forward_s
from harness import Row, chosen_cases, find_checkout, finish, kept_rows, parser, tell, why_missing
from holmes_lab import Lab, interleave
from holmes_lab.compare import Series, Variant, all_rdma, max_loss_difference
from stage_links import predicted_step
from two_clusters import loss_row, ratio_row, step_rows

from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.options import Options
from holmes_ext.plan.cost.model import Model, load_model
from holmes_ext.plan.sizes import Sizes
from holmes_ext.samples import examples

sys.path.insert(0, str(Path(__file__).parents[1] / "integration_tests" / "megatron_deepspeed"))
from job import Checkout, byte_vocabulary, read_log  # noqa: E402

LAYERS, HIDDEN, HEADS, SEQUENCE = 6, 288, 4, 16  # of the model of all cases but "slow stage link"
MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQUENCE}"
    f" --max-position-embeddings {SEQUENCE}"
).split()
WARM_UP_STEPS = 3  # of every run; they are not counted


class Case(NamedTuple):
    """One emulated site (clusters, GPUs, networks), and the micro-batches that it trains in a step."""

    cluster_file: str  # in examples/clusters
    micro_batches: int  # of a step
    flops: float  # FLOP/s of an emulated GPU, before the division by `slower`
    slower: int = 1  # GPUs and networks have 1 / slower of their speed
    stock_target: str = ""  # the project's target for the speed-up over stock
    bound_target: str = ""  # the project's target for the speed relative to all-RDMA


CASES = {
    "4+4": Case(
        "two_clusters_8.toml",
        micro_batches=4,
        flops=2.3e9,
        stock_target=">= 1.6",
        bound_target=">= 0.97",
    ),
    "4+4 three times slower": Case(
        "two_clusters_8.toml",
        micro_batches=4,
        flops=2.3e9,
        slower=3,
        stock_target=">= 1.6",
        bound_target=">= 0.97",
    ),
    "2+2": Case("two_clusters_4.toml", micro_batches=8, flops=6.7e9),
}

LINK_CASE = "slow stage link"
LINK_RATES = {"free": "1Gb/s", "slow": "7.4Mb/s"}  # of Ethernet
LINK_MICRO_BATCHES = 8  # of a step
LINK_MODEL = (
    f"--num-layers {stage_links.LAYERS} --hidden-size {stage_links.HIDDEN} --num-attention-heads 4"
    f" --seq-length {stage_links.SEQUENCE} --max-position-embeddings {stage_links.SEQUENCE}"
    " --untie-embeddings-and-output-weights"
).split()

TIED_CASE = "tied 4+4"
TIED_FEATURE = "deepspeed-tied"  # of holmes: the hierarchical all-reduce of tied weights
GPT2_TOKENS = 50264  # rows of the embedding: GPT-2's 50,257, rounded up to a multiple of 8


def command_of(
    checkout: Checkout, micro_batches: int, ranks: int, steps: int, model: Sequence[str] = MODEL
) -> list[str]:
    """Return the command line of a training run: pretrain_gpt.py and its arguments, for 2 pipeline stages.

    Args:
        checkout: The copy of Megatron-DeepSpeed that contains pretrain_gpt.py.
        micro_batches: Micro-batches of one sample that each data-parallel replica trains in a step.
        ranks: Number of ranks.
        steps: Training steps.
        model: The flags for the sizes of the model.
    """
    data_parallel_replicas = ranks // 2  # each has one rank per pipeline stage
    batch = micro_batches * data_parallel_replicas  # samples of a step
    config = checkout.config(train_batch_size=batch, train_micro_batch_size_per_gpu=1)
    flags = (
        f"--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size {batch}"
        " --make-vocab-size-divisible-by 8"
    ).split()
    # These flags come last, so they replace equal ones of arguments().
    return checkout.arguments(steps, *flags, config=config, shape=model)


def copy_checkout(source: Path, folder: Path) -> Checkout:
    """Copy the checkout of Megatron-DeepSpeed in `source` into `folder`, and prepare the copy for training.

    A training text is made, with one token per byte, and DeepSpeed's fused Adam is compiled.
    """
    checkout = Checkout(source, folder, byte_vocabulary(source, folder))
    checkout.compile_adam()
    return checkout


def run_in_turns(
    case_name: str,
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
    """Run each variant of the training job once in every repetition, and return its measurements.

    Args:
        case_name: Name of the case, for lines about the progress.
        variants: The job with and without holmes, or with different options, each on an emulated site.
        checkout: The copy of Megatron-DeepSpeed that contains pretrain_gpt.py.
        command: The command line of the job, without the variant's flags.
        flops: FLOP/s of an emulated GPU.
        slower: All networks have 1 / slower of their speed.
        steps: Training steps of a run.
        repetitions: Runs of each variant.
        order_of: Returns the variants in the order of a repetition (counted from 0). The order changes, so
            that no variant is always the first.

    Returns:
        By the name of the variant, the step times, losses and sent bytes of its runs.
    """
    # Variants on equal sites (clusters with the same digest) share one lab: emulated nodes and networks.
    # The digest is a hash of the site's description.
    site_by_digest = {variant.spec.digest: variant.spec for variant in variants}
    series = {variant.name: Series(variant.name) for variant in variants}
    with ExitStack() as stack:  # ends the labs after the last run
        lab_by_digest = {
            # scale: of the networks' rates. realtime: the ranks run before other processes of this machine.
            digest: stack.enter_context(Lab(site, scale=1 / slower, realtime=True))
            for digest, site in site_by_digest.items()
        }
        for repetition in range(repetitions):
            for variant in order_of(variants, repetition):
                tell(f"{case_name}: repetition {repetition + 1} of {repetitions}: {variant.name}")
                lab = lab_by_digest[variant.spec.digest]
                measure(lab, variant, checkout, command, flops, steps, series[variant.name])
    return series


def rotated(variants: Sequence[Variant], repetition: int) -> Sequence[Variant]:
    """Return the variants in a cyclic order.

    Repetition 0 starts with the first variant, repetition 1 with the second, and so on.
    """
    first = repetition % len(variants)
    return [*variants[first:], *variants[:first]]


def reversed_if_even(variants: Sequence[Variant], repetition: int) -> Sequence[Variant]:
    """Return the variants in reverse order if the number of the repetition is even, else as they are."""
    is_even = repetition % 2 == 0
    return variants[::-1] if is_even else variants


def measure(
    lab: Lab,
    variant: Variant,
    checkout: Checkout,
    command: list[str],
    flops: float,
    steps: int,
    series: Series,
) -> None:
    """Train once on emulated nodes, and add the step times, losses and sent bytes to `series`.

    Args:
        lab: The emulated nodes and networks.
        variant: The job with or without holmes: its flags, its environment and the order of its nodes.
        checkout: The copy of Megatron-DeepSpeed that contains pretrain_gpt.py.
        command: pretrain_gpt.py and its arguments, without the variant's flags.
        flops: FLOP/s of an emulated GPU.
        steps: Training steps.
        series: Gets the measurements of the run.
    """
    bytes_before = lab.counters()  # of each NIC
    result = lab.run(
        [sys.executable, *command, *variant.flags],
        order=variant.order,
        # stand_ins: stock needs substitutes for modules that are not installed.
        env={**checkout.env, **checkout.stand_ins(variant.flags), **variant.env},
        cwd=checkout.folder,
        preload=("torch", "deepspeed"),  # imported once; the ranks are forked from that process
        timeout=400,  # seconds
        # Each layer of this class sleeps as long as the emulated GPU would compute.
        accelerator={"flops": flops, "classes": ["ParallelTransformerLayer"], "layout": "sbh"},
    )
    log = read_log(result)  # fails if the run failed
    # The keys of `losses` are step numbers. Every step must have been logged.
    assert list(log.losses) == list(range(1, steps + 1)), log
    # holmes prints this line if the job does not communicate as it has planned.
    assert not any("not as planned" in line for line in log.lines), log.lines
    seconds = [log.seconds[step] for step in log.losses]  # of each step, in their order
    losses = list(log.losses.values())
    series.add(seconds, losses, WARM_UP_STEPS, result, bytes_before, lab.counters())
    series.lines = log.lines  # of the last run only


def case(name: str, checkout: Checkout, repetitions: int, steps: int) -> list[Row]:
    """Train on emulated clusters in five variants, and return the rows of results.

    The variants are "stock" (without holmes), "stock again" (the noise), "holmes", "holmes, overlap
    off", and "all-RDMA": without holmes, all nodes in one fast cluster.

    Args:
        name: A key of CASES, e.g. "4+4" for two clusters of 4 nodes.
        checkout: The copy of Megatron-DeepSpeed for the training.
        repetitions: Runs of each variant.
        steps: Training steps of a run.
    """
    definition = CASES[name]
    cluster_file = examples() / "clusters" / definition.cluster_file
    spec = load_spec(cluster_file)
    # Ranks alternate between the clusters: a scheduler that knows no clusters numbers the nodes like this.
    order = interleave(spec)
    flags = ("--holmes", "--holmes-cluster", str(cluster_file))
    variants = [
        Variant("stock", spec, order),  # without holmes
        Variant("holmes", spec, order, flags=flags),
        all_rdma(spec),  # without holmes, all nodes in one InfiniBand cluster
        Variant("holmes, overlap off", spec, order, flags=(*flags, "--holmes-overlap", "off")),
        Variant("stock again", spec, order),  # shows the noise
    ]
    command = command_of(checkout, definition.micro_batches, len(order), steps)
    series = run_in_turns(
        name,
        variants,
        checkout,
        command,
        # GPUs and networks are slowed down by the same factor, so that the ratio of communication
        # to compute stays the same. The run divides only the rates of networks by `slower`.
        flops=definition.flops / definition.slower,
        slower=definition.slower,
        steps=steps,
        repetitions=repetitions,
        order_of=rotated,  # each repetition starts with another variant
    )
    return rows_of(name, series, definition)


def rows_of(name: str, series: dict[str, Series], definition: Case) -> list[Row]:
    """Return rows of the table of results that compare the measured variants of a case.

    Args:
        name: The case, e.g. "4+4".
        series: By the name of the variant, its step times and losses. "stock" ran without holmes, "all-RDMA"
            ran without holmes on a single fast cluster, and bounds the speed of all others.
        definition: The case, with its targets for the ratios of "holmes".
    """
    stock, bound = series["stock"], series["all-RDMA"]
    rows = []
    # ratio_row(case, name, a, b, target): the median step time of a divided by that of b.
    for variant in ("holmes", "holmes, overlap off"):
        if variant == "holmes":
            stock_target = definition.stock_target
            bound_target = definition.bound_target
        else:
            stock_target = bound_target = ""  # reported only
        difference = max_loss_difference(stock, series[variant])
        rows += [
            ratio_row(name, f"{variant} : stock", stock, series[variant], target=stock_target),
            ratio_row(name, f"{variant} : all-RDMA", bound, series[variant], target=bound_target),
            # Not 0: holmes may add the gradients of four ranks in another order than stock, since its buckets
            # have another size and it reduces the tied embedding hierarchically. So the last printed digit of
            # a loss may differ.
            Row.median(
                name,
                f"{variant}: largest loss difference",
                [difference],
                unit="nats",
                emulated=False,
                target="<= 1e-5",
            ),
        ]
    # "stock" and "stock again" are the same job: their difference is the noise of the measurement.
    noise = abs(series["stock again"].median / stock.median - 1)
    rows += [
        ratio_row(name, "stock : all-RDMA", bound, stock, target=""),
        Row.median(
            name, "A/A difference (noise)", [noise], unit="of a step", emulated=stock.emulated
        ),
    ]
    return rows + step_rows(name, series)


def tied(source: Path, folder: Path, repetitions: int, steps: int) -> list[Row]:
    """Measure the case "tied 4+4", and return its rows of the table of results.

    The first and the last pipeline stage share GPT-2's embedding (tied weights). Two ways to reduce its
    gradient are compared: "hierarchical" is holmes's hierarchical all-reduce, and "pairs" is DeepSpeed's
    reduction between pairs of ranks.

    Args:
        source: The checkout of Megatron-DeepSpeed.
        folder: Folder for a copy of it.
        repetitions: Runs of each variant.
        steps: Training steps of a run.
    """
    definition = CASES["4+4"]
    cluster_file = examples() / "clusters" / definition.cluster_file
    spec = load_spec(cluster_file)
    order = interleave(spec)  # ranks alternate between the clusters
    checkout = Checkout(source, folder)  # with GPT-2's vocabulary
    checkout.compile_adam()
    flags = ("--holmes", "--holmes-cluster", str(cluster_file))
    without_feature = {"HOLMES_DISABLE": TIED_FEATURE}
    variants = [
        Variant("hierarchical", spec, order, flags=flags),
        Variant("pairs", spec, order, flags=flags, env=without_feature),
    ]
    command = command_of(checkout, definition.micro_batches, len(order), steps)
    series = run_in_turns(
        TIED_CASE,
        variants,
        checkout,
        command,
        flops=definition.flops,
        steps=steps,
        repetitions=repetitions,
        order_of=reversed_if_even,
    )

    hierarchical, pairs = series["hierarchical"], series["pairs"]
    # For each repetition, the median step time with "pairs" minus that with "hierarchical". `medians` has one
    # number for each repetition.
    seconds_saved = [
        pairs_s - hierarchical_s
        for hierarchical_s, pairs_s in zip(hierarchical.medians, pairs.medians)
    ]
    predicted_pairs = predicted_tied_step(spec, definition, hierarchical=False)
    predicted_hierarchical = predicted_tied_step(spec, definition, hierarchical=True)
    predicted_saving = predicted_pairs - predicted_hierarchical
    difference = max_loss_difference(pairs, hierarchical)
    return [
        ratio_row(TIED_CASE, "pairs : hierarchical", pairs, hierarchical, target=""),
        Row.median(TIED_CASE, "seconds saved", seconds_saved, unit="s", emulated=True),
        Row.median(
            TIED_CASE, "seconds saved, predicted", [predicted_saving], unit="s", emulated=True
        ),
        loss_row(TIED_CASE, difference, target="<= 1e-5"),
        *step_rows(TIED_CASE, series),
    ]


def predicted_tied_step(spec: SiteSpec, definition: Case, hierarchical: bool) -> float:
    """Return the predicted seconds of a training step with GPT-2's tied embedding.

    Args:
        spec: The emulated clusters.
        definition: The case: the micro-batches of a step and the FLOP/s of a GPU.
        hierarchical: Whether the embedding's gradient is reduced by a hierarchical all-reduce, or else
            between pairs of ranks, as by DeepSpeed without holmes.
    """
    forward_seconds = forward_s(HIDDEN, SEQUENCE, definition.flops)  # of a transformer layer
    model = Model(
        layers=LAYERS,
        hidden=HIDDEN,
        heads=HEADS,
        sequence=SEQUENCE,
        vocabulary=GPT2_TOKENS,
        micro_batches=definition.micro_batches,
        activation_width=4,  # bytes
    )
    if hierarchical:
        options = Options()
    else:
        options = Options(off=frozenset({TIED_FEATURE}))  # as if HOLMES_DISABLE named the feature
    # tied: whether the simulated DeepSpeed reduces tied weights hierarchically
    return predicted_step(
        "deepspeed", spec, model, Sizes(pipeline=2), forward_seconds, options, tied=hierarchical
    )


def slow_stage_link(checkout: Checkout, repetitions: int, steps: int) -> list[Row]:
    """Measure the case "slow stage link", and return its rows of the table of results.

    Two pipeline stages exchange activations over a slow or a fast Ethernet (the "slow" and the "free" link).
    Two schedules run over each link: "holmes" keeps enough micro-batches in flight to hide the link's time,
    and "engine" is DeepSpeed's own schedule.

    Args:
        checkout: The copy of Megatron-DeepSpeed for the training.
        repetitions: Runs of each schedule and link.
        steps: Training steps of a run.
    """
    # Of a transformer layer.
    forward_seconds = forward_s(stage_links.HIDDEN, stage_links.SEQUENCE, stage_links.FLOPS)
    variants = []
    predicted = {}  # name of a variant -> seconds of a step
    # All runs read files in this folder, so they are inside of the block.
    with tempfile.TemporaryDirectory() as directory:
        model_file = Path(directory, "model.toml")
        model_file.write_text(
            stage_links.MODEL_TOML.format(micro_batches=LINK_MICRO_BATCHES, flops=stage_links.FLOPS)
        )
        model = load_model(str(model_file))
        for link, rate in LINK_RATES.items():
            cluster_file = Path(directory, f"{link}.toml")
            # Two clusters of 2 nodes, with Ethernet of this rate.
            cluster_file.write_text(stage_links.two(rate))
            spec = load_spec(cluster_file)
            for schedule in ("holmes", "engine"):
                # The value of --holmes-inflight for the schedule: "off" leaves it to the engine, DeepSpeed.
                inflight = stage_links.INFLIGHT[schedule]
                flags = (
                    "--holmes",
                    "--holmes-cluster",
                    str(cluster_file),
                    "--holmes-model",
                    str(model_file),
                    "--holmes-inflight",
                    inflight,
                )
                name = f"{schedule}, {link}"
                variants.append(Variant(name, spec, interleave(spec), flags=flags))
                predicted[name] = predicted_step(
                    "deepspeed",
                    spec,
                    model,
                    Sizes(pipeline=2),
                    forward_seconds,
                    Options(inflight=inflight),
                )
        ranks = len(variants[0].order)  # one per node; the same for all variants
        command = command_of(checkout, LINK_MICRO_BATCHES, ranks, steps, LINK_MODEL)
        series = run_in_turns(
            LINK_CASE,
            variants,
            checkout,
            command,
            flops=stage_links.FLOPS,
            steps=steps,
            repetitions=repetitions,
            order_of=reversed_if_even,
        )

    holmes_slow, holmes_free = series["holmes, slow"], series["holmes, free"]
    engine_slow, engine_free = series["engine, slow"], series["engine, free"]
    difference = max_loss_difference(engine_slow, holmes_slow)
    return [
        ratio_row(
            LINK_CASE, "holmes: slow link : free link", holmes_slow, holmes_free, target="<= 1.15"
        ),
        ratio_row(LINK_CASE, "engine: slow link : free link", engine_slow, engine_free, target=""),
        ratio_row(LINK_CASE, "slow link, engine : holmes", engine_slow, holmes_slow, target=""),
        loss_row(LINK_CASE, difference, target="<= 0"),
        *stage_links.prediction_rows(LINK_CASE, stage_links.medians(series), predicted),
        *step_rows(LINK_CASE, series),
    ]


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file.

    Cases in CASES ("4+4", ...) compare Megatron-DeepSpeed without holmes ("stock"), with holmes,
    and without holmes on a single fast cluster ("all-RDMA"). "all-RDMA" is a bound: no job can be
    faster. Two cases compare details: TIED_CASE two ways to reduce the gradient of tied embeddings,
    and LINK_CASE two pipeline schedules over a slow link between stages.
    """
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=12)
    args = arguments.parse_args()
    names = chosen_cases(args.cases, [*CASES, TIED_CASE, LINK_CASE])
    source = find_checkout("Megatron-DeepSpeed")
    if source is None:
        tell(f"megatron_deepspeed.py: skipped; {why_missing('Megatron-DeepSpeed')}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        # The rows of former runs in the file of --json, without the cases that are measured again now.
        rows = kept_rows(args.json, names)
        if TIED_CASE in names:
            rows += tied(source, Path(folder, "tied"), args.repetitions, args.steps)
        # All other cases train on the same text, with one token per byte: they share a copy of the checkout.
        byte_cases = [name for name in names if name != TIED_CASE]
        if byte_cases:
            checkout = copy_checkout(source, Path(folder))
        for name in byte_cases:
            if name == LINK_CASE:
                rows += slow_stage_link(checkout, args.repetitions, args.steps)
            else:
                rows += case(name, checkout, args.repetitions, args.steps)
    return finish(
        rows,
        args.json,
        "Megatron-DeepSpeed: stock, holmes and the all-RDMA bound (step times on the emulated "
        "accelerator)",
    )


if __name__ == "__main__":
    sys.exit(main())

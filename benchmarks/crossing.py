"""Measures two ways of holmes to send less between clusters: slices and hierarchical tied gradients.

    python benchmarks/crossing.py --json FILE [--cases slices,"tied deepspeed",...] [--repetitions 3]

    slices    megatron-core with tensor 2 x pipeline 2 x data 2 on 2 + 2 nodes of 2 processes. Each
              tensor-parallel rank sends only a slice of an activation between clusters. Whole activations
              take half of a stage's 128 ms for a micro-batch on Ethernet. Two schedules are used:
              megatron-core's own, whose sends block (--holmes-inflight off), and a schedule with enough
              micro-batches in flight to hide the transfers.
    tied      Pipeline 2 x data 4 on 4 + 4 nodes. The gradient of the tied embedding is reduced
              hierarchically, or between pairs of ranks as the engines do it. A model whose embedding is not
              tied shows the cost of everything else.

All variants run under holmes, in turn with and without the feature (HOLMES_DISABLE). The accelerator is
emulated. Steps are predicted as in benchmarks/stage_links.py. Rows of other cases that FILE has are kept.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from emulated import forward_s
from harness import Row, chosen_cases, finish, kept_rows, parser, tell, toml
from holmes_lab import interleave
from holmes_lab.compare import Series, Variant, compare, max_loss_difference
from stage_links import medians, predicted_step, prediction_rows
from two_clusters import loss_row, ratio_row, step_rows

from holmes_ext.cluster.spec import load_spec
from holmes_ext.options import Options
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.sizes import Sizes
from holmes_ext.samples import examples

#: Engine -> folder of its example, flag for the number of stages, layers that the emulated accelerator
#: slows down, feature of holmes for tied weights.
ENGINES = {
    "deepspeed": ("deepspeed_pipeline", "--stages", {"classes": ["Block"]}, "deepspeed-tied"),
    "megatron": (
        "megatron_core",
        "--pipeline",
        {"classes": ["TransformerLayer"], "layout": "sbh"},
        "megatron-tied",
    ),
}
OFF = "HOLMES_DISABLE"  # environment variable: features of holmes to switch off
SLICES = "megatron-slices"
FLOPS = {"slices": 1.4e9 / 2, "tied": 2.3e9}


def ethernet_bytes(series: Series) -> float:
    """Return the bytes that all nodes sent over Ethernet for each step, including the start of the job."""
    return sum(nics["eth0"] for nics in series.sent.values())


def measure_slices(repetitions: int, steps: int) -> list[Row]:
    """Measure how much time it saves to send only slices of activations between two clusters.

    In megatron-core, all tensor-parallel ranks hold the same activation, and each sends all of it
    to the next stage ("whole"). With holmes each of the two ranks sends half, and the receivers
    gather the halves inside their fast cluster ("slices"). Both run with megatron-core's schedule, whose
    sends block, and with more micro-batches in flight, which hide the transfers.

    Args:
        repetitions: Runs of each variant.
        steps: Training steps of a run.

    Returns:
        Rows with the bytes between clusters, the step times, their predictions and the losses.
    """
    script = [
        str(examples() / "megatron_core" / "train.py"),
        "--tensor",
        "2",
        "--pipeline",
        "2",
        *(
            "--layers 4 --hidden 192 --heads 4 --sequence 32 --micro-batch 1 --micro-batches 8".split()
        ),
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cluster.toml")
        file.write_text(
            toml("a ib 1Gb/s a[0-1]", "b roce 1Gb/s b[0-1]", ethernet="6.2Mb/s", processes=2)
        )
        spec = load_spec(file)
        base = ("--holmes", "--holmes-cluster", str(file), "--holmes-sizes", "tensor=2,pipeline=2")
        schedules = {
            "own schedule": ("--holmes-inflight", "off"),
            "in flight": ("--holmes-inflight", "1"),
        }
        order = interleave(spec)
        variants = []
        for name, schedule_flags in schedules.items():
            flags = (*base, *schedule_flags)
            variants.append(Variant(f"slices, {name}", spec, order, flags=flags))
            without_slices = {OFF: SLICES}
            variants.append(Variant(f"whole, {name}", spec, order, flags=flags, env=without_slices))
        accelerator = {"flops": FLOPS["slices"], **ENGINES["megatron"][2]}
        series = run("slices", variants, script, repetitions, steps, accelerator)
    rows = []
    for name in schedules:
        slices = series[f"slices, {name}"]
        whole = series[f"whole, {name}"]
        share = ethernet_bytes(slices) / ethernet_bytes(whole)
        target = ">= 1.2" if name == "own schedule" else ""
        rows += [
            Row.median(
                "slices",
                f"crossing bytes, {name}",
                [share],
                unit="of whole ones'",
                emulated=False,
                target="<= 0.55",
            ),
            ratio_row("slices", f"step, whole : slices, {name}", whole, slices, target=target),
        ]
    difference = max(
        max_loss_difference(series["whole, own schedule"], other) for other in series.values()
    )
    rows.append(loss_row("slices", difference))
    hidden = 192
    tokens = 32
    model = Model(
        layers=4,
        hidden=hidden,
        heads=4,
        sequence=tokens,
        vocabulary=256,
        micro_batches=8,
        activation_width=4,
        tied=False,
    )
    # Parameters of a block on a rank: half of the weights, all of the norms and of two biases.
    parameters = 6 * hidden * hidden + 9.5 * hidden
    forward = forward_s(hidden, tokens, FLOPS["slices"], parameters)
    predicted = {}
    for name, (_, inflight) in schedules.items():
        for way, off in (("slices", frozenset()), ("whole", frozenset({SLICES}))):
            predicted[f"{way}, {name}"] = predicted_step(
                "megatron",
                spec,
                model,
                Sizes(tensor=2, pipeline=2),
                forward,
                Options(inflight=inflight, off=off),
                cut=way == "slices",
            )
    return [
        *rows,
        *prediction_rows("slices", medians(series), predicted),
        *step_rows("slices", series),
    ]


def measure_tied(engine: str, repetitions: int, steps: int) -> list[Row]:
    """Measure the cost of the gradient of a tied embedding, reduced hierarchically or in pairs.

    The first and the last pipeline stage share the embedding's weights, so that their gradients are
    added in each step. The engine does it between pairs of ranks, each over the slow network.
    holmes first adds inside clusters. A model whose embedding is not tied shows the cost of all
    else.

    Args:
        engine: "deepspeed" or "megatron".
        repetitions: Runs of each variant.
        steps: Training steps of a run.

    Returns:
        Rows with the bytes, the step times, their predictions and the losses.
    """
    case = f"tied {engine}"
    # Example folder, flag for stages, layers that the accelerator slows down, holmes's feature.
    example, stages, paced, feature = ENGINES[engine]
    script = [
        str(examples() / example / "train.py"),
        stages,
        "2",
        *(
            "--layers 4 --hidden 288 --heads 4 --sequence 16 --micro-batch 1 --micro-batches 4".split()
        ),
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cluster.toml")
        file.write_text(toml("a ib 1Gb/s a[0-3]", "b roce 1Gb/s b[0-3]", ethernet="12Mb/s"))
        spec = load_spec(file)
        flags = ("--holmes", "--holmes-cluster", str(file), "--holmes-sizes", "pipeline=2")
        variants = [
            Variant("hierarchical", spec, interleave(spec), flags=(*flags, "--tied")),
            Variant("pairs", spec, interleave(spec), flags=(*flags, "--tied"), env={OFF: feature}),
            Variant("not tied", spec, interleave(spec), flags=flags),
        ]
        series = run(case, variants, script, repetitions, steps, {"flops": FLOPS["tied"], **paced})
    forward = forward_s(288, 16, FLOPS["tied"])
    model = Model(
        layers=4,
        hidden=288,
        heads=4,
        sequence=16,
        vocabulary=256,
        micro_batches=4,
        activation_width=4,
    )
    predicted = {}
    for name in series:
        is_hierarchical = name != "pairs"
        disabled = frozenset() if is_hierarchical else frozenset({feature})
        predicted[name] = predicted_step(
            engine,
            spec,
            replace(model, tied=name != "not tied"),
            Sizes(pipeline=2),
            forward,
            Options(off=disabled),
            tied=is_hierarchical,
        )
    hierarchical = series["hierarchical"]
    pairs = series["pairs"]
    not_tied = series["not tied"]
    # Cost of the tied embedding: bytes and seconds in excess of the model whose embedding is not tied.
    base_bytes = ethernet_bytes(not_tied)
    sent = (ethernet_bytes(hierarchical) - base_bytes) / (ethernet_bytes(pairs) - base_bytes)
    exposed = {}  # name of a variant -> seconds of each run
    for name in ("hierarchical", "pairs"):
        steps_of_runs = zip(series[name].medians, not_tied.medians)
        exposed[name] = [tied_s - not_tied_s for tied_s, not_tied_s in steps_of_runs]
    shares = [
        hierarchical_s / pairs_s
        for hierarchical_s, pairs_s in zip(exposed["hierarchical"], exposed["pairs"])
    ]
    share = statistics.median(exposed["hierarchical"]) / statistics.median(exposed["pairs"])
    return [
        Row.median(
            case, "crossing bytes of it", [sent], unit="of pairs'", emulated=False, target="<= 0.3"
        ),
        Row.of(
            case,
            "exposed time of it",
            share,
            unit="of pairs'",
            spread=(min(shares), max(shares)),
            emulated=True,
            target="<= 0.3",
        ),
        *(
            Row.median(case, f"exposed, {name}", seconds, unit="s", emulated=True)
            for name, seconds in exposed.items()
        ),
        ratio_row(case, "step, pairs : hierarchical", pairs, hierarchical, target=""),
        loss_row(case, max_loss_difference(pairs, hierarchical)),
        *prediction_rows(case, medians(series), predicted),
        *step_rows(case, series),
    ]


def run(
    case: str,
    variants: list[Variant],
    script: list[str],
    repetitions: int,
    steps: int,
    accelerator: dict,
) -> dict[str, Series]:
    """Run the variants on emulated clusters, and return their measurements by name.

    Args:
        case: Name of the case, for lines about the progress.
        variants: The job with and without a feature of holmes.
        script: The training script and its arguments.
        repetitions: Runs of each variant.
        steps: Training steps of a run. The first 3 are not measured.
        accelerator: Settings of the emulated accelerator.
    """
    total = repetitions * len(variants)
    started = iter(range(1, total + 1))
    return compare(
        variants,
        script,
        repetitions=repetitions,
        steps=steps,
        skip=3,
        accelerator=accelerator,
        on_run=lambda variant, _: tell(f"{case}: run {next(started)} of {total}: {variant}"),
    )


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    # Bytes include those of the job's start. In 24 steps they are a small part.
    arguments.add_argument("--steps", type=int, default=24)
    args = arguments.parse_args()
    # "slices": each tensor-parallel rank sends a slice of an activation between clusters, or all of
    # it. "tied ENGINE": the gradient of an embedding that two stages share is reduced
    # hierarchically, or between pairs of ranks.
    measure_of = {"slices": lambda: measure_slices(args.repetitions, args.steps)}
    for engine in ENGINES:
        measure_of[f"tied {engine}"] = lambda engine=engine: measure_tied(
            engine, args.repetitions, args.steps
        )
    names = chosen_cases(args.cases, measure_of)
    rows = [row for name in names for row in measure_of[name]()]
    title = "Less traffic between clusters (emulated accelerator)"
    return finish([*kept_rows(args.json, names), *rows], args.json, title)


if __name__ == "__main__":
    sys.exit(main())

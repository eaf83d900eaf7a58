"""Measures how well holmes hides a slow link between pipeline stages behind computing.

The job runs over a slow link and over a link that takes next to no time ("free"). With holmes,
stages send activations without blocking, and have more micro-batches in flight than in 1F1B.

    python benchmarks/stage_links.py --json FILE [--cases "deepspeed 8,..."] [--repetitions 3] [--predict]

DeepSpeed's pipeline engine and megatron-core's 1F1B run on 2 + 2 emulated nodes. Each of two stages takes
64 ms for a micro-batch: layers sleep as long as an accelerator of 2.4 GFLOP/s would compute. The cases,
where ENGINE is "deepspeed" or "megatron":

    ENGINE 8, ENGINE 16    8 or 16 micro-batches. Ethernet takes 35 ms for an activation of 32 KiB
                           (7.4 Mb/s), or next to nothing (1 Gb/s).
    deepspeed latency      60 ms for a micro-batch. The link has 20 ms in each direction, or none.
    ENGINE one cluster     a stage link inside a cluster, which need not be hidden
    ENGINE unequal         Four stages of 2, 2, 1 and 1 layers, GPUs with a third of the speed, six
                           micro-batches, and a link of 20 ms. holmes can choose the number of
                           micro-batches in flight by the slowest stage, which gives those of 1F1B,
                           or by the mean stage, which gives more. In so short a step, more are
                           faster.

The variants run in turn, and the results are medians of the repetitions' medians:

    holmes    as many micro-batches in flight as hide the stage link
    engine    --holmes-inflight off: the engine's own schedule, whose sends block
    own       --holmes-inflight 0: the numbers of 1F1B

Exposed are the seconds of a step that a rank waits for its neighbours, by the telemetry of holmes, in excess
of those with a free stage link (all ranks wait while the pipeline fills).

Steps are predicted by planner/simulate/step.py for the networks in cluster.toml, with the CPU seconds
that the calibration of benchmarks/prediction_links.py found on the same machine. Rows of other cases that
FILE has are kept. --predict measures nothing, and predicts the rows of FILE anew.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from emulated import even_costs, forward_s
from harness import Row, chosen_cases, finish, kept_rows, parser, tell, toml
from holmes_lab import interleave
from holmes_lab.compare import Series, Variant, compare, max_loss_difference
from prediction import CORES, TRAITS, Measured, calibrate
from prediction_links import STORE
from two_clusters import loss_row, ratio_row, step_rows

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.model import Model, load_model
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.step import simulate
from holmes_ext.report.figures import summarize
from holmes_ext.report.files import load
from holmes_ext.samples import examples

LAYERS, HIDDEN, SEQUENCE = 6, 64, 128
MODEL = (
    f"--layers {LAYERS} --hidden {HIDDEN} --heads 4 --sequence {SEQUENCE} --micro-batch 1".split()
)
MODEL_TOML = """version = 1
layers = 6
hidden = 64
heads = 4
sequence = 128
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
LINK = """[[between]]
clusters = ["a", "b"]
rate = "100Mb/s"
latency = "{latency}"
"""
ONE_CLUSTER = toml("a ib 1Gb/s a[0-3]", ethernet="1Gb/s")
FLOPS = (
    2.39e9  # of an emulated GPU; three layers take 64 ms for a micro-batch, forward and backward
)
#: Bytes of a message that a TCP connection keeps when the sender goes on (gloo's send ends when the kernel
#: has the whole message).
BUFFER_BYTES = 64 * 2**10
#: Schedule -> value of --holmes-inflight. "engine" is the engine's own schedule, whose sends block.
#: "own" is 1F1B in holmes's stage links, whose sends do not block.
INFLIGHT = {"holmes": "auto", "engine": "off", "own": "0"}
#: Engine -> its example, the flag for stages, layers that the emulated accelerator slows down.
ENGINES = {
    "deepspeed": ("deepspeed_pipeline", "--stages", {"classes": ["Block"]}),
    "megatron": ("megatron_core", "--pipeline", {"classes": ["TransformerLayer"], "layout": "sbh"}),
}


@dataclass(frozen=True)
class Case:
    """Pipeline job that runs over a slow and over a fast ("free") link between its stages."""

    engine: str
    micro_batches: int
    #: Link between the clusters -> cluster.toml. "free": messages take next to no time. "slow": see
    #: the case. Or "as it is": a single cluster.
    stage_links: dict[str, str]
    target: str = ""  # of a step with the slow stage link : a step with the free stage link
    flops: float = FLOPS
    steps: int = 10
    stages: int = 2
    layout: tuple[str, ...] = ()


def two(ethernet: str) -> str:
    """Return the cluster.toml of two clusters of two nodes."""
    return toml("a ib 1Gb/s a[0-1]", "b roce 1Gb/s b[0-1]", ethernet=ethernet)


def _cases() -> dict[str, Case]:
    """Return the pipeline jobs by name. Most of them run over a slow and a fast link.

    The link connects pipeline stages. The fast one is called "free": messages take next to no time.
    ENGINE is "deepspeed" or "megatron":

        ENGINE 8, ENGINE 16    8 or 16 micro-batches. The slow link has a low rate: an activation
                               takes half of the time that a stage computes for a micro-batch.
        ENGINE unequal         stages of unequal size. The slow link has a latency of 20 ms.
        deepspeed latency      stages of equal size. The slow link has a latency of 20 ms.
        ENGINE one cluster     only a fast link
    """
    # Name of a link -> cluster.toml with its rate, or with its latency (LINK is such a table).
    links_of_two_rates = {"free": two("1Gb/s"), "slow": two("7.4Mb/s")}
    links_of_two_latencies = {
        name: two("250Mb/s") + LINK.format(latency=latency)
        for name, latency in (("free", "0.1ms"), ("slow", "20ms"))
    }
    cases = {}
    for engine in ENGINES:
        # Megatron's syntax for stages of 2, 2, 1 and 1 transformer layers (t), with the embedding
        # (E) and the output layer (L). DeepSpeed needs no flag: it divides six layers among four
        # stages in the same way.
        layout = ("--layout", "Ett|tt|t|tL") if engine == "megatron" else ()
        cases[f"{engine} unequal"] = Case(
            engine,
            micro_batches=6,
            stage_links=links_of_two_latencies,
            # A stage of one layer then takes 64 ms for a micro-batch, and one of two layers 128 ms.
            flops=FLOPS / 3,
            stages=4,
            layout=layout,
        )
        for micro_batches, target in ((8, "<= 1.15"), (16, "<= 1.08")):
            cases[f"{engine} {micro_batches}"] = Case(
                engine, micro_batches, stage_links=links_of_two_rates, target=target
            )
        cases[f"{engine} one cluster"] = Case(
            engine, micro_batches=8, stage_links={"as it is": ONE_CLUSTER}, steps=24
        )
    cases["deepspeed latency"] = Case(
        "deepspeed",
        micro_batches=16,
        stage_links=links_of_two_latencies,
        target="<= 1.15",
        flops=FLOPS * 64 / 60,  # a stage takes 60 ms for a micro-batch
    )
    return cases


CASES = _cases()


@dataclass(frozen=True)
class Run:
    """Pipeline job with one schedule over one link between the stages, and its files."""

    variant: Variant
    schedule: str  # a key of INFLIGHT
    file: Path  # cluster.toml
    telemetry: Path  # folder


def _prepared(case: Case, folder: Path) -> tuple[Path, list[Run]]:
    """Write the files of a case, and return the model's file and the runs to make.

    For each link between stages there are these runs:

        holmes    as many micro-batches in flight as hide the link
        engine    without holmes's schedule: that of the engine, whose sends block
        again     "engine" again, to show the noise; only in cases with a single link
        own       holmes's schedule with the micro-batches in flight of 1F1B, and sends that do not
                  block; only in cases with more than two stages

    Args:
        folder: For the model's file and the cluster files.
    """
    model, runs = folder / "model.toml", []
    model.write_text(MODEL_TOML.format(micro_batches=case.micro_batches, flops=case.flops))
    for stage_link, text in case.stage_links.items():
        file = folder / f"{stage_link}.toml"
        file.write_text(text)
        spec = load_spec(file)
        schedules = {"holmes": "holmes", "engine": "engine"}  # name of the run -> key of INFLIGHT
        if len(case.stage_links) == 1:
            schedules["again"] = "engine"
        if case.stages > 2:
            schedules["own"] = "own"
        for label, schedule in schedules.items():
            name, telemetry = f"{label}, {stage_link}", folder / f"telemetry {label} {stage_link}"
            flags = (
                "--holmes",
                "--holmes-cluster",
                str(file),
                "--holmes-sizes",
                f"pipeline={case.stages}",
                "--holmes-model",
                str(model),
                "--holmes-telemetry",
                str(telemetry),
            )
            flags += ("--holmes-inflight", INFLIGHT[schedule])
            runs.append(
                Run(Variant(name, spec, interleave(spec), flags=flags), schedule, file, telemetry)
            )
    return model, runs


def measured_anew(repetitions: int, name: str) -> list[Row]:
    """Run a pipeline job with each schedule over each link, and return the rows of results.

    Args:
        repetitions: Runs of each schedule and link.
        name: A key of CASES.
    """
    case = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        model, runs = _prepared(case, Path(directory))
        # Example folder, flag for the number of stages, layers that sleep as long as a GPU
        # computes.
        example, stages_flag, accelerator = ENGINES[case.engine]
        train = examples() / example / "train.py"
        script = [
            str(train),
            *MODEL,
            stages_flag,
            str(case.stages),
            "--micro-batches",
            str(case.micro_batches),
            *case.layout,  # layers of each stage, if they are unequal
        ]
        started, total = iter(range(1, repetitions * len(runs) + 1)), repetitions * len(runs)
        series = compare(
            [run.variant for run in runs],
            script,
            repetitions=repetitions,
            steps=case.steps,
            skip=4,
            accelerator={"flops": case.flops, **accelerator},
            on_run=lambda variant, _: tell(f"{name}: run {next(started)} of {total}: {variant}"),
        )
        # Seconds of a step that a rank waits for its neighbours, from holmes's telemetry.
        exposed = {run.variant.name: _pipeline_s(run.telemetry) for run in runs}
        predicted = predictions(case, runs, model)
    return [
        *_ratios(name, case, series, exposed),
        *prediction_rows(name, medians(series), predicted),
        *step_rows(name, series),
    ]


def medians(by_variant: dict[str, Series]) -> dict[str, float]:
    """Return the median step time of each variant, in seconds."""
    return {name: series.median for name, series in by_variant.items()}


def _pipeline_s(telemetry: Path) -> float:
    """Return the seconds of a step for which a rank waited for its neighbours, as the mean of all ranks."""
    return sum(row.exposed_s for row in summarize(load(telemetry)).rows if row.kind == "pipeline")


def _ratios(
    name: str, case: Case, series: dict[str, Series], exposed: dict[str, float]
) -> list[Row]:
    """Return rows that compare the variants of a case.

    Args:
        name: Name of the case in the results.
        series: "SCHEDULE, STAGE LINK" (such as "holmes, slow") -> measurements.
        exposed: The same key -> seconds of a step for which a rank waits for its neighbours.
    """
    if len(case.stage_links) == 1:  # the cost of holmes if nothing must be hidden
        engine = series["engine, as it is"]
        again = series["again, as it is"]
        ours = series["holmes, as it is"]
        engine_s = statistics.median([*engine.medians, *again.medians])
        costs = []  # of each repetition, compared with the mean of both runs of the engine
        for ours_s, first_s, again_s in zip(ours.medians, engine.medians, again.medians):
            costs.append(2 * ours_s / (first_s + again_s) - 1)
        cost = Row.of(
            name,
            "what holmes's stage links add to a step",
            ours.median / engine_s - 1,
            unit="of a step",
            spread=(min(costs), max(costs)),
            emulated=True,
            target="<= 0.005",
            busy=max(engine.busy, again.busy, ours.busy),
        )
        noise = abs(again.median / engine.median - 1)
        difference = max_loss_difference(engine, ours)
        return [
            cost,
            Row.median(name, "A/A difference (noise)", [noise], unit="of a step", emulated=True),
            loss_row(name, difference),
        ]
    rows = []
    for schedule, target in (("holmes", case.target), ("engine", "")):
        slow = series[f"{schedule}, slow"]
        free = series[f"{schedule}, free"]
        metric = f"{schedule}: slow stage link : free stage link"
        rows.append(ratio_row(name, metric, slow, free, target=target))
    others = [schedule for schedule in ("engine", "own") if f"{schedule}, slow" in series]
    for schedule in others:
        slow = series[f"{schedule}, slow"]
        metric = f"slow stage link, {schedule} : holmes"
        rows.append(ratio_row(name, metric, slow, series["holmes, slow"], target=""))
    extra = {}  # schedule -> seconds of a step that the slow link adds to the wait for neighbours
    for schedule in ("holmes", "engine"):
        extra[schedule] = exposed[f"{schedule}, slow"] - exposed[f"{schedule}, free"]
        metric = f"exposed by the slow stage link, {schedule}"
        rows.append(Row.median(name, metric, [extra[schedule]], unit="s", emulated=True))
    rows.append(
        Row.median(
            name,
            "exposed by the slow stage link, holmes : engine",
            [extra["holmes"] / extra["engine"]],
            unit="x",
            emulated=True,
            target="<= 0.25" if case.target else "",
        )
    )
    difference = max(
        max_loss_difference(series[f"{schedule}, slow"], series["holmes, slow"])
        for schedule in others
    )
    return [*rows, loss_row(name, difference)]


# --------------------------------------------------------------------------- prediction


@cache
def _overheads(engine: str) -> tuple[float, float, float]:
    """Return the CPU seconds of an engine's code, fitted to measured steps of other jobs.

    They are in addition to the time of the emulated GPU: for each forward or backward pass of a
    transformer block, for each parameter in a step (optimizer, gradient norm), and for each step.
    """
    return calibrate(engine, Measured.load(STORE))


def predictions(case: Case, runs: Sequence[Run], model: Path) -> dict[str, float]:
    return {
        run.variant.name: predict(case, run, model)
        for run in runs
        if "again" not in run.variant.name
    }


def predicted_anew(name: str, file: Path) -> list[Row]:
    """Return the rows of a case in a results file, with its step times predicted again.

    The measured steps stay as they are. Predictions are made by simulation, as when the case was
    measured.

    Args:
        name: A key of CASES.
        file: The results file.
    """
    case = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        model, runs = _prepared(case, Path(directory))
        predicted = predictions(case, runs, model)
    rows = [row for row in kept_rows(file) if row.case == name and "predict" not in row.metric]
    if not rows:
        tell(f"stage_links.py: {file} has no case {name!r} to predict anew; measure it first")
        raise SystemExit(2)
    measured = {
        row.metric.removeprefix("step "): row.value
        for row in rows
        if row.metric.startswith("step ")
    }
    # The predictions come before the measured steps, as in measured_anew().
    index = next(number for number, row in enumerate(rows) if row.metric.startswith("step "))
    return [*rows[:index], *prediction_rows(name, measured, predicted), *rows[index:]]


def predict(case: Case, run: Run, model_file: Path) -> float:
    """Return the predicted seconds of a step.

    Args:
        case: The pipeline job.
        run: Its schedule, and the cluster file with the stage link.
        model_file: File of the model, for the planner.
    """
    options, model = Options(inflight=INFLIGHT[run.schedule]), load_model(str(model_file))
    return predicted_step(
        case.engine,
        run.variant.spec,
        model,
        Sizes(pipeline=case.stages),
        forward_s(HIDDEN, SEQUENCE, case.flops),
        options,
    )


def predicted_step(
    engine: str,
    spec: SiteSpec,
    model: Model,
    sizes: Sizes,
    block_forward_s: float,
    options: Options,
    cut: bool = True,
    tied: bool = True,
) -> float:
    """Return the predicted seconds of a step under holmes.

    The step is simulated for the plan that holmes makes, with the networks of the cluster file and
    the CPU seconds of the engine's software, which were fitted to other runs.

    Args:
        engine: "deepspeed" or "megatron".
        spec: The clusters.
        model: The model, with the costs of its layers.
        sizes: Parallel sizes.
        block_forward_s: Seconds of the forward pass of a block.
        options: Options of holmes, such as the micro-batches in flight.
        cut: Whether each tensor-parallel rank sends only a slice of an activation between clusters.
        tied: Whether gradients of tied weights are reduced hierarchically.
    """
    site = site_from_spec(spec)
    # The lab starts nodes of both clusters in turn, and a plan depends on that order.
    launch_order = tuple(site.node_by_name[name] for name in interleave(spec))
    plan = build_plan(replace(site, nodes=launch_order), sizes, model=model, options=options)
    costs = even_costs(
        block_forward_s,
        layers=model.layers,
        stages=plan.sizes.pipeline,
        micro_batches=model.micro_batches,
    )
    block_s, parameter_s, step_s = _overheads(engine)
    traffic = plan.traffic_of("sockets")  # gloo uses sockets
    overlap = "on" if all(reduction.overlap for reduction in traffic.reductions) else "off"
    execution = Execution(
        TRAITS[engine],
        in_flight=traffic.in_flight,
        overlap=overlap,
        block_s=block_s,
        cut=cut,
        tied=tied,
        parameter_s=parameter_s,
        step_s=step_s,
        cores=CORES,  # which all nodes of the lab share
        # A send ends when the kernel has the message, of which TCP keeps so many bytes.
        buffer_bytes=BUFFER_BYTES,
        # With gloo, a receiver tells the sender that it is ready. This small message waits behind
        # the receiver's last message on the connection.
        notices=True,
    )
    return simulate(site, plan.nodes, plan.sizes, model, execution, costs=costs).step_s


def prediction_rows(
    name: str, measured: dict[str, float], predicted: dict[str, float]
) -> list[Row]:
    """Return rows with predicted steps, and their errors.

    Args:
        name: Name of the case in the results.
        measured, predicted: Variant -> seconds of a step.
    """
    rows, errors = [], []
    for variant, seconds in predicted.items():
        error = seconds / measured[variant] - 1
        errors.append(abs(error))
        rows.append(
            Row.median(name, f"predicted step {variant}", [seconds], unit="s", emulated=True)
        )
        rows.append(
            Row.median(
                name,
                f"error of the prediction, {variant}",
                [error],
                unit="of the measured",
                emulated=True,
            )
        )
    return [
        *rows,
        Row.of(
            name,
            "worst error of the predictions",
            max(errors),
            unit="of the measured",
            spread=(min(errors), max(errors)),
            emulated=True,
            target="<= 0.1",
        ),
    ]


def main() -> int:
    """Measure pipeline jobs over slow and fast links, and print and write the table of results.

    With --predict nothing is measured: the predictions in the results file (--json FILE) are
    computed again. Rows of other cases in this file are kept.
    """
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    arguments.add_argument(
        "--predict", action="store_true", help="measure nothing: predict anew what FILE has"
    )
    args = arguments.parse_args()
    names = chosen_cases(args.cases, CASES)
    measure = (
        partial(predicted_anew, file=args.json)
        if args.predict
        else partial(measured_anew, args.repetitions)
    )
    rows = [row for name in names for row in measure(name)]
    return finish(
        [*kept_rows(args.json, names), *rows],
        args.json,
        "Stage links between clusters (emulated accelerator)",
    )


if __name__ == "__main__":
    sys.exit(main())

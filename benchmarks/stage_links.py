"""Pipeline stage links that cross: a step with a slow stage link against the same with a free one,
with and without holmes's stage links.

    python benchmarks/stage_links.py --json FILE [--cases "deepspeed 8,..."] [--repetitions 3] [--predict]

DeepSpeed's pipeline engine and megatron-core's 1F1B on 2 + 2 emulated nodes, two stages of 64 ms a
micro-batch (layers sleep as long as an accelerator of 2.4 GFLOP/s would compute). Ethernet between the stages
takes half of that for one activation of 32 KiB (7.4 Mb/s), or next to nothing (1 Gb/s); "latency": 60 ms a
micro-batch and 20 ms each way, or none; "one cluster": a stage link that nothing has to hide, as it
is; "unequal":
four stages of 2, 2, 1 and 1 layers, a third as fast, six micro-batches and 20 ms: a step so short that as
many in flight as the mean stage's pace needs are quicker than the slowest's, here 1F1B's own numbers ("own":
--holmes-inflight 0). "engine": --holmes-inflight off, the engine's own schedule with sends that block;
"holmes": as many micro-batches in flight as hide the stage link. Alternating; medians of the
repetitions' medians.
Exposed: seconds of a step that a rank waits for its neighbours, by holmes's telemetry, in excess of the same
with a free stage link (where the pipeline fills, everybody waits).

Predicted: planner/simulate/step.py for what cluster.toml says of the networks, with the CPU seconds that the
calibration of benchmarks/prediction_links.py found, which was made on the same machine. Rows of other cases
that FILE has already are kept, so that it can be made in parts; --predict measures nothing and predicts anew
what FILE has.
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
from harness import Row, chosen, finish, kept, parser, tell, toml
from holmes_lab import interleave
from holmes_lab.compare import Series, Variant, compare, max_loss_difference
from prediction import CORES, TRAITS, Measured, calibrate
from prediction_links import STORE
from two_clusters import ratio_row, step_rows

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
ONE = toml("a ib 1Gb/s a[0-3]", ethernet="1Gb/s")
FLOPS = 2.39e9
#: What a TCP connection keeps of a message whose sender goes on (gloo's send ends when the kernel has all of
#: it).
BUFFER_BYTES = 64 * 2**10
INFLIGHT = {"holmes": "auto", "engine": "off", "own": "0"}
#: Engine -> its example, the flag for stages, what the emulated accelerator paces.
ENGINES = {
    "deepspeed": ("deepspeed_pipeline", "--stages", {"classes": ["Block"]}),
    "megatron": ("megatron_core", "--pipeline", {"classes": ["TransformerLayer"], "layout": "sbh"}),
}


@dataclass(frozen=True)
class Case:
    """stage links: name -> cluster.toml, the free one first. target: of a step with the slow stage
    link over one with the free."""

    engine: str
    micro_batches: int
    stage_links: dict[str, str]
    target: str = ""
    flops: float = FLOPS
    steps: int = 10
    stages: int = 2
    layout: tuple[str, ...] = ()


def two(ethernet: str) -> str:
    return toml("a ib 1Gb/s a[0-1]", "b roce 1Gb/s b[0-1]", ethernet=ethernet)


def _cases() -> dict[str, Case]:
    half = {"free": two("1Gb/s"), "slow": two("7.4Mb/s")}
    far = {
        name: two("250Mb/s") + LINK.format(latency=latency)
        for name, latency in (("free", "0.1ms"), ("slow", "20ms"))
    }
    cases = {}
    for engine in ENGINES:
        layout = ("--layout", "Ett|tt|t|tL") if engine == "megatron" else ()
        cases[f"{engine} unequal"] = Case(engine, 6, far, flops=FLOPS / 3, stages=4, layout=layout)
        cases |= {
            f"{engine} 8": Case(engine, 8, half, "<= 1.15"),
            f"{engine} 16": Case(engine, 16, half, "<= 1.08"),
        }
        cases[f"{engine} one cluster"] = Case(engine, 8, {"as it is": ONE}, steps=24)
    return cases | {"deepspeed latency": Case("deepspeed", 16, far, "<= 1.15", FLOPS * 64 / 60)}


CASES = _cases()


@dataclass(frozen=True)
class Run:
    """One way to run a case. how: a key of INFLIGHT; file: its cluster.toml; telemetry: a folder."""

    variant: Variant
    how: str
    file: Path
    telemetry: Path


def _prepared(case: Case, folder: Path) -> tuple[Path, list[Run]]:
    """The model's file, written into the folder, and the runs with theirs."""
    model, runs = folder / "model.toml", []
    model.write_text(MODEL_TOML.format(micro_batches=case.micro_batches, flops=case.flops))
    for stage_link, text in case.stage_links.items():
        file = folder / f"{stage_link}.toml"
        file.write_text(text)
        spec = load_spec(file)
        names = {"holmes": "holmes", "engine": "engine"}
        names |= {} if len(case.stage_links) > 1 else {"again": "engine"}
        names |= {"own": "own"} if case.stages > 2 else {}
        for label, how in names.items():
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
            flags += ("--holmes-inflight", INFLIGHT[how])
            runs.append(Run(Variant(name, spec, interleave(spec), flags), how, file, telemetry))
    return model, runs


def measured_anew(repetitions: int, name: str) -> list[Row]:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        model, runs = _prepared(case, Path(directory))
        example, stages, paced = ENGINES[case.engine]
        train = examples() / example / "train.py"
        script = [
            str(train),
            *MODEL,
            stages,
            str(case.stages),
            "--micro-batches",
            str(case.micro_batches),
            *case.layout,
        ]
        started, total = iter(range(1, repetitions * len(runs) + 1)), repetitions * len(runs)
        series = compare(
            [run.variant for run in runs],
            script,
            repetitions=repetitions,
            steps=case.steps,
            skip=4,
            accelerator={"flops": case.flops, **paced},
            on_run=lambda variant, _: tell(f"{name}: run {next(started)} of {total}: {variant}"),
        )
        exposed = {run.variant.name: _pipeline_s(run.telemetry) for run in runs}
        predicted = predictions(case, runs, model)
    return [
        *_ratios(name, case, series, exposed),
        *prediction_rows(name, medians(series), predicted),
        *step_rows(name, series),
    ]


def medians(by_variant: dict[str, Series]) -> dict[str, float]:
    return {name: series.median for name, series in by_variant.items()}


def _pipeline_s(telemetry: Path) -> float:
    """Seconds of a step that a rank waited in the pipeline's operations, mean of all ranks."""
    return sum(row.exposed_s for row in summarize(load(telemetry)).rows if row.kind == "pipeline")


def _ratios(
    name: str, case: Case, series: dict[str, Series], exposed: dict[str, float]
) -> list[Row]:
    if len(case.stage_links) == 1:
        engine, again = series["engine, as it is"], series["again, as it is"]
        ours = series["holmes, as it is"]
        both = statistics.median([*engine.medians, *again.medians])
        pairs = [
            2 * a / (b + c) - 1 for a, b, c in zip(ours.medians, engine.medians, again.medians)
        ]
        cost = Row.of(
            name,
            "what holmes's stage links add to a step",
            ours.median / both - 1,
            "of a step",
            (min(pairs), max(pairs)),
            True,
            "<= 0.005",
            max(engine.busy, again.busy, ours.busy),
        )
        noise = abs(again.median / engine.median - 1)
        difference = max_loss_difference(engine, ours)
        return [
            cost,
            Row.median(name, "A/A difference (noise)", [noise], "of a step", True),
            Row.median(name, "largest loss difference", [difference], "nats", False, "<= 1e-6"),
        ]
    rows = [
        ratio_row(
            name,
            f"{how}: slow stage link : free stage link",
            series[f"{how}, slow"],
            series[f"{how}, free"],
            case.target if how == "holmes" else "",
        )
        for how in ("holmes", "engine")
    ]
    others = [how for how in ("engine", "own") if f"{how}, slow" in series]
    rows += [
        ratio_row(
            name,
            f"slow stage link, {how} : holmes",
            series[f"{how}, slow"],
            series["holmes, slow"],
            "",
        )
        for how in others
    ]
    extra = {how: exposed[f"{how}, slow"] - exposed[f"{how}, free"] for how in ("holmes", "engine")}
    rows += [
        Row.median(name, f"exposed by the slow stage link, {how}", [extra[how]], "s", True)
        for how in extra
    ]
    rows.append(
        Row.median(
            name,
            "exposed by the slow stage link, holmes : engine",
            [extra["holmes"] / extra["engine"]],
            "x",
            True,
            "<= 0.25" if case.target else "",
        )
    )
    difference = max(
        max_loss_difference(series[f"{how}, slow"], series["holmes, slow"]) for how in others
    )
    return [
        *rows,
        Row.median(name, "largest loss difference", [difference], "nats", False, "<= 1e-6"),
    ]


# --------------------------------------------------------------------------- prediction


@cache
def _overheads(engine: str) -> tuple[float, float, float]:
    return calibrate(engine, Measured.load(STORE))


def predictions(case: Case, runs: Sequence[Run], model: Path) -> dict[str, float]:
    return {
        run.variant.name: predict(case, run, model)
        for run in runs
        if "again" not in run.variant.name
    }


def predicted_anew(name: str, file: Path) -> list[Row]:
    """The case's rows in the file, with other predictions."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        model, runs = _prepared(case, Path(directory))
        predicted = predictions(case, runs, model)
    rows = [row for row in kept(file) if row.case == name and "predict" not in row.metric]
    if not rows:
        tell(f"stage_links.py: {file} has no case {name!r} to predict anew; measure it first")
        raise SystemExit(2)
    measured = {
        row.metric.removeprefix("step "): row.value
        for row in rows
        if row.metric.startswith("step ")
    }
    place = next(number for number, row in enumerate(rows) if row.metric.startswith("step "))
    return [*rows[:place], *prediction_rows(name, measured, predicted), *rows[place:]]


def predict(case: Case, run: Run, model_file: Path) -> float:
    """Seconds of a step."""
    options, model = Options(inflight=INFLIGHT[run.how]), load_model(str(model_file))
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
    """Seconds of a step under holmes. block_forward_s: of a block's forward pass; cut, tied: see
    Execution."""
    site = site_from_spec(spec)
    launched = replace(site, nodes=tuple(site.node_by_name[name] for name in interleave(spec)))
    plan = build_plan(launched, sizes, model=model, options=options)
    costs = even_costs(block_forward_s, model.layers, plan.sizes.pipeline, model.micro_batches)
    block_s, parameter_s, step_s = _overheads(engine)
    traffic = plan.traffic_of("sockets")
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
        cores=CORES,
        buffer_bytes=BUFFER_BYTES,
        notices=True,
    )
    return simulate(site, plan.nodes, plan.sizes, model, execution, costs=costs).step_s


def prediction_rows(
    name: str, measured: dict[str, float], predicted: dict[str, float]
) -> list[Row]:
    """measured, predicted: seconds of a step by variant."""
    rows, errors = [], []
    for variant, seconds in predicted.items():
        error = seconds / measured[variant] - 1
        errors.append(abs(error))
        rows.append(Row.median(name, f"predicted step {variant}", [seconds], "s", True))
        rows.append(
            Row.median(
                name, f"error of the prediction, {variant}", [error], "of the measured", True
            )
        )
    return [
        *rows,
        Row.of(
            name,
            "worst error of the predictions",
            max(errors),
            "of the measured",
            (min(errors), max(errors)),
            True,
            "<= 0.1",
        ),
    ]


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    arguments.add_argument(
        "--predict", action="store_true", help="measure nothing: predict anew what FILE has"
    )
    args = arguments.parse_args()
    names = chosen(args.cases, CASES)
    measure = (
        partial(predicted_anew, file=args.json)
        if args.predict
        else partial(measured_anew, args.repetitions)
    )
    rows = [row for name in names for row in measure(name)]
    return finish(
        [*kept(args.json, names), *rows],
        args.json,
        "Stage links between clusters (emulated accelerator)",
    )


if __name__ == "__main__":
    sys.exit(main())

"""Compares partitions of the layers (uniform, by speed, balanced) with their predictions on unequal clusters.

    python benchmarks/partition.py --json FILE [--cells "NIC 3:1/;GPU 1.5:1/8 layers/m4"] [--merge FILE]
                                   [--predict]

"By speed" is the method of the Holmes paper. The lab has two clusters of two nodes, DeepSpeed's pipeline
engine (pipeline 2 x data 2) and an emulated accelerator. The cases:

    NIC 3:1             480 and 160 Mb/s inside the clusters. The reduction follows the last backward pass.
    NIC 3:1, overlap    the same with --holmes-overlap on
    GPU 1.5:1           2 Gb/s in both clusters. The GPUs of one cluster are 1.5 times as fast. There are at
                        least 4 micro-batches: with 2, half of a step fills the pipeline, and no partition
                        can gain more than a factor of 1.10 with free networks.

Each partition runs from a plan.json. Equal partitions are one run. Three predictions are compared with
the measured step:

    (no name)       simulated, with the CPU seconds that the calibration of prediction.py found for
                    DeepSpeed on the same kind of machine (results/prediction_measured.json, without these
                    cases)
    numbers alone   the prediction of the plan, from the GPU's FLOP/s and the emulated rates. It does not
                    contain the CPU work of the software.
    by profile      from a profile of the uniform partition at the middle number of micro-batches, as
                    `holmes tune`

--predict measures nothing, and predicts the rows of FILE anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import prediction
from emulated import forward_s
from harness import Row, finish, kept, parser, tell
from holmes_lab import interleave
from holmes_lab.compare import Series, Variant, compare, max_loss_difference
from prediction import CORES, TRAITS, Measured
from stage_links import BUFFER_BYTES

from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.stages import StageCosts, predict
from holmes_ext.plan.partition import METHODS
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.profile import Profile, load_profile, measured_costs
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.step import simulate
from holmes_ext.samples import examples

FLOPS = 1.43e9  # a block of hidden 192 on 16 tokens: 10 ms forward
MODELS = {"8 layers": (8, 192), "12 layers": (12, 192), "16 layers": (16, 160)}  # layers, hidden
SEQUENCE, HEADS = 16, 4
PROFILED = 3  # steps
NOISE = 0.03  # two runs of the same job differ by less (the A/A rows say by how much)


@dataclass(frozen=True)
class Case:
    """Two clusters of two nodes that differ in their networks or GPUs."""

    name: str
    rates: tuple[int, int]  # Mb/s inside the clusters a and b
    micro_batches: tuple[int, ...] = (
        2,
        4,
        8,
    )  # the second number also runs twice, to measure the noise
    overlap: bool = False  # value of --holmes-overlap
    speed: float = 1.0  # of the GPUs of b, in units of those of a


CASES = (
    Case("NIC 3:1", (480, 160)),
    Case("NIC 3:1, overlap", (480, 160), overlap=True),
    Case("GPU 1.5:1", (2000, 2000), (4, 6, 8), speed=1 / 1.5),
)


def cluster_toml(case: Case) -> str:
    """Return the text of the cluster.toml of a case."""
    head = 'version = 2\n[ethernet]\nrate = "100Mb/s"\n'
    kinds = zip("ab", ("ib", "roce"), case.rates)
    return head + "".join(
        f'[[cluster]]\nname = "{name}"\nkind = "{kind}"\nrate = "{rate}Mb/s"\nnodes = '
        f'["{name}[0-1]"]\nprocesses = 1\n'
        for name, kind, rate in kinds
    )


def model_of(case: Case, layers: int, hidden: int, micro_batches: int) -> Model:
    """Return the model with the GPUs of a case.

    The GPUs of cluster b are `case.speed` times as fast as those of cluster a.
    """
    return Model(
        layers=layers,
        hidden=hidden,
        heads=HEADS,
        sequence=SEQUENCE,
        vocabulary=256,
        tied=False,
        micro_batches=micro_batches,
        activation_width=4,
        state_bytes=16,
        gpu=Gpu(FLOPS),
        gpus={"b": Gpu(FLOPS * case.speed)},
    )


@dataclass
class Cell:
    """One model and number of micro-batches of a case, with its plans and runs."""

    title: str
    plans: dict[str, tuple[Plan, tuple[int, ...]]]  # method -> its plan and layers of each stage
    variants: dict[tuple[int, ...], Variant]  # layers of each stage -> the run
    again: Variant | None  # a second run of the first variant, to measure the noise
    model: Model


def plan_of(case: Case, model: Model, method: str, spec: SiteSpec) -> tuple[Plan, tuple[int, ...]]:
    """Return the plan by one method of partitioning, and the layers of its stages.

    Args:
        method: "uniform", "speed" or "balanced".
    """
    plan = build_plan(
        site_from_spec(spec),
        Sizes(pipeline=2),
        partition=method,
        model=model,
        overlap=case.overlap,
    )
    return plan, plan.stage_layers or (model.layers // 2,) * 2


def cell_of(case: Case, name: str, micro_batches: int, spec: SiteSpec, directory: Path) -> Cell:
    """Make the plans of all methods for a model, write them, and return them with the variants to run.

    Methods with the same layers of the stages share a variant.

    Args:
        name: Name of the model, a key of MODELS.
        spec: The clusters of the case.
        directory: For the files of the plans.
    """
    title = title_of(case, name, micro_batches)
    model = model_of(case, *MODELS[name], micro_batches)
    flags = flags_of(case, name, micro_batches, directory)
    plans, variants = {}, {}
    for method in METHODS:
        plan, split = plans[method] = plan_of(case, model, method, spec)
        if split not in variants:
            file = directory / f"{name}-{micro_batches}-{method}.json"
            plan.save(file)
            variants[split] = Variant(
                f"{title} {method}",
                spec,
                interleave(spec),
                flags=(*flags, "--holmes-plan", str(file)),
            )
    first = next(iter(variants.values()))
    again = (
        Variant(f"{title} again", spec, first.order, flags=first.flags)
        if micro_batches == case.micro_batches[1]
        else None
    )
    return Cell(title, plans=plans, variants=variants, again=again, model=model)


def flags_of(case: Case, name: str, micro_batches: int, directory: Path) -> tuple[str, ...]:
    """Return the flags of a run of the training script, without those of a plan.

    Args:
        name: Name of the model, a key of MODELS.
        directory: Folder that has the cluster.toml.
    """
    layers, hidden = MODELS[name]
    return (
        "--layers",
        str(layers),
        "--hidden",
        str(hidden),
        "--micro-batches",
        str(micro_batches),
        "--holmes",
        "--holmes-cluster",
        str(directory / "cluster.toml"),
        "--holmes-overlap",
        "on" if case.overlap else "off",
    )


def profiled(case: Case, name: str, spec: SiteSpec, directory: Path) -> Variant:
    """Return the run that measures a profile, without overlap as in `holmes tune`.

    The profile is written to profile_file(directory, name).

    Args:
        name: Name of the model, a key of MODELS.
        spec: The clusters of the case.
    """
    flags = flags_of(replace(case, overlap=False), name, case.micro_batches[1], directory)
    more = (
        "--holmes-sizes",
        "pipeline=2",
        "--holmes-profile",
        f"{PROFILED},{profile_file(directory, name)}",
    )
    return Variant(f"{case.name}/{name} profiled", spec, interleave(spec), flags=(*flags, *more))


def profile_file(directory: Path, name: str) -> Path:
    return directory / f"{name}-profile.json"


def title_of(case: Case, name: str, micro_batches: int) -> str:
    return f"{case.name}/{name}/m{micro_batches}"


def run_case(case: Case, wanted: list[tuple[str, int]], steps: int, skip: int) -> list[Row]:
    """Run some cells of one case in a single lab, because starting a lab takes long.

    Args:
        wanted: Pairs (name of a model, number of micro-batches).
        skip: First steps that are not measured.
    """
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        spec = case_spec(case, directory)
        names = list(dict.fromkeys(name for name, _ in wanted))
        cells = [cell_of(case, name, count, spec, directory) for name, count in wanted]
        runs = [profiled(case, name, spec, directory) for name in names]
        runs += [
            variant
            for cell in cells
            for variant in (*cell.variants.values(), *filter(None, [cell.again]))
        ]
        series = measure(case, runs, steps, skip)
        profiles = {name: load_profile(profile_file(directory, name)) for name in names}
        return [
            row
            for cell, (name, count) in zip(cells, wanted)
            for row in rows_of(case, cell, series, replace(profiles[name], micro_batches=count))
        ]


def measure(case: Case, runs: list[Variant], steps: int, skip: int) -> dict[str, Series]:
    """Run the variants in a lab, and return their measurements by name.

    Args:
        runs: The variants. Each runs once.
        steps: Training steps of a run.
        skip: First steps that are not measured.
    """
    script = [
        str(examples() / "deepspeed_pipeline" / "train.py"),
        "--stages",
        "2",
        "--heads",
        str(HEADS),
        "--sequence",
        str(SEQUENCE),
        "--micro-batch",
        "1",
    ]
    started = iter(range(1, len(runs) + 1))
    return compare(
        runs,
        script,
        repetitions=1,
        steps=steps,
        skip=skip,
        accelerator={"flops": FLOPS, "classes": ["Block"], "speed": {"b": case.speed}},
        on_run=lambda name, _: tell(f"run {next(started)} of {len(runs)}: {name}"),
    )


def rows_of(case: Case, cell: Cell, series: dict[str, Series], profile: Profile) -> list[Row]:
    """Return the rows of results of a cell (one model and number of micro-batches).

    Args:
        series: Measurements by the name of the variant.
        profile: Of the uniform partition, with the cell's number of micro-batches.
    """
    by_method = {
        method: series[cell.variants[split].name] for method, (_, split) in cell.plans.items()
    }
    rows = []
    for method, (plan, split) in cell.plans.items():
        rows += _measured_rows(
            cell.title, method, split=split, series=by_method[method], uniform=by_method["uniform"]
        )
        rows += error_rows(
            cell.title,
            method,
            measured=by_method[method].median,
            predictions={
                "": with_software(case, cell.model, plan, split),
                ", numbers alone": plan.predicted["step_seconds"],
                " by profile": by_profile(case, plan, split, profile),
            },
        )
    rows += _comparisons(cell.title, case, by_method)
    if cell.again is not None:
        noise = abs(series[cell.again.name].median / by_method["uniform"].median - 1)
        rows.append(
            Row.median(
                cell.title,
                "A/A difference (noise)",
                [noise],
                unit="of a step",
                emulated=True,
            )
        )
    return rows


@cache
def _overheads() -> tuple[float, float, float]:
    """Return the CPU seconds of a block's pass, of a parameter and of a step, fitted for DeepSpeed."""
    return prediction.calibrate("deepspeed", Measured.load(prediction.STORE))


def with_software(case: Case, model: Model, plan: Plan, split: tuple[int, ...]) -> float:
    """Return the simulated seconds of a step, including the CPU work of the software.

    Args:
        split: Layers of each stage.
    """
    block_s, parameter_s, step_s = _overheads()
    forward = forward_s(model.hidden, SEQUENCE, FLOPS)
    # Factor of the pass times of the two stages. The first node is in stage 0, the last one in stage 1.
    slower = [
        1 / case.speed if node.startswith("b") else 1.0 for node in (plan.nodes[0], plan.nodes[-1])
    ]
    nothing = ((0.0,) * (model.layers + 2),) * 2
    # By stage: seconds of the embedding, of each block, and of the output layer.
    forward_rows, backward_rows = (
        tuple((0.0, *[passes * forward * times] * model.layers, 0.0) for times in slower)
        for passes in (1, 2)  # a backward pass takes twice as long as a forward pass
    )
    costs = StageCosts(
        forward_s=forward_rows,
        backward_s=backward_rows,
        reduction_s=nothing,
        transfer_s=nothing,
        micro_batches=model.micro_batches,
    )
    run = Execution(
        TRAITS["deepspeed"],
        stage_layers=split,
        in_flight=plan.traffic_of("sockets").in_flight,
        overlap="on" if case.overlap else "off",
        block_s=block_s,
        parameter_s=parameter_s,
        step_s=step_s,
        cores=CORES,
        buffer_bytes=BUFFER_BYTES,
        notices=True,
    )
    return simulate(case_site(case), plan.nodes, plan.sizes, model, run, costs=costs).step_s


def case_spec(case: Case, directory: Path) -> SiteSpec:
    file = directory / "cluster.toml"
    file.write_text(cluster_toml(case))
    return load_spec(file)


@cache
def case_site(case: Case) -> Site:
    with tempfile.TemporaryDirectory() as directory:
        return site_from_spec(case_spec(case, Path(directory)))


def predicted_anew(file: Path) -> list[Row]:
    """Return the rows of a file with new predictions.

    Predictions by profile stay as they are, because they need the profile.
    """
    rows = [
        row
        for row in kept(file)
        if "predict" not in row.metric or row.metric.endswith("by profile")
    ]
    # The metric is "step METHOD LAYERS", for example "step balanced 5+3".
    measured = {
        (row.case, row.metric.split()[1]): row for row in rows if row.metric.startswith("step ")
    }
    more: dict[Row, list[Row]] = {}  # row of a measured step -> rows of its predictions
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            spec = case_spec(case, Path(directory))
            for name, size in MODELS.items():
                for count in case.micro_batches:
                    title, model = title_of(case, name, count), model_of(case, *size, count)
                    for method in METHODS:
                        row = measured[title, method]
                        plan, _ = plan_of(case, model, method, spec)
                        split = tuple(map(int, row.metric.split()[2].split("+")))
                        more[row] = error_rows(
                            title,
                            method,
                            measured=row.value,
                            predictions={
                                "": with_software(case, model, plan, split),
                                ", numbers alone": plan.predicted["step_seconds"],
                            },
                        )
    return [shown for row in rows for shown in (row, *more.get(row, ()))]


def by_profile(case: Case, plan: Plan, split: tuple[int, ...], profile: Profile) -> float:
    """Return the seconds of a step, predicted from the profile of the uniform partition.

    Args:
        split: Layers of each stage.
    """
    network = Network(Site.from_dict(profile.site))
    placement = network.placement(plan.nodes, profile.sizes)
    clusters = [network.clusters(content) for content in placement.stages]
    return predict(measured_costs(profile, clusters, case.overlap), split).step_s


def _measured_rows(
    title: str, method: str, split: tuple[int, ...], series: Series, uniform: Series
) -> list[Row]:
    """Return rows with the step time of a partition, and its loss difference to the uniform partition.

    Args:
        title: Name of the case in the results.
        method: The method of partitioning.
        split: Layers of each stage.
        series: Measurements of the partition, from one run.
        uniform: Measurements of the uniform partition.
    """
    (run,) = series.steps
    loss = max_loss_difference(uniform, series)
    return [
        Row.of(
            title,
            f"step {method} {'+'.join(map(str, split))}",
            series.median,
            unit="s",
            spread=(min(run), max(run)),
            emulated=series.emulated,
        ),
        Row.median(
            title,
            f"loss difference {method}",
            [loss],
            unit="nats",
            emulated=False,
            target="<= 1e-6",
        ),
    ]


def error_rows(
    title: str, method: str, measured: float, predictions: dict[str, float]
) -> list[Row]:
    """Return rows with predicted steps and their errors.

    Predictions from numbers alone have no target, because they do not contain the CPU work of the software.

    Args:
        title: Name of the case in the results.
        method: The method of partitioning.
        measured: The measured step, in seconds.
        predictions: Kind of prediction (see the module docstring) -> seconds.
    """
    rows = []
    for what, predicted in predictions.items():
        error = predicted / measured - 1
        target = "" if "alone" in what else "<= 0.05"
        rows += [
            Row.median(
                title,
                f"predicted {method}{what}",
                [predicted],
                unit="s",
                emulated=False,
            ),
            Row.of(
                title,
                f"prediction error {method}{what}",
                abs(error),
                unit="of the step",
                spread=(error, error),
                emulated=True,
                target=target,
            ),
        ]
    return rows


def _comparisons(title: str, case: Case, of: dict[str, Series]) -> list[Row]:
    """Return rows with the ratios of the step times of two methods.

    Args:
        title: Name of the case in the results.
        of: Method -> measurements.
    """
    rows = []
    for better, worse in (("speed", "uniform"), ("balanced", "speed"), ("balanced", "uniform")):
        ratio = of[worse].median / of[better].median
        target = (
            ">= 1.1"
            if case.speed != 1 and worse == "uniform" and better == "balanced"
            else f">= {1 - NOISE}"
        )
        rows.append(
            Row.median(
                title,
                f"{better} : {worse}",
                [ratio],
                unit="x",
                emulated=True,
                target=target,
            )
        )
    return rows


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--cells", default="", metavar="TEXT;...", help="only cells whose name begins so"
    )
    arguments.add_argument(
        "--merge",
        type=Path,
        metavar="FILE",
        help="rows of an earlier part, kept where this one has none",
    )
    arguments.add_argument(
        "--predict", action="store_true", help="measure nothing: predict FILE's rows anew"
    )
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--skip", type=int, default=2, help="steps that are not measured")
    args = arguments.parse_args()
    title = "Partitions: measured and predicted (step times on the emulated accelerator)"
    if args.predict:
        return finish(
            predicted_anew(args.json), args.json, title
        )  # on the machine that measured them
    wanted = [text for text in args.cells.split(";") if text]
    rows: list[Row] = []
    for case in CASES:
        cells = [(name, count) for name in MODELS for count in case.micro_batches]
        cells = [
            cell
            for cell in cells
            if not wanted or any(title_of(case, *cell).startswith(text) for text in wanted)
        ]
        if cells:
            rows += run_case(case, cells, args.steps, args.skip)
    done = {row.case for row in rows}
    if args.merge and args.merge.exists():
        earlier = json.loads(args.merge.read_text())["rows"]
        rows = [Row.from_dict(row) for row in earlier if row["scene"] not in done] + rows
    return finish(rows, args.json, title)


if __name__ == "__main__":
    sys.exit(main())

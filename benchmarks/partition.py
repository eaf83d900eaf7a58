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

    (no name)       simulated, with the CPU time of DeepSpeed's code (Python, torch's operators,
                    gloo). It was fitted to other runs on the same kind of machine
                    (results/prediction_measured.json).
    numbers alone   the prediction of the plan, from the GPU's FLOP/s and the emulated rates alone.
                    It does not contain the CPU time of DeepSpeed's code.
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
from typing import NamedTuple

import prediction
from emulated import forward_s
from harness import Row, finish, kept_rows, parser, tell
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
PROFILED = 3  # steps of which `--holmes-profile 3,FILE` measures the times
NOISE = 0.03  # two runs of the same job differ by less (the A/A rows say by how much)


@dataclass(frozen=True)
class Case:
    """Two clusters of two nodes that differ in their networks or GPUs."""

    name: str
    rates: tuple[int, int]  # Mb/s inside the clusters a and b
    #: Numbers of micro-batches in a step. A profile is measured with the middle one, and the noise,
    #: too.
    micro_batches: tuple[int, int, int] = (2, 4, 8)
    overlap: bool = False  # value of --holmes-overlap
    speed: float = 1.0  # of the GPUs of b, in units of those of a

    @property
    def middle(self) -> int:
        """Number of micro-batches with which the times of the layers and the noise are measured."""
        return self.micro_batches[1]


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
    """Return the planner's description of a GPT and of the GPUs that train it.

    The planner computes the costs of the layers from it. A GPU of cluster a has FLOPS FLOP/s. A GPU
    of cluster b is `case.speed` times as fast.

    Args:
        case: The clusters.
        layers: Transformer blocks.
        hidden: Hidden size.
        micro_batches: Of a step.
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


class PartitionPlan(NamedTuple):
    """Plan with two pipeline stages, and the number of layers on each stage."""

    plan: Plan
    stage_layers: tuple[int, ...]


@dataclass
class Configuration:
    """One model and number of micro-batches, with the plan and the run of each partitioning method.

    A method of partitioning divides the model's layers among the stages. Methods with the same
    result share a run.
    """

    title: str  # its name in the results
    plans: dict[str, PartitionPlan]  # by method of partitioning
    variants: dict[tuple[int, ...], Variant]  # layers of each stage -> the run
    #: A second run of the first variant, to measure the noise; None: no such run.
    again: Variant | None
    model: Model


def plan_of(case: Case, model: Model, method: str, spec: SiteSpec) -> PartitionPlan:
    """Return a plan with 2 pipeline stages, for one method of dividing the layers among them.

    Args:
        case: `overlap`: whether gradient reductions overlap with the backward pass.
        model: The model, with the costs of its layers.
        method: "uniform": equally many layers. "speed": layers in proportion to the speed of each
            stage. "balanced": the division with the shortest predicted step.
        spec: The clusters of the case.
    """
    plan = build_plan(
        site_from_spec(spec),
        Sizes(pipeline=2),
        partition=method,
        model=model,
        overlap=case.overlap,
    )
    # plan.stage_layers is () if the stages have equally many layers: half of them each.
    return PartitionPlan(plan, plan.stage_layers or (model.layers // 2,) * 2)


def configuration_of(
    case: Case, name: str, micro_batches: int, spec: SiteSpec, directory: Path
) -> Configuration:
    """Make the plans and the measured runs for each method of dividing layers among the stages.

    Each plan is written to a file, which its run reads. Methods that give each stage the same
    layers share a run. With `case.middle` micro-batches, the first run is made twice: the
    difference is the noise of the measurements.

    Args:
        case: The clusters.
        name: Name of the model, a key of MODELS.
        micro_batches: Number of micro-batches in a step.
        spec: The clusters of the case.
        directory: For the files of the plans.
    """
    title = title_of(case, name, micro_batches)
    model = model_of(case, *MODELS[name], micro_batches)
    flags = flags_of(case, name, micro_batches, directory)
    plans, variants = {}, {}
    for method in METHODS:
        planned = plan_of(case, model, method, spec)
        plans[method] = planned
        if planned.stage_layers not in variants:
            file = directory / f"{name}-{micro_batches}-{method}.json"
            planned.plan.save(file)
            variants[planned.stage_layers] = Variant(
                f"{title} {method}",
                spec,
                interleave(spec),
                flags=(*flags, "--holmes-plan", str(file)),
            )
    first = next(iter(variants.values()))
    again = None
    if micro_batches == case.middle:
        again = Variant(f"{title} again", spec, first.order, flags=first.flags)
    return Configuration(title, plans=plans, variants=variants, again=again, model=model)


def flags_of(case: Case, name: str, micro_batches: int, directory: Path) -> tuple[str, ...]:
    """Return flags of the training script: model, micro-batches, clusters and overlap.

    The caller adds the flag with the plan (--holmes-plan) or the parallel sizes (--holmes-sizes).

    Args:
        case: The clusters, and whether gradient reductions overlap with the backward pass.
        name: Name of the model, a key of MODELS.
        micro_batches: Number of micro-batches in a step.
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


def profile_run(case: Case, name: str, spec: SiteSpec, directory: Path) -> Variant:
    """Return the run that measures the times of the layers (a profile).

    Both stages have equally many layers. A step has `case.middle` micro-batches, the middle one of
    the three numbers that the case measures. Gradient reductions do not overlap with the backward
    pass, as in `holmes tune`. The job writes the profile to profile_file(directory, name).

    Args:
        name: Name of the model, a key of MODELS.
        spec: The clusters of the case.
    """
    flags = flags_of(replace(case, overlap=False), name, case.middle, directory)
    profile_flags = (
        "--holmes-sizes",
        "pipeline=2",
        "--holmes-profile",
        f"{PROFILED},{profile_file(directory, name)}",  # number of steps, file
    )
    return Variant(
        f"{case.name}/{name} profiled", spec, interleave(spec), flags=(*flags, *profile_flags)
    )


def profile_file(directory: Path, name: str) -> Path:
    return directory / f"{name}-profile.json"


def title_of(case: Case, name: str, micro_batches: int) -> str:
    return f"{case.name}/{name}/m{micro_batches}"


def run_case(case: Case, wanted: list[tuple[str, int]], steps: int, skip: int) -> list[Row]:
    """Measure some configurations of a case, and return the rows of results.

    For each model, a further run measures the times of its layers (a profile), from which steps are
    also predicted. All runs use the same emulated nodes, because starting nodes takes long.

    Args:
        wanted: The configurations, as pairs (name of a model, number of micro-batches).
        steps: Training steps of a run.
        skip: First steps that are not measured.
    """
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        spec = case_spec(case, directory)
        names = list(dict.fromkeys(name for name, _ in wanted))
        configurations = [
            configuration_of(case, name, count, spec, directory) for name, count in wanted
        ]
        runs = [profile_run(case, name, spec, directory) for name in names]
        for configuration in configurations:
            runs += configuration.variants.values()
            # A second run of the first variant shows the noise. Only the configuration with the
            # middle number of micro-batches has it (None: not measured).
            if configuration.again is not None:
                runs.append(configuration.again)
        series = measure(case, runs, steps, skip)
        # The files that the profiled runs have written.
        profiles = {name: load_profile(profile_file(directory, name)) for name in names}
        rows: list[Row] = []
        for configuration, (name, count) in zip(configurations, wanted):
            profile = replace(profiles[name], micro_batches=count)
            rows += rows_of(case, configuration, series, profile)
        return rows


def measure(case: Case, runs: list[Variant], steps: int, skip: int) -> dict[str, Series]:
    """Run training jobs on the emulated clusters of a case, and return the measurements of each.

    Args:
        runs: The jobs. Each runs once.
        steps: Training steps of a run.
        skip: First steps that are not measured.

    Returns:
        Name of a job (Variant.name) -> its step times and losses.
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


def rows_of(
    case: Case, configuration: Configuration, series: dict[str, Series], profile: Profile
) -> list[Row]:
    """Return the rows of results of a configuration (one model and number of micro-batches).

    For each method of dividing the layers, there are the measured step and three predictions:

        predicted METHOD                   a simulation with the CPU time of DeepSpeed's code
        predicted METHOD, numbers alone    the plan's prediction, without this CPU time
        predicted METHOD by profile        from measured times of the layers

    Further rows have errors, ratios of the methods, and the noise.

    Args:
        case: The clusters.
        configuration: The model and the number of micro-batches, with the plans and runs.
        series: Measurements by the name of the variant.
        profile: Measured times of the layers, for the configuration's number of micro-batches.
    """
    by_method = {
        method: series[configuration.variants[planned.stage_layers].name]
        for method, planned in configuration.plans.items()
    }
    rows = []
    for method, planned in configuration.plans.items():
        plan, split = planned.plan, planned.stage_layers
        rows += _measured_rows(
            configuration.title,
            method,
            split=split,
            series=by_method[method],
            uniform=by_method["uniform"],
        )
        rows += error_rows(
            configuration.title,
            method,
            measured=by_method[method].median,
            predictions={
                "": simulate_with_cpu_time(case, configuration.model, plan, split),
                ", numbers alone": plan.predicted["step_seconds"],
                " by profile": predict_from_profile(case, plan, split, profile),
            },
        )
    rows += _comparisons(configuration.title, case, by_method)
    if configuration.again is not None:
        noise = abs(series[configuration.again.name].median / by_method["uniform"].median - 1)
        rows.append(
            Row.median(
                configuration.title,
                "A/A difference (noise)",
                [noise],
                unit="of a step",
                emulated=True,
            )
        )
    return rows


@cache
def _overheads() -> prediction.Overheads:
    """Return the CPU seconds of DeepSpeed's code, beside the emulated GPU's time.

    They are fitted to measured steps of other DeepSpeed jobs, so that simulated steps equal them:
    seconds of each forward or backward pass of a block (the framework's Python code), for each
    parameter in a step (optimizer and gradient norm), and for each step.
    """
    return prediction.calibrate("deepspeed", Measured.load(prediction.STORE))


def simulate_with_cpu_time(case: Case, model: Model, plan: Plan, split: tuple[int, ...]) -> float:
    """Return the simulated seconds of a step, including the CPU time of DeepSpeed's code.

    That CPU time was fitted to other runs of DeepSpeed on the same kind of machine.

    Args:
        case: The networks, and the speed of the GPUs of cluster b relative to those of cluster a.
        model: The model, with the costs of its layers.
        plan: The order of the nodes, and the micro-batches in flight.
        split: Transformer blocks of each stage.
    """
    block_s, parameter_s, step_s = _overheads()
    forward = forward_s(model.hidden, SEQUENCE, FLOPS)
    # By stage: seconds of the embedding (0), of each block, and of the output layer (0).
    forward_rows, backward_rows = [], []
    for node in (plan.nodes[0], plan.nodes[-1]):  # one of stage 0, and one of stage 1
        in_cluster_b = node.startswith("b")
        block_forward_s = forward / case.speed if in_cluster_b else forward
        forward_rows.append((0.0, *[block_forward_s] * model.layers, 0.0))
        # A backward pass takes twice as long as a forward pass.
        backward_rows.append((0.0, *[2 * block_forward_s] * model.layers, 0.0))
    # The simulation takes the times of messages and reductions from the networks.
    nothing = ((0.0,) * (model.layers + 2),) * 2
    costs = StageCosts(
        forward_s=tuple(forward_rows),
        backward_s=tuple(backward_rows),
        reduction_s=nothing,
        transfer_s=nothing,
        micro_batches=model.micro_batches,
    )
    run = Execution(
        TRAITS["deepspeed"],
        stage_layers=split,
        in_flight=plan.traffic_of("sockets").in_flight,  # gloo uses sockets
        overlap="on" if case.overlap else "off",
        block_s=block_s,
        parameter_s=parameter_s,
        step_s=step_s,
        cores=CORES,  # which all nodes of the lab share
        # A send ends when the kernel has taken the whole message. TCP's send buffer holds the last
        # BUFFER_BYTES of it.
        buffer_bytes=BUFFER_BYTES,
        # With gloo, a receiver sends a small message (a notice) when it is ready to receive. On the
        # connection, the notice waits until the receiver's earlier data have been sent.
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
    """Return the rows of a results file, with two new predictions after each measured step.

    A metric is named "predicted METHOD" + suffix. The new predictions are the simulation with the
    CPU time of DeepSpeed's code (suffix ""), and the plan's prediction from FLOP/s and
    network rates alone (suffix ", numbers alone"). Predictions from measured times of the layers
    (suffix " by profile") stay as they are, because those times are not in the file.
    """
    rows = [
        row
        for row in kept_rows(file)
        if "predict" not in row.metric or row.metric.endswith("by profile")
    ]
    # The metric is "step METHOD LAYERS", for example "step balanced 5+3".
    measured = {
        (row.case, row.metric.split()[1]): row for row in rows if row.metric.startswith("step ")
    }
    new_rows: dict[Row, list[Row]] = {}  # row of a measured step -> rows of its predictions
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            spec = case_spec(case, Path(directory))
            for name, size in MODELS.items():
                for count in case.micro_batches:
                    title, model = title_of(case, name, count), model_of(case, *size, count)
                    for method in METHODS:
                        row = measured[title, method]
                        plan = plan_of(case, model, method, spec).plan
                        _, _, layers = row.metric.split()  # "step", the method, "5+3"
                        split = tuple(map(int, layers.split("+")))
                        new_rows[row] = error_rows(
                            title,
                            method,
                            measured=row.value,
                            predictions={
                                "": simulate_with_cpu_time(case, model, plan, split),
                                ", numbers alone": plan.predicted["step_seconds"],
                            },
                        )
    all_rows = []
    for row in rows:
        all_rows.append(row)
        all_rows += new_rows.get(row, [])
    return all_rows


def predict_from_profile(case: Case, plan: Plan, split: tuple[int, ...], profile: Profile) -> float:
    """Return the seconds of a step, predicted from the profile of the uniform partition.

    Args:
        case: The clusters.
        plan: The plan, with the order of the nodes.
        split: Layers of each stage.
        profile: Measured times of the layers.
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

    Predictions without the CPU time of DeepSpeed's code ("numbers alone") have no target: they
    are too short by that time.

    Args:
        title: Name of the case in the results.
        method: The method of partitioning.
        measured: The measured step, in seconds.
        predictions: Predicted seconds. The key is the end of the metric's name: "" with the CPU
            time of DeepSpeed's code, ", numbers alone" without it, " by profile" from measured
            times of the layers.
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
    """Return rows that compare the step times of the methods "uniform", "speed" and "balanced".

    There is a row for every two methods. A ratio above 1 means that the first one is faster.

    Args:
        title: Name of the case in the results.
        case: The clusters; `speed` is that of the GPUs of cluster b in units of those of a.
        of: Measurements of each method.
    """
    rows = []
    for better, worse in (("speed", "uniform"), ("balanced", "speed"), ("balanced", "uniform")):
        ratio = of[worse].median / of[better].median
        # No method may be slower than a simpler one, except for noise.
        target = f">= {1 - NOISE}"
        if case.speed != 1 and (better, worse) == ("balanced", "uniform"):
            # With unequal GPUs, balanced layers must be faster than even ones. With equal GPUs
            # they gain less: only the networks differ.
            target = ">= 1.1"
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
    """Measure step times with each method of dividing layers among stages, and print the table.

    A configuration is CASE/MODEL/mN: clusters, model and N micro-batches. --cells chooses
    configurations by the beginning of this name. With --predict nothing is measured. The
    predictions in the results file (--json) are then computed again.
    """
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--cells",
        default="",
        metavar="TEXT;...",
        help="only configurations (CASE/MODEL/mN) whose name begins so",
    )
    arguments.add_argument(
        "--merge",
        type=Path,
        metavar="FILE",
        help="rows of an earlier part, kept where this one has none",
    )
    arguments.add_argument(  # FILE is that of --json
        "--predict", action="store_true", help="measure nothing: predict FILE's rows anew"
    )
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--skip", type=int, default=2, help="steps that are not measured")
    args = arguments.parse_args()
    title = "Partitions: measured and predicted (step times on the emulated accelerator)"
    if args.predict:
        # To be called on the machine that measured the steps.
        return finish(predicted_anew(args.json), args.json, title)
    wanted = tuple(text for text in args.cells.split(";") if text)  # beginnings of titles
    rows: list[Row] = []
    for case in CASES:
        configurations = []
        for name in MODELS:
            for count in case.micro_batches:
                if not wanted or title_of(case, name, count).startswith(wanted):
                    configurations.append((name, count))
        if configurations:
            rows += run_case(case, configurations, args.steps, args.skip)
    done = {row.case for row in rows}
    if args.merge and args.merge.exists():
        earlier = json.loads(args.merge.read_text())["rows"]
        # "scene" is the file's key for Row.case.
        rows = [Row.from_dict(row) for row in earlier if row["scene"] not in done] + rows
    return finish(rows, args.json, title)


if __name__ == "__main__":
    sys.exit(main())

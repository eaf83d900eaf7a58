"""Compares predicted with measured step times, of real engines on emulated clusters and of the Holmes paper.

    python benchmarks/prediction.py --json FILE [--cases NAME,...|recorded|paper] [--store FILE] [--predict]
                                    [--within S]

The simulator is planner/simulate/step.py. Nothing is fitted to a case. Its inputs are the same for all cases:

- the networks, as `holmes probe` measures them in the lab of each cluster file
- the seconds of the emulated accelerator
- three CPU times for each engine: of a block's forward or backward pass, of a parameter and of a step.
  They are fitted to the five runs of CALIBRATION, which are not among the cases.
- the CPU time that this machine needs to send a byte, for each network of each cluster file
  (prediction_hosts.py)

The nodes of the lab share the cores of this machine, and so do those of the simulation (Execution.cores).

--store keeps measurements, so that a long run can be made in parts. With --predict nothing runs, and with
--within S no measurement begins after S seconds.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import NamedTuple

from emulated import even_costs, forward_s
from harness import Row, finish, parser, tell
from holmes_lab import interleave
from holmes_lab.compare import Variant, all_rdma, compare, lab_for_measurements
from prediction_hosts import measure_hosts
from prediction_paper import paper_rows
from prediction_recorded import recorded_rows, step_rows

from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec, parse_spec
from holmes_ext.patches.deepspeed.features import DEEPSPEED
from holmes_ext.patches.megatron.features import MEGATRON
from holmes_ext.patches.torch.features import LOOP
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import stock_fabric
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.step import simulate
from holmes_ext.samples import examples

STORE = Path(__file__).parent / "results" / "prediction_measured.json"
STEPS = 11
SKIP = 3  # first steps, not measured
CORES = 2  # of this machine
ROUNDS = 5  # of the Gauss-Newton method
TRAITS = {"deepspeed": DEEPSPEED, "megatron": MEGATRON, "plain": LOOP}


@dataclass(frozen=True)
class Case:
    """Training job whose step time is predicted and measured."""

    name: str
    engine: str  # "deepspeed", "megatron", or "plain" for examples/plain_torch
    file: str  # cluster file, without .toml
    #: "stock": without holmes, nodes of both clusters in turn, all messages over Ethernet. "holmes": with
    #: holmes. "rdma": without holmes on a single fast cluster, for the calibration.
    way: str
    stages: int = 2
    layers: int = 6
    hidden: int = 288
    micro_batches: int = 4
    flops: float = 2.3e9
    virtual: int = 1
    # The next four describe the effect of `flags` on the engine, for the prediction.
    overlap: str = "off"  # of gradient reductions with the last backward pass
    hierarchical: bool = False  # whether groups that span clusters use a hierarchical all-reduce
    zero: int = 0  # ZeRO stage
    layers_of: tuple[int, ...] = ()  # blocks of each stage; (): equally many
    flags: tuple[str, ...] = ()  # of the training script


def _cases() -> tuple[Case, ...]:
    """Return the training jobs to predict and measure, over all engines, clusters and features.

    DeepSpeed, megatron-core and a plain data-parallel loop run with and without holmes on clusters
    of 1 + 1 to 4 + 4 nodes, with different overlap, schedules and ZeRO stages.
    """
    two, four, six, eight, slow, three = (
        "two_nodes",
        "two_clusters_4",
        "two_clusters_6",
        "two_clusters_8",
        "two_clusters_8_slow_roce",
        "three_clusters_8",
    )
    on, off = ("--holmes-overlap", "on"), ("--holmes-overlap", "off")

    def ds(name: str, file: str, way: str, **more) -> Case:
        return Case(f"deepspeed {name}", "deepspeed", file, way, **more)

    def mc(name: str, file: str, way: str, **more) -> Case:
        return Case(f"megatron {name}", "megatron", file, way, **more)

    def plain(name: str, file: str, way: str, **more) -> Case:
        return Case(
            f"plain {name}",
            "plain",
            file,
            way,
            **{"stages": 1, "hidden": 192, "micro_batches": 2, "flops": 8e8, **more},
        )

    fast = dict(flops=6.7e9, micro_batches=8)
    return (
        ds("1+1 holmes", two, "holmes", flags=off, **fast),
        ds("2+2 stock", four, "stock", **fast),
        ds("2+2 holmes", four, "holmes", flags=off, **fast),
        ds("2+2 holmes overlap", four, "holmes", overlap="on", flags=on, **fast),
        ds(
            "2+2 holmes 4,2 layers",
            four,
            "holmes",
            layers_of=(4, 2),
            flags=(*off, "--holmes-partition", "4,2"),
            **fast,
        ),
        ds("2+4 stock", six, "stock", stages=3, micro_batches=6, flops=3.3e9),
        ds("2+4 holmes", six, "holmes", stages=3, micro_batches=6, flops=3.3e9, flags=off),
        ds("4+4 stock", eight, "stock"),
        ds("4+4 holmes", eight, "holmes", flags=off),
        ds("4+4 holmes overlap", eight, "holmes", overlap="on", flags=on),
        ds("4+4 slow RoCE holmes", slow, "holmes", flags=off),
        ds("4+4 slow RoCE holmes overlap", slow, "holmes", overlap="on", flags=on),
        ds("three clusters stock", three, "stock", stages=4, layers=8),
        ds("three clusters holmes", three, "holmes", stages=4, layers=8, flags=off),
        mc("1+1 holmes", two, "holmes", flags=off, **fast),
        mc("2+2 stock", four, "stock", **fast),
        mc("2+2 holmes", four, "holmes", flags=off, **fast),
        mc("2+2 holmes overlap", four, "holmes", overlap="on", flags=on, **fast),
        mc(
            "2+2 holmes 4,2 layers",
            four,
            "holmes",
            layers_of=(4, 2),
            flags=(*off, "--layout", "Etttt|ttL"),
            **fast,
        ),
        mc("2+2 interleaved stock", four, "stock", virtual=2, layers=8, **fast),
        mc("2+2 interleaved holmes", four, "holmes", virtual=2, layers=8, flags=off, **fast),
        mc("4+4 stock", eight, "stock"),
        mc("4+4 holmes", eight, "holmes", flags=off),
        mc("4+4 holmes overlap", eight, "holmes", overlap="on", flags=on),
        mc("4+4 interleaved holmes", eight, "holmes", virtual=2, layers=8, flags=off),
        mc("three clusters holmes", three, "holmes", stages=4, layers=8, flags=off),
        plain("2+2 flat ring", four, "stock", flags=("--no-overlap",)),
        plain("2+2 flat ring overlap", four, "stock", overlap="on", flags=("--bucket-mb", "1")),
        plain("4+4 flat ring overlap", eight, "stock", overlap="on", flags=("--bucket-mb", "1")),
        plain(
            "4+4 hierarchical overlap",
            eight,
            "holmes",
            overlap="on",
            hierarchical=True,
            flags=("--bucket-mb", "2"),
        ),
        plain(
            "4+4 hierarchical",
            eight,
            "holmes",
            hierarchical=True,
            flags=("--no-overlap", "--bucket-mb", "100"),
        ),
    )


CASES = _cases()


def _calibration() -> tuple[Case, ...]:
    """Return the runs to which the CPU times of each engine's code are fitted.

    An engine has three such times: for each pass of a transformer block (Python, torch's
    operators), for each parameter in a step (optimizer, gradient norm), and for each step. The runs
    of an engine differ in how much each time counts: few or many micro-batches (passes), small
    layers (parameters), and fast GPUs and many stages (ranks that wait for a core of this machine).
    """
    cases = []
    for engine, stages in (("deepspeed", 2), ("megatron", 2), ("plain", 1)):
        base = Case(
            name="",  # each changed case below gets a name
            engine=engine,
            file="one_cluster",
            way="rdma",  # without holmes, all nodes in a single fast cluster
            stages=stages,
            flops=2.3e9,  # as in the cases on 4 + 4 nodes
            overlap="off",
            flags=("--no-overlap",) if engine == "plain" else (),
        )
        # A run in which the engine's code takes much CPU time. With four stages there are more
        # processes, and they wait for this machine's two cores. A plain loop has no stages: it gets
        # twice the layers instead.
        more_cpu_time = (
            dict(micro_batches=4, layers=12)
            if engine == "plain"
            else dict(micro_batches=6, layers=8, stages=4)
        )
        changes = (
            dict(micro_batches=2),
            dict(micro_batches=10),
            dict(micro_batches=2, hidden=96),
            dict(micro_batches=8, flops=6.7e9),  # as in the cases on 2 + 2 nodes
            more_cpu_time,
        )
        for number, change in enumerate(changes):
            cases.append(replace(base, name=f"calibration {engine} {number}", **change))
    return tuple(cases)


CALIBRATION = _calibration()


class Overheads(NamedTuple):
    """CPU seconds of an engine's code on this machine, beside the time of the emulated GPU."""

    block_s: float  # for each forward or backward pass of a transformer block
    parameter_s: float  # for each parameter in a step: optimizer and gradient norm
    step_s: float  # for each step


@dataclass
class Measured:
    """Measured step times and networks, as they are stored in a results file."""

    #: Case -> seconds of its steps.
    steps: dict[str, list[float]] = field(default_factory=dict)
    #: Cluster file -> the same file with the networks as `holmes probe` measured them.
    probes: dict[str, str] = field(default_factory=dict)
    #: Cluster file -> network -> CPU seconds of this machine for each byte that is sent over it.
    hosts: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Measured:
        """Return the measurements in a results file; without the file, an object without measurements."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def knows(self, case: Case) -> bool:
        """Return whether the steps and the networks of a case have been measured."""
        return case.name in self.steps and case.file in self.hosts

    def links(self, file: str) -> Links:
        """Return the measured links of a cluster file's networks, and the CPU time to send a byte."""
        if file not in self.hosts:  # which are measured after the probe
            return Links()
        links = Links.of_spec(parse_spec(self.probes[file]))
        hosts = self.hosts[file]
        return replace(
            links,
            measured={n: replace(link, host_s=hosts[n]) for n, link in links.measured.items()},
        )

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self), indent=1) + "\n")


def cluster_file(name: str) -> Path:
    """Return the path of a cluster file in benchmarks/ or in examples/clusters."""
    local = Path(__file__).parent / f"{name}.toml"
    return local if local.exists() else examples() / "clusters" / f"{name}.toml"


def cluster_spec(case: Case) -> SiteSpec:
    """Return the clusters of a case."""
    spec = load_spec(cluster_file(case.file))
    return all_rdma(spec).spec if case.way == "rdma" else spec


def site_and_order(case: Case, spec: SiteSpec) -> tuple[Site, tuple[str, ...]]:
    """Return the site of a case, and the order of its nodes by rank."""
    launched = interleave(spec)
    site = site_from_spec(spec)
    if case.way != "holmes":
        return site, launched if case.way == "stock" else tuple(node.name for node in site.nodes)
    launch_order = replace(site, nodes=tuple(site.node_by_name[name] for name in launched))
    return site, build_plan(launch_order, Sizes(pipeline=case.stages)).nodes


def measure(case: Case) -> list[float]:
    """Run a case on emulated clusters, and return the seconds of its measured steps."""
    file = cluster_file(case.file)
    spec = load_spec(file)
    script = {
        "deepspeed": "deepspeed_pipeline",
        "megatron": "megatron_core",
        "plain": "plain_torch",
    }[case.engine]
    command = [
        str(examples() / script / "train.py"),
        *f"--layers {case.layers} --hidden {case.hidden} --heads 4 --sequence 16 --micro-batch 1".split(),
    ]
    command += ["--micro-batches", str(case.micro_batches), *case.flags]
    if case.engine != "plain":
        command += ["--stages" if case.engine == "deepspeed" else "--pipeline", str(case.stages)]
    if case.virtual > 1:
        command += ["--virtual-pipeline", str(case.virtual)]
    variant = Variant(case.name, spec, interleave(spec))
    if case.way == "rdma":
        variant = replace(all_rdma(spec), name=case.name)
    elif case.way == "holmes":
        flags = (
            "--holmes",
            "--holmes-cluster",
            str(file),
            "--holmes-sizes",
            f"pipeline={case.stages}",
        )
        # benchmarks/stage_links.py predicts the rest
        variant = replace(variant, flags=(*flags, "--holmes-inflight", "off"))
    elif case.engine == "plain":
        variant = replace(variant, env={"GLOO_SOCKET_IFNAME": "eth0"})
    accelerator = (
        {"flops": case.flops, "classes": ["TransformerLayer"], "layout": "sbh"}
        if case.engine == "megatron"
        else {"flops": case.flops, "classes": ["Block"]}
    )
    series = compare(
        [variant],
        command,
        repetitions=1,
        steps=STEPS,
        skip=SKIP,
        accelerator=accelerator,
        timeout=120.0,
    )
    return series[case.name].steps[0]


def probe(spec: SiteSpec, file: Path) -> str:
    """Run `holmes probe` on emulated clusters, and return a cluster.toml with the measured links.

    The nodes are network namespaces of this machine, with links of limited rates.

    Args:
        spec: The clusters to emulate.
        file: Cluster file of `spec`.
    """
    with tempfile.TemporaryDirectory() as directory, lab_for_measurements(spec) as lab:
        copy = Path(directory, "cluster.toml")
        copy.write_text(file.read_text())
        result = lab.run(
            [
                sys.executable,
                "-m",
                "holmes_ext.cli.main",
                "probe",
                "--cluster",
                str(copy),
                "--largest",
                "4",  # MiB, of a message; larger ones only take longer
            ],
            preload=("torch",),
            timeout=200,
        )
        if result.returncode:
            rank = result.first_failed or 0  # None, e.g. after a time-out: show rank 0
            raise SystemExit(f"prediction.py: the probe failed: {result.outputs[rank]}")
        return copy.read_text()


def predict(case: Case, links: Links, overhead: Overheads) -> float:
    """Return the predicted seconds of a training step on emulated clusters.

    Args:
        case: The job.
        links: The measured links.
        overhead: CPU seconds of the engine's code, in addition to the time of the emulated GPU: for each
            pass of a transformer block, for each parameter in a step, and for each step.
    """
    block_s, parameter_s, step_s = overhead
    spec = cluster_spec(case)
    site, order = site_and_order(case, spec)
    sizes = Sizes(pipeline=case.stages).complete(site.world_size)
    gpt = Model(
        layers=case.layers,
        hidden=case.hidden,
        heads=4,
        sequence=16,
        vocabulary=256,
        micro_batches=case.micro_batches,
        activation_width=4,
        tied=case.engine == "plain",
    )
    forward = forward_s(case.hidden, 16, case.flops)
    costs = even_costs(
        forward, layers=case.layers, stages=case.stages, micro_batches=case.micro_batches
    )
    bucket_bytes = 0
    if "--bucket-mb" in case.flags:
        megabytes = case.flags[case.flags.index("--bucket-mb") + 1]
        bucket_bytes = int(float(megabytes) * 1e6)
    execution = Execution(
        engine=TRAITS[case.engine],
        virtual=case.virtual,
        stage_layers=case.layers_of,
        overlap=case.overlap,
        bucket_bytes=bucket_bytes,
        hierarchical=case.hierarchical,
        direct=True,
        zero=case.zero,
        block_s=block_s,
        parameter_s=parameter_s,
        step_s=step_s,
        sums=1 if case.engine == "plain" else 0,
        cores=CORES,
        notices=True,
    )
    only = stock_fabric(site) if case.way != "holmes" else None
    return simulate(
        site, order, sizes, gpt, execution=execution, links=links, only=only, costs=costs
    ).step_s


def calibrate(engine: str, measured: Measured) -> Overheads:
    """Return the CPU seconds of an engine's code, fitted to its calibration runs.

    Args:
        engine: "deepspeed", "megatron" or "plain".
        measured: The measurements, with the steps of these runs (CALIBRATION).
    """
    cases = [case for case in CALIBRATION if case.engine == engine]
    return overheads(
        cases,
        [statistics.median(measured.steps[case.name]) for case in cases],
        measured.links(cases[0].file),
    )


def overheads(cases: Sequence[Case], seconds: Sequence[float], links: Links = Links()) -> Overheads:
    """Fit the CPU times of an engine's code to measured steps, and return them.

    They are three numbers, none below 0: seconds for each pass of a transformer block, for each
    parameter in a step, and for each step. The fit minimizes the sum of the squared relative errors
    of the predicted steps. Predictions are not linear in the numbers, so the Gauss-Newton method is
    used. Each of ROUNDS rounds linearizes the predictions around the current numbers. The best numbers of
    this linear problem are the current numbers of the next round.

    Args:
        cases: The calibration runs.
        seconds: Measured step of each case.
        links: The measured links of their cluster file.
    """
    from scipy.optimize import nnls

    # A typical size of each number, in seconds. It has two uses: a derivative is computed from a
    # change by one unit, and the linear problem is solved for costs / units, which are all about 1.
    units = (1e-4, 1e-9, 1e-3)
    costs = Overheads(0.0, 0.0, 0.0)
    for _ in range(ROUNDS):
        # The linearized step: predicted + slopes * (new costs - costs) / units. It should equal the
        # measured step. So each case gives an equation, in the unknowns new costs / units:
        #   slopes * (new costs / units) = measured - predicted + slopes * (costs / units)
        left_sides = []
        right_sides = []
        for case, measured in zip(cases, seconds):
            predicted = predict(case, links, costs)
            slopes = []  # change of the predicted step for one unit of each cost
            for i, unit in enumerate(units):
                changed_costs = list(costs)
                changed_costs[i] += unit
                slopes.append(predict(case, links, Overheads(*changed_costs)) - predicted)
            at_current_costs = sum(
                slope * cost / unit for slope, cost, unit in zip(slopes, costs, units)
            )
            # Divided by the measured step, so that relative errors are minimized.
            left_sides.append([slope / measured for slope in slopes])
            right_sides.append((measured - predicted + at_current_costs) / measured)
        costs_in_units, _ = nnls(left_sides, right_sides)  # least squares, no number below 0
        costs = Overheads(*(float(cost * unit) for cost, unit in zip(costs_in_units, units)))
    return costs


def measure_missing(
    cases: Sequence[Case], measured: Measured, store: Path, until: float = inf, runs: int = 1
) -> None:
    """Measure the networks, the CPU time of sent bytes and the steps that are not in the store.

    The networks and the CPU time of each sent byte ("hosts") are measured once for each cluster
    file. The steps of each case are measured in `runs` runs. The cases take turns.

    Args:
        measured: The measurements in the store; new ones are added.
        store: The file. It is written after each measurement.
        until: No measurement begins after this time (time.monotonic).
    """
    for run, case in itertools.product(range(1, runs + 1), cases):
        if time.monotonic() > until:
            tell(f"no time left for {case.name} and those after it: run again")
            return
        if case.file not in measured.probes:
            file = cluster_file(case.file)
            tell(f"probing {case.file}")
            measured.probes[case.file] = probe(load_spec(file), file)
            measured.save(store)
        if case.file not in measured.hosts:
            tell(f"measuring the hosts of {case.file}")
            measured.hosts[case.file] = measure_hosts(load_spec(cluster_file(case.file)))
            measured.save(store)
        if len(measured.steps.get(case.name, ())) < run * (STEPS - SKIP):
            tell(f"measuring {case.name}")
            measured.steps.setdefault(case.name, []).extend(measure(case))
            measured.save(store)


def lab_rows(cases: list[Case], measured: Measured) -> list[Row]:
    """Return rows with measured and predicted steps, and the errors of the predictions.

    Rows with the median and the worst error over all cases follow, if at least 24 cases are chosen:
    the targets are for the whole set, not for a few cases.
    """
    rows = []
    errors = []
    overheads_of = {}  # engine -> CPU seconds of its code
    for engine in sorted({case.engine for case in cases}):
        of_block, of_parameter, of_step = overheads_of[engine] = calibrate(engine, measured)
        for name, value in (
            ("block's forward or backward", of_block),
            ("parameter", of_parameter),
            ("step", of_step),
        ):
            metric = f"{engine}: CPU time of a {name}"
            rows.append(Row.median("calibration", metric, [value], unit="s", emulated=True))
    for case in cases:
        steps = measured.steps[case.name]
        median = statistics.median(steps)
        predicted = predict(case, measured.links(case.file), overheads_of[case.engine])
        rows += step_rows(case.name, median, (min(steps), max(steps)), predicted)
        error = predicted / median - 1
        errors.append(abs(error))
        rows.append(
            Row.median(
                case.name,
                "error",
                [error],
                unit="of the measured",
                emulated=True,
            )
        )
    if len(cases) >= 24:
        spread = (min(errors), max(errors))
        rows.append(
            Row.of(
                f"{len(errors)} lab cases",
                "median error",
                statistics.median(errors),
                unit="of the measured",
                spread=spread,
                emulated=True,
                target="<= 0.03",
            )
        )
        rows.append(
            Row.of(
                f"{len(errors)} lab cases",
                "worst error",
                max(errors),
                unit="of the measured",
                spread=spread,
                emulated=True,
                target="<= 0.1",
            )
        )
    return rows


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--store",
        type=Path,
        default=STORE,
        metavar="FILE",
        help="what was measured; kept between parts",
    )
    arguments.add_argument(
        "--predict", action="store_true", help="measure nothing: cases that are in the store"
    )
    arguments.add_argument(
        "--within",
        type=float,
        default=inf,
        metavar="S",
        help="begin no measurement after S seconds",
    )
    args = arguments.parse_args()
    wanted = [name for name in args.cases.split(",") if name]
    for name in wanted:
        is_known = any(case.name.startswith(name) for case in CASES)
        if not is_known and name not in ("paper", "recorded"):
            known = ", ".join(case.name for case in CASES)
            tell(f"prediction.py: no case {name!r}; there are paper, recorded, {known}")
            return 2
    measured = Measured.load(args.store)
    # The wanted names are beginnings of cases' names.
    cases = [case for case in CASES if not wanted or case.name.startswith(tuple(wanted))]
    if not args.predict:
        assert os.cpu_count() == CORES or not cases, (
            f"CORES is {CORES}, this machine has {os.cpu_count()}"
        )
        engines = {case.engine for case in cases}
        first = [case for case in CALIBRATION if case.engine in engines]
        measure_missing([*first, *cases], measured, args.store, time.monotonic() + args.within)
    unknown_engines = {case.engine for case in CALIBRATION if not measured.knows(case)}
    cases = [case for case in cases if measured.knows(case) and case.engine not in unknown_engines]
    rows = lab_rows(cases, measured) if cases else []
    if not wanted or "recorded" in wanted:
        rows += recorded_rows(sys.modules[__name__])
    if not wanted or "paper" in wanted:
        rows += paper_rows()
    return finish(rows, args.json, "Predicted against measured steps")


if __name__ == "__main__":
    sys.exit(main())

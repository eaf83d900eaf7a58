"""Runs pipeline schedules in the lab: 4 stages over 2 clusters 40 ms apart, with 16 micro-batches.

On the emulated accelerator a forward pass takes 40 ms and a backward pass 80 ms. The output layer takes
the time that the plan assumes. Each engine trains on the same samples with three schedules:

    stock             the engine's own schedule
    1F1B in flight    the 1F1B schedule of holmes. DeepSpeed's engine has as many micro-batches in flight as
                      hide the stage links, torch.distributed.pipelining has as many as in 1F1B.
    listed passes     the passes of `--holmes-schedule auto`. No stage has more micro-batches in flight than
                      the fullest stage of 1F1B.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from harness import Row, tell
from holmes_lab import interleave
from holmes_lab.compare import Series, Variant, compare, max_loss_difference

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.options import Options
from holmes_ext.patches.traits import ENGINES
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import rules_of
from holmes_ext.plan.shape import Shape
from holmes_ext.planner.launch_flags import launches
from holmes_ext.planner.search.as_plan import plan_of
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.simulated import in_passes, timed
from holmes_ext.samples import examples

SITE = """version = 2
ethernet = {rate = "1Gb/s"}
cluster = [
  {name = "a", kind = "ib", rate = "2Gb/s", nodes = ["a[0-1]"]},
  {name = "b", kind = "ib", rate = "2Gb/s", nodes = ["b[0-1]"]},
]
between = [{clusters = ["a", "b"], rate = "1Gb/s", latency = "40ms"}]
"""
STAGES = 4
LAYERS = 8
MICRO_BATCHES = 16
FORWARD_S = 0.04  # seconds of a forward pass of a stage
STEPS = 10
SKIP = 3  # first steps, not measured
REPETITIONS = 2
#: Names of the schedules.
STOCK = "stock"
IN_FLIGHT = "1F1B in flight"
LISTED = "listed passes"


@dataclass(frozen=True)
class Engine:
    """Engine that runs the schedules, and its example script."""

    framework: str
    folder: str  # of the script in examples/
    plain: str  # class of the output layer
    stages: str  # flag for the number of stages
    flags: tuple[str, ...] = ()  # further flags, besides those of the model and the schedule


#: Case -> engine.
ENGINES_OF = {
    "40 ms; 16 micro-batches; run in the lab": Engine(
        "deepspeed", folder="deepspeed_pipeline", plain="Head", stages="--stages"
    ),
    "40 ms; 16 micro-batches; torch pipelining in the lab": Engine(
        "torch",
        folder="torch_pipelining",
        plain="Linear",
        stages="--pipeline",
        flags=("--schedule", "1F1B", "--micro-batch", "1", "--micro-batches", str(MICRO_BATCHES)),
    ),
}


def planning_problem(framework: str) -> SearchResult:
    """Return a planning problem with stages whose forward pass takes FORWARD_S seconds.

    (A SearchResult is a planning problem with the plans that are found so far. Here it has none.)

    Args:
        framework: Name of the engine that runs the plans: "deepspeed" or "torch".
    """
    plain = Model(
        layers=LAYERS,
        hidden=128,
        heads=4,
        sequence=16,
        vocabulary=256,
        tied=False,
        activation_width=4,
        gradient_width=4,
        state_bytes=16.0,
        global_batch=MICRO_BATCHES,
    )
    _embedding, block, *_ = replace(plain, micro_batch=1).costs()  # of each layer
    # FLOP/s with which a stage of LAYERS / STAGES blocks takes FORWARD_S.
    stage_forward_flop = block.forward_flops * LAYERS / STAGES
    model = replace(plain, gpu=Gpu(flops=stage_forward_flop / FORWARD_S))
    engine, spec = ENGINES[framework], parse_spec(SITE)
    # direct: gloo's ranks exchange directly inside clusters, and not in a ring.
    rules = rules_of(engine, Options(schedule="auto"), direct=True, overlap=True)
    return SearchResult(
        Network(site_from_spec(spec), Links.of_spec(spec)),
        model,
        MICRO_BATCHES,
        rules=rules,
        engine=engine,
        stock_overlap=engine.overlaps,  # whether the engine without holmes overlaps reductions
    )


def plans(framework: str) -> tuple[SearchResult, dict[str, Candidate]]:
    """Return a planning problem (networks, model, batch, engine) and two plans that solve it.

    The plans differ in the schedule of the pipeline. The first has 1F1B, with more micro-batches in
    flight if the engine can (name: IN_FLIGHT, else "1F1B"). The second (name: LISTED) lists the
    order of all forward and backward passes, which the planner found by simulation.

    Args:
        framework: Name of the engine: "deepspeed" or "torch".

    Returns:
        (problem, name of a schedule -> plan).
    """
    problem = planning_problem(framework)
    shape = Shape(
        pipeline=STAGES,
        tensor=1,
        context=1,
        expert=1,
        data=1,
        virtual=1,
        micro_batch=1,
        micro_batches=MICRO_BATCHES,
        recompute="none",
        zero=0,
    )
    network = problem.network
    nodes = [node.name for node in network.site.nodes]
    placement = network.placement(nodes, shape.sizes().complete(network.world))
    even_split = (LAYERS // STAGES,) * STAGES
    baseline = timed(problem, problem.candidate(shape, placement, even_split))  # simulated
    listed = in_passes(problem, baseline)  # None if no order of passes is faster
    assert listed is not None, "listed passes are faster here"
    baseline_name = IN_FLIGHT if baseline.in_flight else "1F1B"
    return problem, {baseline_name: baseline, LISTED: listed}


def run(engine: Engine, folder: Path) -> tuple[dict[str, Candidate], dict[str, Series]]:
    """Run an engine with all schedules.

    Args:
        folder: For the files of the cluster, the plans and DeepSpeed's configuration.

    Returns:
        The plans of the schedules of holmes, and the measurements of all schedules, by name.
    """
    problem, candidates = plans(engine.framework)
    spec = parse_spec(SITE)
    model = problem.model
    variants = []
    cluster = folder / "cluster.toml"
    cluster.write_text(SITE)
    config = folder / "ds_config.json"
    stock_flags = engine.flags
    for name, candidate in candidates.items():
        plan = folder / f"{len(variants)}.json"
        plan_of(problem, candidate, Options(schedule="auto")).save(str(plan))
        launch = launches(
            candidate,
            model,
            global_batch=MICRO_BATCHES,
            overlap=True,
            cluster=str(cluster),
            plan=str(plan),
        )[engine.framework]
        if launch.config:
            config.write_text(json.dumps(launch.config))
            stock_flags = ("--deepspeed_config", str(config))
        path_of_word = {"ds_config.json": str(config)}
        flags = [path_of_word.get(flag, flag) for flag in launch.flags]
        variants.append(Variant(name, spec, interleave(spec), flags=(*engine.flags, *flags)))
    # Without holmes, the launcher lists the nodes in the plan's order.
    nodes = tuple(node.name for node in problem.network.site.nodes)
    variants.append(Variant(STOCK, spec, nodes, flags=stock_flags))
    sizes = {
        "--layers": model.layers,
        "--hidden": model.hidden,
        "--heads": model.heads,
        "--sequence": model.sequence,
        engine.stages: STAGES,
    }
    script = [str(examples() / engine.folder / "train.py")]
    for flag, value in sizes.items():
        script += [flag, str(value)]
    accelerator = {
        "flops": model.gpu.flops,
        "classes": ["Block"],
        "plain": [engine.plain],
        "layout": "bsh",
    }
    return candidates, compare(
        variants,
        script,
        repetitions=REPETITIONS,
        steps=STEPS,
        skip=SKIP,
        accelerator=accelerator,
        timeout=600.0,
        preload=("torch",) if engine.framework == "torch" else ("torch", "deepspeed"),
        on_run=lambda name, number: tell(f"{name}, run {number + 1}"),
    )


def rows(case: str) -> list[Row]:
    """Run all schedules on emulated clusters, and return the rows of results."""
    with tempfile.TemporaryDirectory() as directory:
        plans_of, by_variant = run(ENGINES_OF[case], Path(directory))
    table = []
    for name, series in by_variant.items():
        table.append(
            Row.of(
                case,
                f"{name}, measured step",
                series.median,
                unit="s",
                spread=series.spread,
                emulated=True,
                busy=series.busy,
            )
        )
        if name in plans_of:
            error = plans_of[name].step_s / series.median - 1
            table.append(
                Row.median(
                    case,
                    f"{name}, predicted step",
                    [plans_of[name].step_s],
                    unit="s",
                    emulated=False,
                )
            )
            table.append(
                Row.median(
                    case,
                    f"{name}, predicted against measured",
                    [error],
                    unit="fraction",
                    emulated=True,
                )
            )
            apart = max_loss_difference(series, by_variant[STOCK])
            table.append(
                Row.median(
                    case,
                    f"{name}, greatest difference of a loss from stock's",
                    [apart],
                    unit="",
                    emulated=True,
                )
            )
    now = next(iter(plans_of))
    what, target = (
        ("ratio, memory of the fullest", ">= 1.1") if now == IN_FLIGHT else (f"ratio to {now}", "")
    )
    ratio = by_variant[now].median / by_variant[LISTED].median
    busy = max(measured.busy for measured in by_variant.values())
    return [
        *table,
        Row.median(case, what, [ratio], unit="x", emulated=True, target=target, busy=busy),
    ]

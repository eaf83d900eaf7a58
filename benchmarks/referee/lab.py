"""Runs a plan of a small case in the lab, with DeepSpeed's pipeline engine under holmes.

Networks and accelerators are emulated as in the case, but SLOWER times slower: FLOP/s and rates are
divided, latencies are multiplied, and the measured seconds are divided by the same factor. Which plan is
better does not change. The work of this machine's two cores for eight nodes (no plan considers it)
becomes a smaller part of a step.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from holmes_lab import interleave
from holmes_lab.compare import Series, Variant, all_rdma, compare

from holmes_ext.cluster.wan import Wan
from holmes_ext.errors import HolmesError
from holmes_ext.planner.launch_flags import launches
from holmes_ext.planner.search.as_plan import plan_of
from holmes_ext.samples import examples
from referee.cases import Case
from referee.judge import simulate_candidate
from referee.plans import Grid

SLOWER = 2
STEPS, SKIP, TIMEOUT_S = 6, 2, 600.0


@dataclass(frozen=True)
class Run:
    """Measurements of a plan on emulated clusters."""

    steps: list[float]  # seconds of the measured steps, at the speed of the case
    loss_difference: float  # largest difference to the losses of stock with the same samples
    busy: float | None  # share of this machine's cores in use meanwhile; None: not known


def run(case: Case, grid: Grid) -> Run:
    """Train with a plan on emulated clusters, and return its step times and difference in loss.

    Losses are compared with those of the same training without holmes. Networks and GPUs are SLOWER
    times slower than in the case, so that the CPU work of this machine counts less. The steps of
    the result are divided by SLOWER.

    Raises:
        HolmesError: The job did not start, or ended with an error.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        # The case as holmes's planning problem, and the plan as its solution. Files are made from
        # these.
        result, simulated = simulate_candidate(case, grid)
        cluster, plan, config = (
            folder / "cluster.toml",
            folder / "plan.json",
            folder / "ds_config.json",
        )
        cluster.write_text(case.text)
        plan_of(result, simulated).save(str(plan))
        launch = launches(
            simulated,
            case.model,
            global_batch=case.batch,
            overlap=True,
            cluster=str(cluster),
            plan=str(plan),
        )["deepspeed"]
        if launch.lacks:  # features that the plan needs and DeepSpeed lacks
            raise HolmesError(f"DeepSpeed cannot: {', '.join(launch.lacks)}")
        config.write_text(json.dumps(launch.config))
        flags = tuple(str(config) if flag == "ds_config.json" else flag for flag in launch.flags)
        spec = case.spec.only(set(grid.nodes))
        # _run() scales the rates of all networks, and the accelerator its FLOP/s; only latencies
        # are left.
        slow = replace(spec, wan=spec.wan.scaled(1.0, SLOWER))
        variant = Variant("plan", slow, interleave(spec), flags=flags)
        series = _run(
            variant,
            case,
            stages=grid.sizes.pipeline,
            accelerator=case_accelerator(case),
            scale=1 / SLOWER,
        )
        stock = _stock_losses(case, grid.sizes.data, grid.micro_batch)
        difference = max(abs(a - b) for a, b in zip(series.losses, stock, strict=True))
        (step_seconds,) = series.steps  # of the only run
        return Run([seconds / SLOWER for seconds in step_seconds], difference, series.busy)


def case_accelerator(case: Case) -> dict:
    """Return the settings of the emulated accelerator, with the speeds of the clusters' GPUs."""
    base = case.model.gpu.flops
    speed = {name: case.gpu(name).flops / base for name in case.site.clusters}
    return {"flops": base / SLOWER, "classes": ["Block"], "layout": "bsh", "speed": speed}


@cache
def _stock_losses(case: Case, data: int, micro_batch: int) -> list[float]:
    """Return the losses of DeepSpeed without holmes, to compare the losses of a plan with.

    Only the losses count, so the job is as fast as it can be: without a pipeline, in one fast
    cluster, and without an emulated GPU. Each data-parallel rank reads the same samples as with the
    plan.

    Args:
        case: Clusters, model and batch size.
        data: Data-parallel size.
        micro_batch: Samples of a micro-batch.
    """
    nodes = [node.name for node in case.site.nodes][:data]
    config = {
        "train_batch_size": case.batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": case.batch // data // micro_batch,
        "zero_optimization": {"stage": 0},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(config))
        file.flush()
        # Wan(): no links between clusters. all_rdma() puts the nodes into one cluster.
        variant = all_rdma(replace(case.spec.only(set(nodes)), wan=Wan()))
        return _run(
            replace(variant, flags=("--deepspeed_config", file.name)), case, stages=1
        ).losses


def _run(
    variant: Variant, case: Case, stages: int, accelerator: dict | None = None, scale: float = 1.0
) -> Series:
    """Run examples/deepspeed_pipeline on emulated clusters with the model of a case.

    Args:
        variant: The clusters, the order of nodes, and the flags of the script.
        stages: Number of pipeline stages.
        accelerator: Settings of the emulated accelerator; None: computing takes as long as on this
            machine.
        scale: Factor of all network rates.

    Returns:
        Step times and losses.
    """
    model = case.model
    size = [
        "--layers",
        model.layers,
        "--hidden",
        model.hidden,
        "--heads",
        model.heads,
        "--sequence",
        model.sequence,
        "--stages",
        stages,
    ]
    script = [str(examples() / "deepspeed_pipeline" / "train.py"), *map(str, size)]
    return compare(
        [variant],
        script,
        repetitions=1,
        steps=STEPS,
        skip=SKIP,
        accelerator=accelerator,
        timeout=TIMEOUT_S,
        scale=scale,
    )[variant.name]

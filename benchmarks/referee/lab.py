"""A plan of a small case run in the lab: DeepSpeed's pipeline engine under holmes, which follows it, on the
case's emulated network, with an emulated accelerator of the case's FLOP/s for each cluster.

All of a case is SLOWER times slower there (FLOP/s and rates divided, latencies multiplied), and the seconds
of a step are divided by that again: which plan is better stays, and what this machine's two cores need for
eight nodes at once, which no plan is about, becomes a smaller part of them.
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
from referee.judge import candidate
from referee.plans import Grid

SLOWER = 2
STEPS, SKIP, TIMEOUT_S = 6, 2, 600.0


@dataclass(frozen=True)
class Run:
    """steps: seconds of the measured ones, on the case as it is written; loss_difference: the greatest, from
    stock's with the same samples; busy: share of this machine's cores that was used meanwhile, None: not
    known."""

    steps: list[float]
    loss_difference: float
    busy: float | None


def run(case: Case, grid: Grid) -> Run:
    """HolmesError: the job did not start or ended with an error."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        result, simulated = candidate(case, grid)
        cluster, plan, config = (
            folder / "cluster.toml",
            folder / "plan.json",
            folder / "ds_config.json",
        )
        cluster.write_text(case.text)
        plan_of(result, simulated).save(str(plan))
        launch = launches(simulated, case.model, case.batch, True, str(cluster), str(plan))[
            "deepspeed"
        ]
        if launch.lacks:
            raise HolmesError(f"DeepSpeed cannot: {', '.join(launch.lacks)}")
        config.write_text(json.dumps(launch.config))
        flags = tuple(str(config) if flag == "ds_config.json" else flag for flag in launch.flags)
        spec = case.spec.only(set(grid.nodes))
        slow = replace(spec, wan=spec.wan.scaled(1.0, SLOWER))
        variant = Variant("plan", slow, interleave(spec), flags)
        series = _run(variant, case, grid.sizes.pipeline, case_accelerator(case), 1 / SLOWER)
        stock = _stock_losses(case, grid.sizes.data, grid.micro_batch)
        apart = max(abs(a - b) for a, b in zip(series.losses, stock, strict=True))
        return Run([seconds / SLOWER for seconds in series.steps[0]], apart, series.busy)


def case_accelerator(case: Case) -> dict:
    base = case.model.gpu.flops
    speed = {name: case.gpu(name).flops / base for name in case.site.clusters}
    return {"flops": base / SLOWER, "classes": ["Block"], "layout": "bsh", "speed": speed}


@cache
def _stock_losses(case: Case, data: int, micro_batch: int) -> list[float]:
    """Of stock DeepSpeed with the same samples on each data-parallel rank, as fast as this machine is: one
    stage, one cluster."""
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
        variant = all_rdma(replace(case.spec.only(set(nodes)), wan=Wan()))
        return _run(replace(variant, flags=("--deepspeed_config", file.name)), case, 1).losses


def _run(
    variant: Variant, case: Case, stages: int, accelerator: dict | None = None, scale: float = 1.0
) -> Series:
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

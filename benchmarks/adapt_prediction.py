"""What a job measured of itself in one case, against other cases: adapt.py's "ENGINE prediction".

one run at SEEN, which learns and writes its model (holmes report --write-model)
of each UNSEEN   predicted: the step of that run, and what other rates, micro-batches and layers change of
                 its pipeline by the measured model; measured: a run of its own, which learns, too
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import Row, Runs
from holmes_lab.compare import Variant

from holmes_ext.adapt.pipeline import partition_s
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.options import Options
from holmes_ext.patches.deepspeed.features import DEEPSPEED
from holmes_ext.patches.megatron.features import MEGATRON
from holmes_ext.plan.build import build_plan, costs_of
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import RankModel
from holmes_ext.plan.engine import rules_of
from holmes_ext.plan.profile import Profile, load_profile
from holmes_ext.report.files import load

TRAITS = {"deepspeed": DEEPSPEED, "megatron": MEGATRON}


@dataclass(frozen=True)
class Other:
    """rate: times that at which an activation takes half a stage's time."""

    rate: float = 2.0
    micro_batches: int = 8
    layers: tuple[int, ...] = (3, 3)

    @property
    def name(self) -> str:
        return f"{self.rate:g} x half a stage's rate, {self.micro_batches} micro-batches, {self.layers}"


SEEN = Other()
UNSEEN = (
    Other(1.0),
    Other(0.5),
    Other(8.0),
    Other(micro_batches=16),
    Other(micro_batches=5),
    Other(layers=(4, 2)),
    Other(1.0, 12, (4, 2)),
    Other(4.0, 6, (2, 4)),
)


def pipeline_of(profile: Profile, files: dict[float, Path], engine: str, other: Other) -> float:
    """Seconds of the pipeline's passes in `other`, by the profile of a run at SEEN."""
    options, rules = Options(), rules_of(TRAITS[engine], Options(), True)
    job = RankModel.of_workload(profile.workload(), profile.sizes)
    networks = [Network(site_from_spec(load_spec(files[rate]))) for rate in (SEEN.rate, other.rate)]
    plan = build_plan(site_from_spec(load_spec(files[other.rate])), profile.sizes, options=options)
    before, after = (
        [
            stage_link.seconds(profile.activation_bytes)
            for stage_link in Prices(network, job, rules).stage_links(
                network.placement(plan.nodes, profile.sizes)
            )
        ]
        for network in networks
    )
    stages = [
        replace(stage, stage_link_s=max(0.0, stage.stage_link_s + now - then))
        for stage, then, now in zip(profile.stages, (*before, 0.0), (*after, 0.0))
    ]
    other_profile = replace(profile, stages=tuple(stages), micro_batches=other.micro_batches)
    network = networks[1]
    costs = costs_of(
        Prices(network, job, rules),
        network.placement(plan.nodes, profile.sizes),
        None,
        other_profile,
        overlap=False,
    )
    return partition_s(costs, other.layers)


def rows(
    name: str,
    engine: str,
    half_bps: float,
    write: Callable[[Path, float], Path],
    variant: Callable[..., Variant],
    run: Callable[[Variant, int], float],
    runs: Runs,
) -> list[Row]:
    """write(folder, rate): a cluster file; variant(name, file, *flags); run(variant, micro-batches): the
    median step, once the plan has been learned. [] while a run is missing."""
    errors, step_rows = [], []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        files = {
            rate: write(folder, rate * half_bps)
            for rate in {other.rate for other in (SEEN, *UNSEEN)}
        }

        def learn() -> tuple[float, dict[str, Any]]:
            telemetry = folder / "telemetry"
            seen = variant("seen", files[SEEN.rate], "--holmes-telemetry", str(telemetry))
            seconds = run(seen, SEEN.micro_batches)
            return seconds, next(
                rank.model for rank in load(telemetry).ranks if rank.model is not None
            )

        def measure(other: Other) -> float:
            layers = (
                "--holmes-sizes",
                "pipeline=2",
                "--holmes-partition",
                ",".join(map(str, other.layers)),
            )
            return run(variant("unseen", files[other.rate], *layers), other.micro_batches)

        learned = runs.of(f"{name}: {SEEN.name}, its model", learn)
        measured = [runs.of(f"{name}: {other.name}", partial(measure, other)) for other in UNSEEN]
        if learned is None or None in measured:
            return []
        (folder / "model.json").write_text(json.dumps(learned[1]))
        profile = load_profile(folder / "model.json")
        base_s = pipeline_of(profile, files, engine, SEEN)
        for other, measured_s in zip(UNSEEN, measured):
            predicted_s = learned[0] - base_s + pipeline_of(profile, files, engine, other)
            errors.append(abs(predicted_s / measured_s - 1))
            step_rows += [
                Row.median(name, f"{other.name}: {what}", [seconds], "s", True)
                for what, seconds in (("predicted", predicted_s), ("measured", measured_s))
            ]
    spread = min(errors), max(errors)
    return [
        Row.of(
            name,
            "predicted step of unseen cases, median error",
            statistics.median(errors),
            "of a step",
            spread,
            True,
            "<= 0.02",
        ),
        Row.of(name, "the same, worst", max(errors), "of a step", spread, True, "<= 0.05"),
        *step_rows,
    ]

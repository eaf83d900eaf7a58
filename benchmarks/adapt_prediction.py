"""Predicts steps of a job in new configurations from its own measurements, and measures the error.

These are the cases "ENGINE prediction" of adapt.py:

1. A job runs in the configuration SEEN, measures itself and writes its model (holmes report --write-model).
2. For each configuration in UNSEEN, a step is predicted: the measured step of SEEN, changed by what the model
   predicts for another network rate, number of micro-batches or split of the layers.
3. A job runs in each of these configurations. Its measured step is compared with the prediction.
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

from holmes_ext.adapt.pipeline import seconds_of_passes
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
class Configuration:
    """Configuration of a job: rate of the network, micro-batches and layers of each stage."""

    rate: float = 2.0  # in units of the rate that makes an activation take half of a stage's time
    micro_batches: int = 8  # of a step
    layers: tuple[int, ...] = (3, 3)  # of each stage

    @property
    def name(self) -> str:
        """The configuration in words, for the table of results."""
        return f"{self.rate:g} x half a stage's rate, {self.micro_batches} micro-batches, {self.layers}"


SEEN = Configuration()
UNSEEN = (
    Configuration(1.0),
    Configuration(0.5),
    Configuration(8.0),
    Configuration(micro_batches=16),
    Configuration(micro_batches=5),
    Configuration(layers=(4, 2)),
    Configuration(1.0, 12, (4, 2)),
    Configuration(4.0, 6, (2, 4)),
)


def pipeline_of(
    profile: Profile, files: dict[float, Path], engine: str, other: Configuration
) -> float:
    """Return the predicted seconds of the passes and messages of a pipeline step.

    The prediction is for a configuration that has not run yet. It starts from measurements of
    another configuration (SEEN). Times of passes are those measured. The time of a message between
    stages is the measured time, plus the computed time on the new network, less that on the network
    of SEEN. Work outside of the passes, such as the optimizer, is not counted.

    Args:
        profile: The measurements of SEEN: for each stage, its layers and seconds.
        files: Rate of the network -> cluster file with this rate.
        engine: "deepspeed" or "megatron".
        other: The predicted configuration: its network rate, micro-batches, and layers of each
            stage.
    """
    options = Options()
    # How the engine communicates. direct: gloo's ranks send directly to each other, not in a ring.
    rules = rules_of(TRAITS[engine], options, direct=True)
    # The layers, bytes and messages of each rank, as far as the profile has measured them.
    job = RankModel.of_workload(profile.workload(), profile.sizes)
    # First the network on which the profile was measured, then that of the prediction.
    networks = [Network(site_from_spec(load_spec(files[rate]))) for rate in (SEEN.rate, other.rate)]
    plan = build_plan(site_from_spec(load_spec(files[other.rate])), profile.sizes, options=options)
    link_seconds = []  # for each network: seconds of an activation on each stage link
    for network in networks:
        placement = network.placement(plan.nodes, profile.sizes)
        # Prices computes the times of messages and reductions of a job on a network.
        stage_links = Prices(network, job, rules).stage_links(placement)
        link_seconds.append([link.seconds(profile.activation_bytes) for link in stage_links])
    before, after = link_seconds
    stages = []
    # The last stage has no link to a next stage: 0.
    for stage, before_s, after_s in zip(profile.stages, (*before, 0.0), (*after, 0.0)):
        stage_link_s = max(0.0, stage.stage_link_s + after_s - before_s)
        stages.append(replace(stage, stage_link_s=stage_link_s))
    other_profile = replace(profile, stages=tuple(stages), micro_batches=other.micro_batches)
    _, other_network = networks
    # costs_of() returns the seconds of each layer's passes and of each message, for all stages.
    # Prices of the new network are for reductions. Messages have the times computed above.
    costs = costs_of(
        Prices(other_network, job, rules),
        other_network.placement(plan.nodes, profile.sizes),
        model=None,  # all times come from the profile
        profile=other_profile,
        overlap=False,
    )
    return seconds_of_passes(costs, other.layers)  # layers of each stage


def rows(
    name: str,
    engine: str,
    half_bps: float,
    write: Callable[[Path, float], Path],
    variant: Callable[..., Variant],
    run: Callable[[Variant, int], float],
    runs: Runs,
) -> list[Row]:
    """Measure and predict all configurations, and return the errors of the predictions.

    Args:
        engine: "deepspeed" or "megatron".
        half_bps: Rate that makes an activation take half of a stage's time, in bits/s.
        write: write(folder, rate) writes a cluster file and returns its path.
        variant: variant(name, file, *flags) makes a job on the clusters of a file.
        run: run(variant, micro_batches) returns the median step time of a job that has adapted, in seconds.
        runs: Results of earlier runs.

    Returns:
        No rows if no time is left for a run.
    """
    errors, step_rows = [], []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        files = {
            rate: write(folder, rate * half_bps)
            for rate in {other.rate for other in (SEEN, *UNSEEN)}
        }

        def learn() -> tuple[float, dict[str, Any]]:
            """Run the job that all predictions start from, and return its measurements.

            Returns:
                The step time in seconds, and the cost model of the job (the JSON of `holmes report
                --write-model`): its measured times of passes and messages.
            """
            telemetry = folder / "telemetry"
            seen = variant("seen", files[SEEN.rate], "--holmes-telemetry", str(telemetry))
            seconds = run(seen, SEEN.micro_batches)
            models = [rank.model for rank in load(telemetry).ranks if rank.model is not None]
            return seconds, models[0]

        def measure(other: Configuration) -> float:
            """Run a configuration, and return its step time in seconds."""
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
        seen_step_s, model_document = learned
        (folder / "model.json").write_text(json.dumps(model_document))
        profile = load_profile(folder / "model.json")
        base_s = pipeline_of(profile, files, engine, SEEN)
        for other, measured_s in zip(UNSEEN, measured):
            predicted_s = seen_step_s - base_s + pipeline_of(profile, files, engine, other)
            errors.append(abs(predicted_s / measured_s - 1))
            step_rows += [
                Row.median(name, f"{other.name}: {what}", [seconds], unit="s", emulated=True)
                for what, seconds in (("predicted", predicted_s), ("measured", measured_s))
            ]
    spread = min(errors), max(errors)
    return [
        Row.of(
            name,
            "predicted step of unseen cases, median error",
            statistics.median(errors),
            unit="of a step",
            spread=spread,
            emulated=True,
            target="<= 0.02",
        ),
        Row.of(
            name,
            "the same, worst",
            max(errors),
            unit="of a step",
            spread=spread,
            emulated=True,
            target="<= 0.05",
        ),
        *step_rows,
    ]

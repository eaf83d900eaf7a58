"""The ds_config that a script is started with: is it the same on all ranks, does it agree with the plan?"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.plan.plan import Plan

FLAGS = ("--deepspeed_config", "--deepspeed-config")  # deepspeed.add_config_arguments


@dataclass(frozen=True)
class DsConfig:
    """A ds_config file: its path as given, content, and digest (empty content and digest where it could not be read: DeepSpeed says why)."""

    path: str
    content: dict[str, Any]
    digest: str


def from_arguments(argv: list[str]) -> DsConfig | None:
    """The file that `argv` names, or None. What cannot be read or is no JSON object is DeepSpeed's to refuse."""
    for item, following in zip(argv, [*argv[1:], ""]):
        name, equals, value = item.partition("=")
        if name not in FLAGS:
            continue
        path = value if equals else following
        try:
            data = Path(path).read_bytes()
            content = json.loads(data)
        except (OSError, ValueError):
            return DsConfig(path, {}, "")
        return DsConfig(path, content if isinstance(content, dict) else {}, hashlib.sha256(data).hexdigest()[:16])
    return None


def check(config: DsConfig, plan: Plan, overlap: str | None = None) -> list[str]:
    """Lines for the user about settings that have no effect under the plan.

    overlap: "on" or "off" where the user gave --holmes-overlap. HolmesError names file and key when a setting contradicts the plan.
    """
    pipeline = plan.sizes.pipeline if plan.sizes else 1
    settings = config.content.get("pipeline")
    settings = settings if isinstance(settings, dict) else {}
    stages, partition = settings.get("stages", "auto"), settings.get("partition", "best")
    if plan.sizes and stages not in ("auto", pipeline):
        raise HolmesError(f"{config.path}: key 'pipeline.stages' is {stages!r}, but the plan has {pipeline}; remove it or make them agree")
    if plan.stage_layers and partition != "best":
        layers = "+".join(map(str, plan.stage_layers))
        raise HolmesError(
            f"{config.path}: key 'pipeline.partition' is {partition!r}, but the plan splits the layers {layers}; remove it, or plan without layers"
        )
    zero = config.content.get("zero_optimization")
    wants = zero.get("overlap_comm") if isinstance(zero, dict) else None
    if wants is not None and overlap is not None and bool(wants) != (overlap == "on"):
        raise HolmesError(
            f"{config.path}: key 'zero_optimization.overlap_comm' is {str(wants).lower()}, but --holmes-overlap is {overlap}; remove one of them"
        )
    if wants and pipeline > 1:
        return [f"{config.path}: key 'zero_optimization.overlap_comm' has no effect: DeepSpeed's pipeline engine switches it off"]
    return []

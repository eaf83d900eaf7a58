"""The ds_config that a script is started with: is it the same on all ranks, does it agree with the plan?"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.plan.plan import Plan
from holmes_ext.runtime.session import Session

FLAGS = ("--deepspeed_config", "--deepspeed-config")  # deepspeed.add_config_arguments


@dataclass(frozen=True)
class DsConfig:
    """A ds_config file; content and digest are empty where it could not be read: DeepSpeed says why."""

    path: str
    content: dict[str, Any]
    digest: str


def from_arguments(argv: list[str]) -> DsConfig | None:
    """Return the ds_config file that a command line names, or None if it names none.

    A file that cannot be read, or is no JSON, gets empty content and digest. DeepSpeed itself reports it.
    """
    for item, following in zip(argv, [*argv[1:], ""]):
        # The path is in the same word ("--deepspeed_config=path"), or it is the following word.
        name, equals, value = item.partition("=")
        if name not in FLAGS:
            continue
        path = value if equals else following
        try:
            data = Path(path).read_bytes()
            content = json.loads(data)
        except (OSError, ValueError):
            return DsConfig(path, {}, "")
        return DsConfig(
            path,
            content if isinstance(content, dict) else {},
            hashlib.sha256(data).hexdigest()[:16],
        )
    return None


def checked(config: DsConfig, current: Session) -> list[str]:
    """Call check(), and let only rank 0 print its error.

    The file and the plan are the same on all ranks. Therefore all ranks find the same error.
    """
    try:
        return check(config, current.plan, current.options.overlap)
    except HolmesError as error:
        raise error if current.rank == 0 else RemoteError(str(error)) from None


def check(config: DsConfig, plan: Plan, overlap: str = "auto") -> list[str]:
    """Compare settings of a ds_config file with the plan and with --holmes-overlap.

    Args:
        overlap: The value of --holmes-overlap: "auto", "on" or "off".

    Returns:
        Lines for the user about settings that have no effect.

    Raises:
        HolmesError: A setting contradicts the plan or the option. The message names the file and the key.
    """
    pipeline = plan.sizes.pipeline if plan.sizes else 1
    settings = config.content.get("pipeline")
    settings = settings if isinstance(settings, dict) else {}
    # "auto" and "best" are DeepSpeed's defaults.
    stages, partition = settings.get("stages", "auto"), settings.get("partition", "best")
    if plan.sizes and stages not in ("auto", pipeline):
        way_out = f"the plan has {pipeline}; remove it or make them agree"
        raise _contradiction(config, "pipeline.stages", stages, way_out)
    if plan.stage_layers and partition != "best":
        layers = "+".join(map(str, plan.stage_layers))
        way_out = f"the plan splits the layers {layers}; remove it, or plan without layers"
        raise _contradiction(config, "pipeline.partition", partition, way_out)
    zero = config.content.get("zero_optimization")
    # True or false; None if the file does not set it.
    overlap_comm = zero.get("overlap_comm") if isinstance(zero, dict) else None
    if overlap_comm is not None and overlap != "auto" and bool(overlap_comm) != (overlap == "on"):
        way_out = f"--holmes-overlap is {overlap}; remove one of them"
        raise _contradiction(config, "zero_optimization.overlap_comm", overlap_comm, way_out)
    if overlap_comm and pipeline > 1:
        why = "has no effect: DeepSpeed's pipeline engine switches it off"
        return [f"{config.path}: key 'zero_optimization.overlap_comm' {why}"]
    return []


def _contradiction(config: DsConfig, key: str, value: Any, but: str) -> HolmesError:
    said = str(value).lower() if isinstance(value, bool) else repr(value)
    return HolmesError(f"{config.path}: key '{key}' is {said}, but {but}")

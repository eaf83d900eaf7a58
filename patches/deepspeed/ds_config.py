"""Reads the ds_config file that a script passes to DeepSpeed, and compares it with the plan of the job.

The digest of the file shows whether all ranks read the same content.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from holmes_ext.document import decode_text, parse_json_value, read_bytes
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.plan.plan import Plan
from holmes_ext.runtime.session import Session

#: Flags that name the file, as deepspeed.add_config_arguments defines them.
FLAGS = ("--deepspeed_config", "--deepspeed-config")


@dataclass(frozen=True)
class DsConfig:
    """A ds_config file: the configuration of DeepSpeed, in JSON."""

    path: str
    content: dict[str, Any]  # {} if the file could not be read, or has no JSON object
    digest: str  # of the file's bytes; "" if the file could not be read, or is no JSON


def from_arguments(argv: list[str]) -> DsConfig | None:
    """Return the ds_config file that a command line names, or None if it names none.

    If several flags name a file, the last one counts, as in argparse.

    No error is raised for a bad file, because DeepSpeed itself reports it. If the file cannot be read, or is
    no JSON, the result has content {} and digest "". If its JSON is no object (such as a list), only the
    content is {}.
    """
    path = None
    for item, following in zip(argv, [*argv[1:], ""]):
        # The path is in the same word ("--deepspeed_config=path"), or it is the following word.
        name, equals, value = item.partition("=")
        if name in FLAGS:
            path = value if equals else following
    if path is None:
        return None
    try:
        data = read_bytes(path, advice="")
        content = parse_json_value(decode_text(data), path, advice="")
    except (HolmesError, ValueError):  # ValueError: it is not UTF-8
        return DsConfig(path, content={}, digest="")
    return DsConfig(
        path,
        content=content if isinstance(content, dict) else {},
        digest=hashlib.sha256(data).hexdigest()[:16],  # 16 digits are enough to compare files
    )


def checked(config: DsConfig, current: Session) -> list[str]:
    """Compare a ds_config file with plan and --holmes-overlap; only rank 0 prints an error.

    Compared are pipeline.stages, pipeline.partition and some keys of zero_optimization (see
    check()). The file and the plan are the same on all ranks. Therefore all ranks find the same
    error.

    Returns:
        Lines for the user about settings of the file that have no effect, e.g. "ds_config.json: key
        'zero_optimization.overlap_comm' has no effect: ..."; [] if there are none.

    Raises:
        HolmesError: On rank 0, a setting contradicts the plan or --holmes-overlap.
        RemoteError: On other ranks, a setting contradicts one of them. This error ends a rank
            without a message.
    """
    try:
        return check(config, current.plan, current.options.overlap)
    except HolmesError as error:
        if current.rank == 0:
            raise
        raise RemoteError(str(error)) from None


def check(config: DsConfig, plan: Plan, overlap: str = "auto") -> list[str]:
    """Compare a ds_config file with the plan's stages and layers, and with --holmes-overlap.

    The compared settings are pipeline.stages, pipeline.partition, and of zero_optimization
    overlap_comm and zero_quantized_gradients.

    Args:
        plan: holmes's decisions for the job, such as the parallel sizes and the layers of each
            stage.
        overlap: The value of --holmes-overlap: "auto", "on" or "off".

    Returns:
        Lines for the user about settings that have no effect; [] if there are none.

    Raises:
        HolmesError: A setting contradicts the plan or the option. The message names the file and
            the key.
    """
    pipeline_size = plan.sizes.pipeline if plan.sizes else 1
    pipeline_settings = _table_of(config, "pipeline")
    # "auto" and "best" are DeepSpeed's defaults.
    stages = pipeline_settings.get("stages", "auto")
    partition = pipeline_settings.get("partition", "best")
    if plan.sizes and stages not in ("auto", pipeline_size):
        way_out = f"the plan has {pipeline_size}; remove it or make them agree"
        raise _contradiction(config, "pipeline.stages", stages, way_out)
    if plan.stage_layers and partition != "best":
        layers = "+".join(map(str, plan.stage_layers))
        way_out = f"the plan splits the layers {layers}; remove it, or plan without layers"
        raise _contradiction(config, "pipeline.partition", partition, way_out)
    key = "zero_quantized_gradients"
    if plan.processes_of and _table_of(config, "zero_optimization").get(key):
        # deepspeed.utils.groups divides the ranks into nodes of equally many GPUs.
        way_out = (
            f"nodes have different numbers of GPUs ({plan.widths_text()}), which DeepSpeed's quantized "
            "all-to-all does not support; remove it"
        )
        raise _contradiction(config, f"zero_optimization.{key}", True, way_out)

    # True or false; None if the file does not set it.
    overlap_comm = _table_of(config, "zero_optimization").get("overlap_comm")
    if overlap_comm is None:
        return []
    if overlap != "auto" and bool(overlap_comm) != (overlap == "on"):
        way_out = f"--holmes-overlap is {overlap}; remove one of them"
        raise _contradiction(config, "zero_optimization.overlap_comm", overlap_comm, way_out)
    if overlap_comm and pipeline_size > 1:
        effect = "has no effect: DeepSpeed's pipeline engine switches it off"
        return [f"{config.path}: key 'zero_optimization.overlap_comm' {effect}"]
    return []


def _table_of(config: DsConfig, key: str) -> dict[str, Any]:
    """Return the table under a key of a ds_config file, or {} if the file has none."""
    table = config.content.get(key)
    return table if isinstance(table, dict) else {}


def _contradiction(config: DsConfig, key: str, value: Any, way_out: str) -> HolmesError:
    """Return the error for a setting that contradicts the plan or an option.

    Args:
        way_out: The other side of the contradiction, and how the user can end it.
    """
    value_in_json = str(value).lower() if isinstance(value, bool) else repr(value)
    return HolmesError(f"{config.path}: key '{key}' is {value_in_json}, but {way_out}")

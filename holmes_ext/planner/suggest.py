"""Changes that make the user's training command run a plan.

    edit_of(request, launch) -> CommandEdit

plan_flags.py has the flags that a plan decides, and command_edit.py changes the words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.megatron.command_line.describe import CommandLine
from holmes_ext.planner.command_edit import CommandEdit, by_flag, edited, edited_config
from holmes_ext.planner.launch_flags import Launch
from holmes_ext.planner.plan_flags import (
    DECIDED,
    FSDP_CHECKPOINTS,
    HOLMES,
    LAYERS,
    NEEDS,
    RECOMPUTE,
    WORDS_AFTER,
)
from holmes_ext.planner.search.result import Candidate

#: Frameworks whose flags are the tables of plan_flags.py.
MEGATRONS = ("megatron-lm", "megatron-deepspeed")
#: Flags that describe the model. A command that has a model keeps its own.
_MODEL_FLAGS = ("--num-experts", "--moe-router-topk")
#: Flags whose default is 1.
_SIZES_OF_ONE = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--expert-model-parallel-size",
)
#: Tables of a ds_config with the precision; a ds_config that exists keeps its own.
_PRECISION_TABLES = ("bf16", "bfloat16", "fp16")


@dataclass(frozen=True)
class Request:
    """A training command, and the plan that it is to run."""

    words: tuple[str, ...]  # of the command, launcher included
    command_line: CommandLine  # what holmes reads from the words
    framework: str  # key of ENGINES whose flags the command has
    candidate: Candidate  # the plan
    layers: int  # of the model
    #: The layout that the words describe; None if it is not possible, or options changed it.
    layout: Candidate | None = None


def edit_of(request: Request, launch: Launch) -> CommandEdit:
    """Compute the changes to a user's training command, and to its ds_config, so that it runs a plan.

    Args:
        request: The command and the plan.
        launch: Flags and ds_config of the plan.
    """
    words = request.words
    old_config = ds_config.from_arguments(list(words))  # None: the command names no ds_config

    # Flags of the new command, with their values.
    plan_flags = by_flag(launch.flags)
    config_flag = next((flag for flag in ds_config.FLAGS if flag in plan_flags), "")
    config_path = ""  # of the new ds_config; "" if the plan needs none
    if config_flag:
        config_path = plan_flags.pop(config_flag)[0]
        if old_config is None:
            plan_flags[config_flag] = (config_path,)  # becomes the last flag
        else:
            config_path = old_config.path  # the command's own flag and path stay
    if request.framework in MEGATRONS:
        plan_flags = _as_the_command_spells(request, plan_flags)

    # Flags of the old command that already have the plan's values stay as the user wrote them.
    untouched = set(_untouched(request))
    removed = set(_unwanted(request, plan_flags)) - untouched
    wanted = {flag: values for flag, values in plan_flags.items() if flag not in untouched}
    flag_changes, command = edited(words, wanted, WORDS_AFTER, removed)
    if not config_path:
        return CommandEdit(flag_changes, command)

    old_content = old_config.content if old_config is not None else {}
    key_changes, new_content = edited_config(
        old_content,
        wanted=_wanted_keys(request, launch, old_content),
        unwanted=list(_unwanted_keys(request, wanted, old_content)),
    )
    return CommandEdit(flag_changes, command, config_path, key_changes, new_content)


def runs_already(candidate: Candidate, layout: Candidate | None) -> bool:
    """Return whether the user's layout is the plan itself, so that its sizes need no change."""
    if layout is None:
        return False
    has_same_schedule = (candidate.breadth_first, candidate.schedule) == (
        layout.breadth_first,
        layout.schedule,
    )
    has_same_reductions = candidate.reductions == layout.reductions
    same_plan = candidate.shape == layout.shape and candidate.split == layout.split
    same_order = candidate.placement.sizes.order == layout.placement.sizes.order
    return same_plan and same_order and has_same_reductions and has_same_schedule


def _as_the_command_spells(
    request: Request, wanted: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the flags of a plan, in the form that changes the command least.

    - A command that has a model keeps the model's flags.
    - Sizes of 1 need no flag, because 1 is the default.
    - If the command gives the layers of a chunk instead of the number of chunks, it still does.
    - If the command's expert tensor size equals its tensor size, it follows the plan's tensor size.

    Args:
        request: The command, the plan, and the layout of the command.
        wanted: Flag -> its values, as launch_flags.py writes them.
    """
    shape = request.candidate.shape
    present = {word.partition("=")[0] for word in request.words}
    spelled = dict(wanted)
    if request.command_line.model is not None:
        for flag in _MODEL_FLAGS:
            spelled.pop(flag, None)
    for flag in _SIZES_OF_ONE:
        if spelled.get(flag) == ("1",) and flag not in present:
            del spelled[flag]  # the framework's default
    layers_per_chunk = "--num-layers-per-virtual-pipeline-stage"
    if layers_per_chunk in present and shape.virtual > 1:
        spelled.pop("--num-virtual-stages-per-pipeline-rank", None)
        chunks = shape.pipeline * shape.virtual
        spelled[layers_per_chunk] = (str(request.layers // chunks),)
    expert_tensor = "--expert-tensor-parallel-size"
    sizes = request.command_line.sizes
    old_tensor = str(sizes.tensor) if sizes is not None else "1"

    # The default of the expert tensor size is the tensor size. If the command states just this
    # default, the new command states it, too, with the new tensor size.
    states_default = _last_value(request.words, expert_tensor) == old_tensor
    if states_default and shape.tensor > 1:
        spelled[expert_tensor] = (str(shape.tensor),)
    return spelled


def _last_value(words: Sequence[str], flag: str) -> str:
    """Return the value of a flag in a command; the last value if it is there several times."""
    value = ""
    for word, following in zip(words, [*words[1:], ""]):
        name, equals, joined_value = word.partition("=")
        if name == flag:
            value = joined_value if equals else following
    return value


def _unwanted(request: Request, wanted: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the flags that must be removed from the user's command so that it runs the plan.

    There are none if the command runs the plan already. Flags that the plan sets itself (`wanted`) are
    not removed. The tables of plan_flags.py list the others; all but HOLMES are Megatron's:

        HOLMES             plan file and sizes of holmes: they belong to the old plan
        DECIDED            settings that every plan decides, such as the tensor-parallel size. If the
                           plan does not set the flag, it uses the default.
        NEEDS              flags that Megatron refuses or ignores unless the plan has a property,
                           such as a pipeline
        FSDP_CHECKPOINTS   checkpoint formats that only an FSDP has; no plan uses Megatron's FSDPs

    Args:
        request: The command, the plan, and the layout of the command.
        wanted: Flag -> its values, for the flags of the plan.
    """
    if runs_already(request.candidate, request.layout):
        return
    if request.framework not in MEGATRONS:
        # Flags of another framework's script may have the names of Megatron's: leave them.
        yield from (flag for flag in (*HOLMES, "--holmes-partition") if flag not in wanted)
        return
    yield from (flag for flag in DECIDED if flag not in wanted)
    for flag, is_met in NEEDS.items():
        if not is_met(request.candidate.shape):
            yield flag
    for flag, value in FSDP_CHECKPOINTS:
        if _last_value(request.words, flag) == value:
            yield flag


def _untouched(request: Request) -> Iterator[str]:
    """Yield the flags of a command that already have the plan's value, and so stay as they are.

    There are two groups: the flags of recomputation (RECOMPUTE), and those of the layers of each
    stage and chunk (LAYERS).
    """
    if request.framework not in MEGATRONS:
        return
    candidate = request.candidate
    command_line = request.command_line
    if command_line.model is not None:
        recompute = command_line.model.recompute
    else:
        recompute = command_line.training.get("recompute", "none")
    if recompute == candidate.shape.recompute:
        yield from RECOMPUTE
    layout = request.layout

    # With --holmes-plan the layers come from a plan file, not from flags. That flag is removed, so the
    # layers then need flags of their own.
    if layout is not None and "--holmes-plan" not in request.words:
        same_chunks = layout.shape.virtual == candidate.shape.virtual
        if layout.split == candidate.split and same_chunks:
            yield from LAYERS


def _wanted_keys(request: Request, launch: Launch, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that a plan needs in ds_config: key -> value; nested keys are joined by dots.

    Args:
        request: The command, the plan, and the layout of the command.
        launch: How the framework starts the plan, with its ds_config.
        content: The ds_config of the command; {} if there is none.
    """
    if runs_already(request.candidate, request.layout):
        return {}
    shape = request.candidate.shape
    wanted = {}
    for name, value in launch.config.items():
        if name in _PRECISION_TABLES and content:
            continue  # a precision is the user's choice
        if isinstance(value, dict):
            for key, nested_value in value.items():
                wanted[f"{name}.{key}"] = nested_value
        else:
            wanted[name] = value
    if "--fp16" in request.words and "bf16.enabled" in wanted:
        wanted["fp16.enabled"] = wanted.pop("bf16.enabled")

    # Keys that repeat the content of flags must agree with them.
    values_of_optional_keys = {
        "pipeline": {
            "stages": shape.pipeline,
            "activation_checkpoint_interval": int(shape.recompute == "full"),
        },
        "tensor_parallel": {"autotp_size": shape.tensor},
    }
    for table, values in values_of_optional_keys.items():
        for key, value in values.items():
            if key in (content.get(table) or {}):
                wanted[f"{table}.{key}"] = value
    return wanted


def _unwanted_keys(
    request: Request, wanted: Mapping[str, tuple[str, ...]], content: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the keys of a ds_config that contradict the plan and must be removed.

    Names of nested keys are joined by dots. Keys that the ds_config does not have may be yielded, too.

    Args:
        request: The command and the plan.
        wanted: Flag -> its values, for the flags that the plan sets. Other flags of the command are
            not in it.
        content: The ds_config of the command.
    """
    candidate = request.candidate
    if runs_already(candidate, request.layout):
        return  # the command has this plan already, so its ds_config does not contradict it

    # Overlap of the gradient reduction: "--holmes-overlap on" or "off", and DeepSpeed's own key.
    flag_values = wanted.get("--holmes-overlap")
    overlap_comm = (content.get("zero_optimization") or {}).get("overlap_comm")
    if flag_values is not None and overlap_comm is not None:
        plan_overlaps = flag_values == ("on",)
        if bool(overlap_comm) != plan_overlaps:
            yield "zero_optimization.overlap_comm"

    # A DeepSpeed method of partitioning would not give uneven stages the layers of the plan.
    has_uneven_stages = len(set(candidate.split)) > 1
    if has_uneven_stages:
        yield "pipeline.partition"

    # DeepSpeed's sequence parallelism is the context parallelism of a plan. Without it, the size has
    # to be DeepSpeed's default, 1.
    if candidate.shape.context == 1:
        yield "sequence_parallel_size"

"""Describes the training job of a Megatron-LM, Megatron-DeepSpeed or DeepSpeed command line.

`describe` reads the flags, and the ds_config file that they name, and returns a `CommandLine`: the
parallel sizes, the model, and how the framework runs it (ZeRO stage, overlap, layers of each pipeline
stage). It raises no error. A value that the command line leaves open is assumed, and each assumption is a
line for the user.

The modules beside this one do the reading:

    flags.py       tables of all flags of the frameworks, and of all keys of ds_config
    settings.py    turns flags and keys into settings, such as {"layers": 24, "precision": "bf16"}
    model.py       makes the model from settings
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.patches.megatron.command_line.flags import MEGATRON_DEEPSPEED, SETTING_OF_FLAG
from holmes_ext.patches.megatron.command_line.settings import (
    read_settings,
    settings_of,
    words_by_flag,
)
from holmes_ext.plan.cost.model import Mode, Model, StateBytes
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.sizes import DEFAULT_ORDER, Sizes
from holmes_ext.words import some_of

#: Settings of a training step. They count even if the command line does not describe the model.
STEP_SETTINGS = (
    "micro_batch",
    "micro_batches",
    "global_batch",
    "recompute",
    "sequence_parallel",
    "precision",
)
MAX_ZERO_STAGE = 3
#: A layout is not expanded beyond this number of letters, so that a short text cannot fill the memory.
MAX_LAYOUT_LENGTH = 100_000
#: Number of flags that one line for the user lists.
MAX_LISTED_FLAGS = 4


@dataclass(frozen=True)
class CommandLine:
    """Training job that a command line describes."""

    sizes: Sizes | None = None  # parallel sizes; None if no flag gives any
    #: None if no flag describes a model, or `trouble` says why it is incomplete.
    model: Model | None = None
    #: Why the flags of a model do not make a complete one; "" if they do, or there are none.
    trouble: str = ""
    #: Why the framework refuses the precision, ZeRO stage and offload; "" if it accepts them.
    refused: str = ""
    zero: int = 0  # ZeRO stage
    virtual: int = 1  # chunks of layers on each stage (interleaved schedule), or 1
    #: Stages whose gradient reduction the framework itself overlaps with the backward pass: "off" for none,
    #: "first" for the first stage only, "on" for all.
    overlap: str = "off"
    #: Whether updated weights are gathered during the next forward pass.
    gather_overlap: bool = False
    stage_layers: tuple[int, ...] = ()  # layers of each pipeline stage; () if all have equally many
    framework: str = ""  # "megatron-lm" or "megatron-deepspeed"; "" if the flags describe no model
    assumed: tuple[str, ...] = ()  # a line for the user about each value that the flags leave open
    #: A line for the user about each group of flags that change a step, but are not counted.
    not_counted: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # flags and ds_config keys that are in none of the tables
    #: Field of Model, or "zero" -> value that the flags give for the step. They complete a model that is
    #: described elsewhere, such as in a file.
    training: dict[str, Any] = field(default_factory=dict)
    #: ZeRO stage, and whether there is a pipeline -> bytes per parameter that DeepSpeed keeps for this
    #: ds_config; {} without one. For a model that is described elsewhere.
    state_of_mode: dict[Mode, StateBytes] = field(default_factory=dict)
    backend: str = ""  # of torch.distributed; "" if no flag names it
    instances: int = 1  # of Megatron-LM's distributed optimizer
    layers_flag: str = "--num-layers"  # that gives the number of layers


class LayerSplit(NamedTuple):
    """Division of a model's layers among pipeline stages."""

    virtual: int  # chunks of layers on each stage (interleaved schedule), or 1
    stage_layers: tuple[int, ...]  # layers of each stage; () if all have equally many


def describe(argv: Sequence[str]) -> CommandLine:
    """Return the training job that the command line of a script describes.

    The function raises no error. If the model is incomplete, `trouble` of the result says why.

    Args:
        argv: The words of the command line, such as ["pretrain_gpt.py", "--num-layers", "24"].
    """
    parsed = read_settings(argv)
    settings = dict(parsed.values)  # name of a setting -> value, such as "layers" -> 24
    # Lines for the user about the values used: where ds_config overrules flags, and where a value is
    # assumed. The functions below append to it.
    assumed = list(parsed.overruled)
    is_deepspeed = "ds_config" in settings or any(
        flag in parsed.flags for flag in MEGATRON_DEEPSPEED
    )
    framework = _framework_of(settings, is_deepspeed)
    pipeline_size = settings.get("pipeline", 1)
    zero_stage = _zero_stage(settings, assumed)
    if is_deepspeed and "expert" in settings:
        # In DeepSpeed, the expert-parallel group of a layer is no larger than the layer's number of experts.
        expert_counts = settings.get("experts", [1])
        settings["expert"] = min(settings["expert"], *expert_counts)
    if "checkpoint_interval" in settings:  # of DeepSpeed's pipeline engine; 0: no recomputation
        settings.setdefault("recompute", "full" if settings["checkpoint_interval"] else "none")

    model = None
    trouble = ""  # why the flags make no complete model
    refused = ""  # why the framework would refuse the job
    states: dict[Mode, StateBytes] = {}
    if framework or "ds_config" in settings:
        # Imported here, because most jobs of other frameworks describe no model.
        from holmes_ext.patches.megatron.command_line.model import (
            deepspeed_states,
            model_of,
            refusal_by_framework,
        )

        if framework:
            try:
                model = model_of(
                    settings,
                    flags=parsed.flags,
                    script=_script_of(argv),
                    zero_stage=zero_stage,
                    is_deepspeed=is_deepspeed,
                    assumed=assumed,
                )
            except HolmesError as error:
                trouble = str(error)
            refused = refusal_by_framework(settings, zero_stage, is_deepspeed)
        else:
            states = deepspeed_states(settings)
    layers = model.layers if model is not None else 0
    split = _split_of_layers(settings, layers, pipeline_size, assumed)

    training = {name: settings[name] for name in STEP_SETTINGS if name in settings}
    if "zero" in settings or "fsdp" in settings:
        training["zero"] = zero_stage
    backend_words = parsed.flags.get("--distributed-backend", [])
    return CommandLine(
        sizes=_sizes_of(settings),
        model=model,
        trouble=trouble,
        refused=refused,
        zero=zero_stage,
        virtual=split.virtual,
        overlap=_overlapping_stages(settings, is_deepspeed, pipeline_size),
        gather_overlap=settings.get("gather_overlap", False),
        stage_layers=split.stage_layers,
        framework=framework,
        assumed=tuple(assumed),
        not_counted=_lines_about_flags(parsed.not_counted),
        unknown=parsed.unknown,
        training=training,
        state_of_mode=states,
        backend=backend_words[0] if backend_words else "",
        instances=settings.get("instances", 1),
        layers_flag="--encoder-num-layers" if "encoder_layers" in settings else "--num-layers",
    )


def sizes_from_arguments(argv: Sequence[str]) -> Sizes | None:
    """Return the parallel sizes in the flags of a command line, or None if no flag gives any.

    Sizes in a ds_config file are not read. A script may ignore them, and the framework reports its
    sizes when it starts.

    The result is also None with --num-distributed-optimizer-instances above 1. Each instance of
    Megatron-LM's distributed optimizer is a group of consecutive ranks, and should lie in one
    cluster. Without sizes, holmes always numbers the ranks cluster by cluster, and so achieves
    that. With sizes, it may keep the launcher's numbers, where clusters can alternate.
    """
    settings = settings_of(SETTING_OF_FLAG, words_by_flag(argv))
    optimizer_instances = settings.get("instances", 1)
    if optimizer_instances > 1:
        # None: holmes numbers the ranks cluster by cluster.
        return None
    return _sizes_of(settings)


def model_from_arguments(argv: Sequence[str], needed: bool = True) -> Model | None:
    """Return the model that the flags of a command line describe, or None if they describe none.

    The flags do not name the GPU. The model has the default GPU: 150 TFLOP/s, and no memory limit.

    Args:
        needed: Whether an incomplete model is an error. If not, None is returned for it.

    Raises:
        HolmesError: A flag of the model is missing, or the values do not fit together.
    """
    description = describe(argv)
    if description.trouble and needed:
        raise HolmesError(description.trouble)
    return description.model


def overlaps(option: str, argv: Sequence[str]) -> bool:
    """Return whether the plan lets gradient reductions overlap with the last backward pass of a step.

    Args:
        option: The value of --holmes-overlap: "on", "off" or "auto". With "auto", they overlap unless the
            command line has Megatron-DeepSpeed's flag --no-pipeline-parallel: holmes can overlap the
            reductions of DeepSpeed's pipeline engine only.
        argv: The words of the training script's command line.
    """
    if option == "auto":
        has_plain_engine = "--no-pipeline-parallel" in argv
        return not has_plain_engine
    return option == "on"


def _script_of(argv: Sequence[str]) -> str:
    """Return the file name of the script: the first word, if it ends in .py; "" otherwise."""
    first = argv[0] if argv else ""
    return Path(first).name if first.endswith(".py") else ""


def _framework_of(settings: Mapping[str, Any], is_deepspeed: bool) -> str:
    """Return the framework whose flags describe the model, or "" if no flag describes a model."""
    names = ("layers", "encoder_layers", "hidden", "heads")
    describes_model = any(name in settings for name in names)
    if not describes_model:
        return ""
    return "megatron-deepspeed" if is_deepspeed else "megatron-lm"


def _lines_about_flags(reason_of_flag: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each reason why flags are not counted, with the flags that have this reason."""
    flags_by_reason: dict[str, list[str]] = {}
    for flag, reason in reason_of_flag.items():
        flags_by_reason.setdefault(reason, []).append(flag)
    lines = []
    for reason, flags in flags_by_reason.items():
        lines.append(f"{some_of(flags, MAX_LISTED_FLAGS)}: {reason}")
    return tuple(lines)


def _overlapping_stages(settings: Mapping[str, Any], is_deepspeed: bool, pipeline_size: int) -> str:
    """Return the pipeline stages that overlap their gradient reduction without holmes.

    Args:
        settings: Name of a setting -> value.
        is_deepspeed: Whether the framework is Megatron-DeepSpeed.
        pipeline_size: Number of pipeline stages.

    Returns:
        "off" for no stage, "first" for the first stage only, "on" for all stages.
    """
    if not settings.get("overlap", False):
        return "off"
    if is_deepspeed and pipeline_size > 1:
        return "off"  # DeepSpeed's pipeline engine switches the overlap off
    if pipeline_size == 1:
        return "on"
    return "first"  # Megatron-LM makes buckets on the first stage only


def _sizes_of(settings: Mapping[str, Any]) -> Sizes | None:
    """Return the parallel sizes that the settings give, or None if they give none."""
    sizes = {}
    for name in ("pipeline", "tensor", "context", "expert"):
        size = settings.get(name, 0)
        if size > 0:
            sizes[name] = size
    if not sizes:
        return None
    return Sizes(**sizes, order=settings.get("order", DEFAULT_ORDER))


def _zero_stage(settings: Mapping[str, Any], assumed: list[str]) -> int:
    """Return the ZeRO stage of the job, 0 to 3.

    The engines refuse stages 2 and 3 together with pipeline parallelism. If the flags ask for both,
    the result is 1, the highest stage that they accept.

    Args:
        settings: Name of a setting -> value, e.g. "pipeline" -> number of pipeline stages.
        assumed: Lines for the user about assumptions; a line is appended if stage 1 is assumed.
    """
    if settings.get("fsdp"):  # Megatron-FSDP, whose own flag gives the stage ("fsdp_zero")
        zero_stage = settings.get("fsdp_zero", 0)
    else:
        zero_stage = settings.get("zero", 0)
    has_pipeline = settings.get("pipeline", 1) > 1
    if zero_stage > 1 and has_pipeline:
        assumed.append(f"ZeRO 1, because ZeRO {zero_stage} does not work with a pipeline")
        return 1
    return min(int(zero_stage), MAX_ZERO_STAGE)  # a larger number, a typing error, counts as 3


def _split_of_layers(
    settings: Mapping[str, Any], layers: int, pipeline_size: int, assumed: list[str]
) -> LayerSplit:
    """Return how the command line divides the layers of a model among its pipeline stages.

    Megatron-LM has three ways to give stages unequal numbers of layers. The first that is used
    counts. Without any of them, the split is even.

    1. --pipeline-model-parallel-layout lists the layers of each stage.
    2. Flags let the embedding count as a layer of the first stage, and the loss as one of the last.
    3. Flags give the layers of the first and the last stage. The other stages share the rest.

    The flags of 2. are ignored in two cases:

    - The layers, with embedding and loss, cannot be divided evenly. Megatron-LM refuses that.
    - The schedule is interleaved. The prediction of a step then needs even chunks.

    Args:
        settings: Name of a setting -> value.
        layers: Number of layers; 0 if it is not known.
        assumed: Lines for the user about assumptions; a line is appended if an even split is assumed in place
            of that of 1. or 3.
    """
    if not layers or pipeline_size <= 1:
        return LayerSplit(virtual=1, stage_layers=())  # (): all stages have equally many layers
    if "layout" in settings:
        return _split_by_layout(settings["layout"], layers, pipeline_size, assumed)
    virtual = _virtual_stages(settings, layers, pipeline_size)  # chunks of layers on each stage

    # 1 if a flag lets the embedding, or the loss, count as one of the layers of its stage; else 0.
    embedding_layers = int(settings.get("embedding_counts", False))
    loss_layers = int(settings.get("loss_counts", False))
    counted_layers = layers + embedding_layers + loss_layers
    counted_per_stage, remainder = divmod(counted_layers, pipeline_size)
    has_flag = embedding_layers + loss_layers > 0
    is_interleaved = virtual > 1
    if has_flag and not remainder and not is_interleaved:
        first = counted_per_stage - embedding_layers
        last = counted_per_stage - loss_layers
        between = [counted_per_stage] * (pipeline_size - 2)
        return LayerSplit(virtual=1, stage_layers=(first, *between, last))

    # 3., or an even split if its flags are not given.
    return _split_by_ends(settings, layers, pipeline_size, virtual, assumed)


def _virtual_stages(settings: Mapping[str, Any], layers: int, pipeline_size: int) -> int:
    """Return the number of chunks of layers on each pipeline stage; 1 without the interleaved schedule."""
    chunks = 1
    if settings.get("layers_per_chunk"):
        chunks = layers // pipeline_size // settings["layers_per_chunk"]
    return settings.get("virtual", chunks) or 1


def _split_by_ends(
    settings: Mapping[str, Any], layers: int, pipeline_size: int, virtual: int, assumed: list[str]
) -> LayerSplit:
    """Return the split of layers by the flags for the layers of the first and of the last pipeline stage.

    The stages without such a flag share the other layers as evenly as possible. An impossible split counts as
    even: the framework will refuse it.

    Args:
        virtual: Chunks of layers on each stage (interleaved schedule), or 1.
        assumed: Lines for the user about assumptions; a line is appended if the flags are ignored.
    """
    even = LayerSplit(virtual=virtual, stage_layers=())
    first = settings.get("first_layers", 0)  # 0: not given
    last = settings.get("last_layers", 0)
    other_stages = pipeline_size - bool(first) - bool(last)
    other_layers = layers - first - last
    if not first and not last:
        return even
    if other_stages < 1 or other_layers < other_stages:
        return even
    if virtual > 1:
        assumed.append(
            "even layers: an uneven first or last stage is not counted in an interleaved schedule"
        )
        return even
    stage_layers = list(uniform(other_layers, other_stages))
    if first:
        stage_layers.insert(0, first)
    if last:
        stage_layers.append(last)
    return LayerSplit(virtual=1, stage_layers=tuple(stage_layers))


def _split_by_layout(
    layout: str, layers: int, pipeline_size: int, assumed: list[str]
) -> LayerSplit:
    """Parse --pipeline-model-parallel-layout: return how it divides the layers among the stages.

    In a value such as "Ettt|tL", bars separate chunks, and each "t" is a layer. With two stages,
    the first stage has 3 layers and the second has 1. With more chunks than stages, each stage has
    several chunks (interleaved schedule).

    In three cases an even split is assumed instead, because the prediction of a step cannot count
    the layout:

    - A chunk has no layer.
    - The schedule is interleaved, and the chunks have different numbers of layers.
    - The layout does not fit the number of stages or of layers.

    Args:
        layout: The value of the flag.
        layers: Number of layers of the model.
        assumed: Lines for the user about assumptions; a line is appended if an even split is
            assumed.

    Returns:
        The number of chunks on each stage, and the layers of each stage: () if all have equally
        many.
    """
    chunk_layers = [chunk.count("t") for chunk in _expand_layout(layout)]
    virtual, remainder = divmod(len(chunk_layers), pipeline_size)  # virtual: chunks on each stage
    is_valid = not remainder and min(chunk_layers) > 0 and sum(chunk_layers) == layers
    is_even = len(set(chunk_layers)) == 1
    if is_valid and is_even:
        return LayerSplit(virtual=virtual, stage_layers=())  # (): an even split
    if is_valid and virtual == 1:
        return LayerSplit(virtual=1, stage_layers=tuple(chunk_layers))
    assumed.append(
        f"even layers: --pipeline-model-parallel-layout {layout:.40} cannot be counted (stages without "
        "layers, or uneven chunks)"
    )

    # The number of chunks is that of the layout, if as many even chunks are possible.
    can_be_even = not remainder and layers % (pipeline_size * virtual) == 0
    return LayerSplit(virtual=virtual if can_be_even else 1, stage_layers=())


_REPEATED_GROUP = re.compile(r"\(([^()]*)\)\*(\d{1,4})")  # such as "(tt|)*2"
_REPEATED_LETTER = re.compile(r"([A-Za-z|])\*(\d{1,4})")  # such as "t*3"


def _expand_layout(layout: str) -> list[str]:
    """Parse a pipeline layout of Megatron-LM into the letters of each chunk of layers.

    For example, "Et*3|(tt|)*2,L" is "Ettt", "tt", "tt" and "L". Each "t" is a transformer layer.
    Megatron-LM's pipeline_parallel_layer_layout.py defines the notation.

    If repetitions make the layout longer than MAX_LAYOUT_LENGTH letters, the others are left as
    they are. The caller finds out that such a layout does not fit the number of layers.
    """
    expanded = layout.replace(",", "").replace(" ", "")
    for pattern in (_REPEATED_GROUP, _REPEATED_LETTER):  # such as "(tt|)*2", and "t*3"
        match = pattern.search(expanded)
        while match is not None and len(expanded) < MAX_LAYOUT_LENGTH:
            # match[1] is the letter or the content of the brackets, match[2] the number.
            repeated = match[1] * int(match[2])
            expanded = expanded[: match.start()] + repeated + expanded[match.end() :]
            match = pattern.search(expanded)
    return expanded.replace("(", "").replace(")", "").split("|")

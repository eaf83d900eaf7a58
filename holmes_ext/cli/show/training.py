"""Reads the input of `holmes plan`: model and parallel sizes from options, files and a training command.

The result is a Training. It also has lines for the user: values from the command, assumptions, and arguments
that were not counted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from holmes_ext.cli.show.table import Screen
from holmes_ext.cluster.gpus import accelerator_of, misspelt_model
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.doctor.command.command_words import Command, split_command
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options, misspelt_flag, parse_flags
from holmes_ext.patches import features
from holmes_ext.patches.engine.registry import disabled_features
from holmes_ext.patches.megatron.command_line.describe import CommandLine, describe
from holmes_ext.patches.traits import engine_of
from holmes_ext.plan.cost.model import Mode, Model, load_model, on_clusters
from holmes_ext.plan.cost.number_formats import lines_about_bfloat16, with_number_formats
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.reached import with_kernel_flops
from holmes_ext.plan.shape import with_mode, zero_of
from holmes_ext.plan.sizes import Sizes, parse_sizes
from holmes_ext.words import counted, some_of

#: Options that name parallel sizes.
SIZES = ("pipeline", "tensor", "context", "expert", "order")
#: Begin of a line that names nodes that make the job slower.
LEAVE_OUT = "leave out "
#: Number of words that a line lists.
MAX_LISTED = 4
_WIDTH_OF_32_BITS = 4  # bytes


@dataclass(frozen=True)
class Training:
    """Model, parallel sizes and flags of a training job."""

    model: Model | None  # None if nothing names the model
    sizes: Sizes | None  # the user's layout, not completed; None if nothing names sizes
    #: Settings in the training command; empty without a command.
    command_line: CommandLine = CommandLine()
    lines: tuple[str, ...] = ()  # assumptions and arguments that were not read, for the user
    options: Options = Options()  # holmes's flags in the command, and HOLMES_DISABLE
    engine: EngineTraits = EngineTraits()  # capabilities of the framework
    is_gloo: bool = False  # gloo runs the process groups, not NCCL
    overlap: bool = False  # gradients are reduced under the last backward pass

    @property
    def known_model(self) -> Model:
        """The model of the job; for callers that know that there is one (AssertionError if not)."""
        assert self.model is not None
        return self.model

    @property
    def zero_and_chunks(self) -> tuple[int, ...]:
        """ZeRO stage and virtual pipeline chunks of the command, () if it names no model."""
        if not self.command_line.model:
            return ()
        return (self.command_line.zero, self.command_line.virtual)

    def show(self, screen: Screen) -> None:
        """Print the lines about values from the training command, assumptions, and arguments not counted."""
        show_lines(screen, self.lines)


def sizes_given(args: argparse.Namespace) -> bool:
    """Return whether options name parallel sizes. The command after -- does not count."""
    return args.sizes is not None or any(getattr(args, name) is not None for name in SIZES)


def training_of(args: argparse.Namespace, spec: SiteSpec) -> Training:
    """Return the training job that the arguments of `holmes plan` describe, with lines to print about it.

    Args:
        args: Arguments of `holmes plan`: its options, and the job's command after --, if there is one.
        spec: The clusters, with the speed of their GPUs.

    Raises:
        HolmesError: an argument or file is wrong, or the command has some flags of a model and lacks
            others that every model needs (--num-layers without --hidden-size).
    """
    command = _command_of(args.command or [])
    command_line = _read_command(command)
    lines = _lines_about_command(command, command_line, args.model or "")
    with lines_before_error(lines):
        return _training_of(args, spec, command, command_line, lines)


def _training_of(
    args: argparse.Namespace,
    spec: SiteSpec,
    command: Command,
    command_line: CommandLine,
    lines: list[str],
) -> Training:
    """Return the training job of the arguments of `holmes plan`, as training_of() does.

    Args:
        args: Arguments of `holmes plan`.
        spec: The clusters.
        command: The training command, as words before, at and after its script; no words if there
            is no command.
        command_line: The meaning of the flags among these words: model, sizes and settings of the job.
        lines: Lines for the user about the values that were read from the command.
    """
    model = _model_of_job(args, command_line)
    if model is None and command.hidden_model:
        raise HolmesError(command.hidden_model)
    if model is not None:
        # The user reads about the GPUs first, and then about the command.
        lines = [*_lines_about_gpus(args, model, spec), *lines]
        # The speed of each cluster's GPUs comes from the model's file or from cluster.toml.
        model = with_number_formats(on_clusters(model, spec), spec)
    sizes = _sizes_of_job(args, command_line)
    if model is not None:
        # cluster.toml may give the speed of whole steps. The model has the speed of kernels.
        model, lines_about_steps = with_kernel_flops(model, spec, sizes)
        lines = [*lines_about_steps, *lines]
    if sizes and command_line.sizes and sizes.pipeline != command_line.sizes.pipeline:
        # An option (--pipeline N, --sizes ...) replaces the command's number of pipeline stages. The
        # command's layers of each stage, and its chunks of a stage, fit only its own number.
        command_line = replace(command_line, stage_layers=(), virtual=1)
        if model is not None and model.state_of_mode:
            model = with_mode(model, Mode(command_line.zero, sizes.pipeline > 1))
    _refuse_misspelt_flags(command_line)
    options = _options_of_job(args, command)
    return Training(
        model=model,
        sizes=sizes,
        command_line=command_line,
        lines=tuple(lines),
        options=options,
        # If nothing names the framework, a ds_config file among the command's words shows DeepSpeed.
        engine=engine_of(args.framework or command_line.framework, command.words),
        is_gloo=command_line.backend == "gloo",  # else NCCL
        # Gradients are reduced during the backward pass, unless --overlap off of `holmes plan` or
        # --holmes-overlap off in the command switches that off.
        overlap=args.overlap == "on" and options.overlap != "off",
    )


@contextmanager
def lines_before_error(lines: Iterable[str]) -> Iterator[None]:
    """Print lines about the training command on standard error if the block raises HolmesError.

    A refusal often follows from a flag that was read in another way than the user thinks, or not at all.
    """
    try:
        yield
    except HolmesError:
        show_lines(Screen(stderr=True), lines)
        raise


def show_lines(screen: Screen, lines: Iterable[str]) -> None:
    """Print lines about the training command; lines that need the user's attention are coloured."""
    for line in lines:
        if line.startswith(LEAVE_OUT):
            style = "bold"
        elif line.startswith("not "):
            style = "yellow"
        else:
            style = "dim"
        screen.line(line, style)


def _model_of_job(args: argparse.Namespace, command_line: CommandLine) -> Model | None:
    """Return the model of --model or of the training command, None if nothing names a model.

    With both, the model is that of --model, with the batch sizes and ZeRO stage of the command.
    --global-batch, if given, replaces the global batch in each case.

    Raises:
        HolmesError: the model file or --global-batch is wrong, or the command has only some of the
            flags of a model.
    """
    model = load_model(args.model) if args.model else command_line.model
    if model is None and command_line.trouble:
        # The message advises --holmes-model, a flag of training jobs. The same option of `holmes plan`
        # is called --model.
        raise HolmesError(command_line.trouble.replace("--holmes-model", "--model"))
    if model is not None and args.command and args.model:
        model = _with_values_of_command(model, dict(command_line.training))
        states = command_line.state_of_mode  # bytes that DeepSpeed keeps; {} without a ds_config
        # They count only if the weights have as many bytes in ds_config as in the model's file: 2 for
        # fp16 and bf16, 4 for fp32.
        if states and next(iter(states.values())).weights == model.activation_width:
            model = replace(model, state_of_mode=states)
            # has_pipeline: see _with_values_of_command().
            model = with_mode(model, Mode(command_line.zero, has_pipeline=False))
    if args.global_batch is None:
        return model
    if args.global_batch < 1:
        raise HolmesError(f"--global-batch is {args.global_batch}; it must be 1 or more")
    if model is not None:
        # 0: the number of micro-batches follows from the global batch.
        model = replace(model, global_batch=args.global_batch, micro_batches=0)
    return model


def _refuse_misspelt_flags(command_line: CommandLine) -> None:
    """Raise HolmesError if an unknown flag of the command is nearly a flag of holmes.

    Other unknown flags belong to the script.
    """
    for word in command_line.unknown:
        near = misspelt_flag(word)  # the flag of holmes that is probably meant, or ""
        if near:
            raise HolmesError(f"{word}: did you mean {near}?")


def _lines_about_gpus(args: argparse.Namespace, model: Model, spec: SiteSpec) -> list[str]:
    """Return lines about GPUs with an assumed speed, of an unknown model, or without bfloat16."""
    return [
        *_line_about_assumed_speed(args, model, spec),
        *_lines_about_unknown_gpus(spec),
        *lines_about_bfloat16(model.precision, spec),
    ]


def _line_about_assumed_speed(
    args: argparse.Namespace, model: Model, spec: SiteSpec
) -> Iterator[str]:
    """Yield a line with the assumed speed of GPUs if nothing is known about them.

    Args:
        args: Arguments of `holmes plan`.
        model: The model of the training command, with the GPU that is assumed.
        spec: The clusters, some of which may state how fast their GPUs are.
    """
    if args.model:  # a model file states the speed itself
        return
    unknown = []  # names of clusters
    for cluster in spec.clusters:
        if not cluster.accelerator.any_flops and accelerator_of(cluster.gpu) is None:
            unknown.append(cluster.name)
    if unknown:
        yield (
            f"assumed: GPUs of {', '.join(unknown)} reach {model.gpu.flops / 1e12:.0f} TFLOP/s and "
            "no memory limit (set the key gpu in cluster.toml)"
        )


def _lines_about_unknown_gpus(spec: SiteSpec) -> Iterator[str]:
    """Yield a line for each cluster with an unknown GPU model, unless cluster.toml has its numbers.

    The numbers are FLOP/s, memory and NVLink rate. The prediction leaves out the missing ones.
    """
    for cluster in spec.clusters:
        if not cluster.gpu or accelerator_of(cluster.gpu) is not None:
            continue
        value_of_key = {
            "gpu_flops": cluster.accelerator.any_flops,
            "gpu_memory_bytes": cluster.accelerator.memory_bytes,
            "nvlink": cluster.accelerator.link_bps,
        }
        missing = [key for key, value in value_of_key.items() if not value]
        if missing:
            meant = misspelt_model(cluster.gpu)
            hint = (
                f"did you mean {meant!r}?" if meant else "docs/cluster_toml.md lists the known ones"
            )
            yield (
                f"not known: gpu {cluster.gpu!r} of cluster {cluster.name}: {hint}; "
                f"without {', '.join(missing)} in cluster.toml these are not counted"
            )


def _options_of_job(args: argparse.Namespace, command: Command) -> Options:
    """Return holmes's options that the job would have, for the prediction of its step.

    Three sources give them. A later source wins:

    1. Variables HOLMES_... of the environment, e.g. HOLMES_INFLIGHT for --holmes-inflight. One of
       them, HOLMES_DISABLE, names features of holmes that are switched off (`off` of the result).
    2. Flags --holmes-... in the training command.
    3. The options --inflight off and --schedule auto of `holmes plan`, which stand for the job's
    --holmes-inflight and --holmes-schedule. Their other values change nothing.
    """
    options, _ = parse_flags(list(command.words), os.environ)
    if args.inflight == "off":
        options = replace(options, inflight="off")
    if args.schedule == "auto":
        options = replace(options, schedule="auto")
    disabled = disabled_features(os.environ, features())  # features(): the names of all of them
    return replace(options, off=disabled)


def _with_values_of_command(model: Model, values: dict[str, Any]) -> Model:
    """Return a model with the batch sizes and the ZeRO stage of a training command.

    Args:
        model: The model.
        values: Field of the model (or "zero") -> value in the command.
    """
    model_fields = {name: value for name, value in values.items() if name != "zero"}
    # Global batch and micro-batches follow from each other: 0 means that the number is computed.
    if "global_batch" in values:
        model_fields["micro_batches"] = 0
    elif "micro_batches" in values:
        model_fields["global_batch"] = 0
    zero = values.get("zero", zero_of(model))
    # The number of pipeline stages is not decided yet. Until it is, the bytes of a parameter are those
    # without a pipeline; Shape.model() sets them again for each layout.
    return with_mode(replace(model, **model_fields), Mode(zero, has_pipeline=False))


def _command_of(words: list[str]) -> Command:
    """Return the training command after --, split at its script.

    Args:
        words: The command with its launcher (torchrun ... SCRIPT ARGUMENTS), or the script's
            arguments alone; [] if there is no command.

    Raises:
        HolmesError: The words have no script, and no flags of a training job either. For example, a
            shell script (train.sh) contains the command.
    """
    arguments_alone = Command(launcher=(), script="", arguments=tuple(words))
    if not words or words[0].startswith("-"):
        return arguments_alone
    try:
        return split_command(words)
    except HolmesError:
        # The user's program may be no Python script (./train --num-layers 24). Megatron's flags of a
        # model or of parallel sizes are enough to plan the job.
        described = describe(words)
        if described.framework or described.sizes:
            return arguments_alone
        raise


def _read_command(command: Command) -> CommandLine:
    """Return the model, sizes and settings of the job that a training command starts.

    They are read from the arguments of its script, both the framework's flags and those of holmes
    (--holmes-...). Sizes and layers of stages in flags of holmes replace those of the framework.
    """
    # {}: environment variables (HOLMES_...) of this machine do not count for the job.
    options, others = parse_flags(list(command.arguments), {})
    command_line = describe([command.script, *others])
    sizes = command_line.sizes
    if options.sizes:
        sizes = parse_sizes(options.sizes, "--holmes-sizes")
    stage_layers = options.stage_layers or command_line.stage_layers
    return replace(command_line, sizes=sizes, stage_layers=stage_layers)


def _sizes_of_job(args: argparse.Namespace, command_line: CommandLine) -> Sizes | None:
    """Return the parallel sizes of the job; None if neither the options nor the command name any.

    A size in an option (--sizes, --pipeline N, ...) wins over the command. With --sizes, the sizes
    of the command do not count at all. Otherwise those that no option names are kept. A command
    with a model and without sizes is data-parallel.

    Args:
        args: Arguments of `holmes plan`.
        command_line: Model, sizes and settings that were read from the training command.
    """
    sizes = command_line.sizes
    if sizes is None and command_line.model:
        sizes = Sizes()
    if not sizes_given(args):
        return sizes
    if args.sizes is not None:
        sizes = parse_sizes(args.sizes, "--sizes")
    # Options for single sizes, such as --pipeline 4.
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    return replace(sizes or Sizes(), **given)


def _lines_about_command(command: Command, command_line: CommandLine, model_file: str) -> list[str]:
    """Return lines for the user: values read from the training command, and words that the plan ignores.

    Args:
        command: The training command, as words before, at and after its script. There are no lines
            if it has no words.
        command_line: The meaning of the flags among these words: model, sizes and settings of the job.
        model_file: File of --model, "" if the command describes the model.
    """
    lines: list[str] = []
    if not command.words:
        return lines
    if model_file:
        # Example: "read: the model from a.toml, from the command line sizes, micro batch 4".
        line = f"read: the model from {model_file}, from the command line sizes"
        # Settings of a step in the command, such as "micro_batch" -> 4 or "zero" -> 1. They count
        # together with the file's model.
        for name, value in command_line.training.items():
            line += f", {name.replace('_', ' ')} {value}"
        lines.append(line)
        # hidden_model is "...; the way out". --model, which the user has given, is the way out.
        if command.hidden_model:
            lines.append(f"not counted: {command.hidden_model.partition(';')[0]}")
    else:
        if command_line.model is not None:
            lines.append(f"read: {_summary_of_command(command_line.model, command_line)}")
        lines += [f"assumed: {line}" for line in command_line.assumed]
    lines += [f"not counted: {line}" for line in command_line.not_counted]
    if command.unread:
        words = some_of(command.unread, MAX_LISTED)
        # Words with a shell's variables that have no value here, such as $NODES, or with $(...).
        lines.append(f"not read: {words}: a variable without a value here; write the value")
    if command.configured:
        # Words such as trainer.num_nodes=4 set keys of a configuration (Hydra). holmes reads flags.
        words = some_of(command.configured, MAX_LISTED)
        lines.append(
            f"not read: {words}: only flags are; give --model, --sizes and --global-batch before --"
        )
    if command_line.unknown:
        # Arguments that holmes does not know. The plan is made as if they were not there.
        words = ", ".join(command_line.unknown)
        lines.append(f"not known to holmes, so their effect is not counted: {words}")
    return lines


def _summary_of_command(model: Model, command_line: CommandLine) -> str:
    """Return the model and settings of a command: "24 layers, 1.3e+09 parameters, ...".

    Args:
        model: Model that the command describes.
        command_line: Model, sizes and settings that were read from the command.
    """
    precision = "32-bit" if model.activation_width == _WIDTH_OF_32_BITS else "16-bit"
    parts = [f"{counted(model.layers, 'layer')}, {model.parameters:.3g} parameters"]
    if model.experts:
        parts.append(f"{model.experts} experts, {model.experts_per_token} a token")
    gradient_bits = 8 * model.gradient_width  # the width is in bytes
    parts.append(f"{precision} with {gradient_bits}-bit gradients")
    parts.append(f"micro-batch {model.micro_batch}")
    if model.global_batch:
        parts.append(f"global batch {model.global_batch}")
    else:
        parts.append(counted(model.micro_batches, "micro-batch"))
    parts.append(f"recompute {model.recompute}")
    if model.sequence_parallel:
        parts.append("sequence parallel")
    parts.append(f"ZeRO {command_line.zero}")
    if command_line.virtual > 1:  # interleaved schedule: a rank has several parts of the model
        parts.append(f"{command_line.virtual} chunks a stage")
    if command_line.stage_layers:
        parts.append(f"layers {' '.join(map(str, command_line.stage_layers))}")
    # Stages that overlap reductions with the backward pass: "off", "first" (stage) or "on" (all).
    if command_line.overlap != "off":
        parts.append(f"reductions overlapped ({command_line.overlap})")
    if command_line.gather_overlap:  # all-gather of updated weights overlaps the forward pass
        parts.append("weights gathered under the forward")
    return ", ".join(parts)

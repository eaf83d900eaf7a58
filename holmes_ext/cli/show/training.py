"""What `holmes plan` is to plan: model and layout, from options, files and a command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from holmes_ext.cli.show.table import Screen
from holmes_ext.cluster.spec import KNOWN_GPUS, SiteSpec, accelerator_of
from holmes_ext.doctor.command import split_command
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options, meant, parse_flags
from holmes_ext.patches import features
from holmes_ext.patches.engine.registry import disabled_features
from holmes_ext.patches.megatron.command_line.describe import CommandLine, describe
from holmes_ext.patches.traits import engine_of
from holmes_ext.plan.cost.model import Model, load_model, on_clusters
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.shape import with_zero, zero_of
from holmes_ext.plan.sizes import Sizes, parse_sizes
from holmes_ext.words import did_you_mean

SIZES = ("pipeline", "tensor", "context", "expert", "order")
#: How a line begins that says which nodes a job is faster without.
LEAVE_OUT = "leave out "


@dataclass(frozen=True)
class Training:
    model: Model | None  # None where nothing names it
    sizes: Sizes | None  # of the user's layout, not completed; None where nothing names them
    said: CommandLine = CommandLine()  # the command line; an empty one where there is none
    lines: tuple[str, ...] = ()  # what was assumed, and what was not read
    options: Options = Options()  # the flags of holmes in the command line, and HOLMES_DISABLE
    engine: EngineTraits = EngineTraits()  # what the framework does
    direct: bool = False  # gloo carries the groups, not NCCL
    overlap: bool = False  # gradients are reduced under the last backward

    @property
    def known_model(self) -> Model:
        """Where it was checked that there is one."""
        assert self.model is not None
        return self.model

    @property
    def zero_and_chunks(self) -> tuple[int, ...]:
        """ZeRO stage and chunks of a pipeline stage, as the command line says them; () where it does not."""
        return (self.said.zero, self.said.virtual) if self.said.model else ()

    def show(self, screen: Screen) -> None:
        for line in self.lines:
            of_note = line.startswith(LEAVE_OUT)
            screen.line(line, "bold" if of_note else "yellow" if line.startswith("not ") else "dim")


def sizes_given(args: argparse.Namespace) -> bool:
    """Whether options (not the command line after --) name parallel sizes."""
    return args.sizes is not None or any(getattr(args, name) is not None for name in SIZES)


def training_of(args: argparse.Namespace, spec: SiteSpec) -> Training:
    """HolmesError: what is given is bad, or the command line tells a part of a model only."""
    said = _said(args.command) if args.command else CommandLine()
    model = load_model(args.model) if args.model else said.model
    if model is None and said.trouble:
        raise HolmesError(said.trouble.replace("--holmes-model", "--model"))
    lines = _told(said, args.model or "") if args.command else []
    if model is not None and args.command and args.model:
        model = _overlaid(model, dict(said.training))
    if args.global_batch is not None and args.global_batch < 1:
        raise HolmesError(f"--global-batch is {args.global_batch}; it must be 1 or more")
    if model is not None and args.global_batch is not None:
        model = replace(model, global_batch=args.global_batch, micro_batches=0)
    if model is not None:
        lines = [*_unknown_gpus(spec), *lines]
        unknown = [
            cluster.name
            for cluster in spec.clusters
            if not (
                cluster.accelerator.flops
                or accelerator_of(cluster.gpu)
                or cluster.name in model.gpus
            )
        ]
        if unknown and not args.model:
            rate = f"{model.gpu.flops / 1e12:.0f} TFLOP/s and no memory limit"
            lines.insert(
                0,
                f"assumed: GPUs of {', '.join(unknown)} reach {rate} (key 'gpu' of cluster.toml "
                f"tells)",
            )
        model = on_clusters(model, spec)
    sizes = _sizes(args, said)
    if sizes and said.sizes and sizes.pipeline != said.sizes.pipeline:
        said = replace(said, stage_layers=(), virtual=1)  # those of other stages than are asked for
    for word in said.unknown:
        if near := meant(word):
            raise HolmesError(f"{word}: did you mean {near}?")
    options = _options(args)
    overlap = args.overlap == "on" and options.overlap != "off"
    engine = engine_of(args.framework or said.framework, args.command or ())
    return Training(
        model, sizes, said, tuple(lines), options, engine, said.backend == "gloo", overlap
    )


def _unknown_gpus(spec: SiteSpec) -> Iterator[str]:
    """A line for each cluster whose GPU's name says nothing, where numbers of it are missing."""
    for cluster in spec.clusters:
        known = cluster.accelerator
        missing = {
            "gpu_flops": known.flops,
            "gpu_memory_bytes": known.memory_bytes,
            "nvlink": known.link_bps,
        }
        keys = [key for key, value in missing.items() if not value]
        if cluster.gpu and keys and accelerator_of(cluster.gpu) is None:
            what = f"gpu {cluster.gpu!r} of cluster {cluster.name}: {did_you_mean(cluster.gpu, KNOWN_GPUS)}"
            yield f"not known: {what}; without {', '.join(keys)} in cluster.toml these are not counted"


def _options(args: argparse.Namespace) -> Options:
    """Of the command line, with what HOLMES_DISABLE switches off."""
    options, _ = parse_flags(list(args.command or ()), os.environ)
    off = disabled_features(os.environ, features())
    if args.inflight == "off":
        options = replace(options, inflight="off")
    if args.schedule == "auto":
        options = replace(options, schedule="auto")
    return replace(options, off=off)


def _overlaid(model: Model, step: dict[str, Any]) -> Model:
    """`model` with what a command line says of its step."""
    zero = step.pop("zero", zero_of(model))
    if "global_batch" in step:
        step["micro_batches"] = 0
    elif "micro_batches" in step:
        step["global_batch"] = 0
    return with_zero(replace(model, **step), zero)


def _said(words: list[str]) -> CommandLine:
    """Of a script's arguments, with or without a launcher; --holmes-sizes and -partition count too."""
    try:
        words = list(split_command(words).arguments)
    except HolmesError:
        pass
    options, rest = parse_flags(words, {})
    said = describe(rest)
    sizes = parse_sizes(options.sizes, "--holmes-sizes") if options.sizes else said.sizes
    return replace(said, sizes=sizes, stage_layers=options.stage_layers or said.stage_layers)


def _sizes(args: argparse.Namespace, said: CommandLine) -> Sizes | None:
    base = said.sizes or (Sizes() if said.model else None)  # no sizes: all ranks are data-parallel
    if not sizes_given(args):
        return base
    if args.sizes is not None:
        base = parse_sizes(args.sizes, "--sizes")
    options = {name: value for name in SIZES if (value := getattr(args, name)) is not None}
    return replace(base or Sizes(), **options)


def _told(said: CommandLine, file: str) -> list[str]:
    """Lines about a command line: what it says, what is assumed, not read, not known."""
    lines = []
    if file:
        step = ", ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in said.training.items()
        )
        lines.append(
            f"read: the model from {file}, from the command line sizes"
            + (f", {step}" if step else "")
        )
    elif said.model is not None:
        lines.append(f"read: {_summary(said.model, said)}")
    lines += [f"assumed: {line}" for line in (said.assumed if not file else ())]
    lines += [f"not counted: {line}" for line in said.not_read]
    if said.unknown:
        lines.append(f"not known to holmes, taken to change nothing: {', '.join(said.unknown)}")
    return lines


def _summary(model: Model, said: CommandLine) -> str:
    """ "24 layers, 1.3e9 parameters, ..., ZeRO 1", in the order of plan/cost/model.py."""
    precision = "32-bit" if model.activation_width == 4 else "16-bit"
    parts = [
        f"{model.layers} layers, {model.parameters:.3g} parameters",
        f"{model.experts} experts, {model.experts_per_token} a token" if model.experts else "",
        f"{precision} with {8 * model.gradient_width}-bit gradients",
        f"micro-batch {model.micro_batch}",
        f"global batch {model.global_batch}"
        if model.global_batch
        else f"{model.micro_batches} micro-batches",
        f"recompute {model.recompute}",
        "sequence parallel" if model.sequence_parallel else "",
        f"ZeRO {said.zero}",
        f"{said.virtual} chunks a stage" if said.virtual > 1 else "",
        f"layers {' '.join(map(str, said.stage_layers))}" if said.stage_layers else "",
        f"reductions overlapped ({said.overlap})" if said.overlap != "off" else "",
        "weights gathered under the forward" if said.gather_overlap else "",
    ]
    return ", ".join(filter(None, parts))

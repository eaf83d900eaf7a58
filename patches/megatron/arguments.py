"""Parallel sizes, and the model, from the command line of scripts that use Megatron's flag names; and holmes's flags in
the parsers of Megatron-LM and Megatron-DeepSpeed (holmes strips them from sys.argv before they parse)."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.options import CHOICES, HELP, NAMES, PREFIX, flag
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session

#: Flags of megatron/training/arguments.py (Megatron-LM) and megatron/arguments.py (Megatron-DeepSpeed).
FLAGS = {
    "--pipeline-model-parallel-size": "pipeline",
    "--tensor-model-parallel-size": "tensor",
    "--context-parallel-size": "context",
    "--ds-sequence-parallel-size": "context",  # Megatron-DeepSpeed's: neighbouring ranks share a sequence (Ulysses)
    "--expert-model-parallel-size": "expert",
}
#: Megatron-LM's --use-tp-pp-dp-mapping: data-parallel ranks outermost (arguments.py, initialize_model_parallel order=).
TP_PP_DP = "--use-tp-pp-dp-mapping"
#: Above 1, gradients are reduced in two levels, within consecutive slices of a data-parallel group first
#: (megatron.core.parallel_state).
INSTANCES = "--num-distributed-optimizer-instances"


def sizes_from_arguments(argv: list[str]) -> Sizes | None:
    """Sizes that `argv` names in Megatron's flags; None when it names none. Values that are no numbers are the script's
    to refuse.

    None as well with several optimizer instances: a plan without sizes puts each cluster's nodes together, so that an
    instance is a cluster, while one with sizes sees that data-parallel groups cross anyway and leaves the launcher's
    order.
    """
    values: dict[str, Any] = {}
    for item, following in zip(argv, [*argv[1:], ""]):
        name, equals, value = item.partition("=")
        text = value if equals else following
        if name in FLAGS and text.isdecimal() and int(text) > 0:
            values[FLAGS[name]] = int(text)
        if name == INSTANCES and text.isdecimal() and int(text) > 1:
            return None
    if "--no-pipeline-parallel" in argv:  # Megatron-DeepSpeed without its pipeline engine
        values["pipeline"] = 1
    if not values:
        return None
    sizes = Sizes(**values)
    return replace(sizes, order="tp-cp-ep-pp-dp") if TP_PP_DP in argv else sizes


#: Flag -> field of Model, for whole numbers.
MODEL_FLAGS = {
    "--num-layers": "layers",
    "--hidden-size": "hidden",
    "--num-attention-heads": "heads",
    "--seq-length": "sequence",
    "--ffn-hidden-size": "ffn",
    "--num-query-groups": "groups",
    "--num-key-value-heads": "groups",  # Megatron-DeepSpeed's name
    "--padded-vocab-size": "vocabulary",
    "--vocab-size": "vocabulary",
    "--micro-batch-size": "micro_batch",
    "--global-batch-size": "global_batch",
}
#: GPT-2's vocabulary as Megatron pads it (to a multiple of 128): when no flag names another.
GPT2_VOCABULARY = 50304


def model_from_arguments(argv: list[str], needed: bool = True) -> Model | None:
    """The model that `argv` describes in Megatron's flags; None when it names neither layers, hidden size nor heads.

    GPUs are the nominal ones (150 TFLOP/s, no memory limit). HolmesError when only some of what a model needs is there,
    or it fits together badly; None then where it is not `needed`.
    """
    try:
        return _model(argv)
    except HolmesError:
        if needed:
            raise
        return None


def _model(argv: list[str]) -> Model | None:
    following = dict(zip(argv, [*argv[1:], ""]))
    following |= {name: value for name, equals, value in (item.partition("=") for item in argv) if equals}
    values: dict = {}
    for spelled, name in MODEL_FLAGS.items():
        if following.get(spelled, "").isdecimal():
            values.setdefault(name, int(following[spelled]))
    if not {"layers", "hidden", "heads"} & set(values):
        return None
    for spelled, name in MODEL_FLAGS.items():
        if name in ("layers", "hidden", "heads", "sequence", "micro_batch", "global_batch") and name not in values:
            way_out = "add it, or give the model with --holmes-model FILE"
            raise HolmesError(f"the command line describes a model, but not {spelled}; {way_out}")
    wide = not {"--bf16", "--fp16"} & set(argv)
    recompute = following.get("--recompute-granularity", "selective" if "--recompute-activations" in argv else "none")
    if {"--checkpoint-activations", "--deepspeed-activation-checkpointing"} & set(argv):  # Megatron-DeepSpeed's names
        recompute = "full"
    sharded = "--use-distributed-optimizer" in argv or following.get("--zero-stage", "0") in ("1", "2", "3")
    unlearned = {"--use-rotary-position-embeddings", "--no-position-embedding"} & set(argv)  # Megatron-DeepSpeed's
    learned = following.get("--position-embedding-type", "learned_absolute") == "learned_absolute" and not unlearned
    return Model(
        **{"vocabulary": GPT2_VOCABULARY, **values},
        gated="--swiglu" in argv,
        bias="--disable-bias-linear" not in argv,
        tied="--untie-embeddings-and-output-weights" not in argv,
        positions="learned" if learned else "none",
        recompute=recompute if recompute in ("full", "selective") else "none",
        activation_width=4 if wide else 2,
        gradient_width=2 if "--bf16" in argv and "--grad-reduce-in-bf16" in argv else 4,
        state_bytes=(16.0 if wide else 18.0) - (12.0 if sharded else 0.0),
        sharded_bytes=12.0 if sharded else 0.0,
        source="the command line",
    )


def overlaps(option: str, argv: list[str]) -> bool:
    """Whether gradients are reduced under the last backward under --holmes-overlap `option`; auto: where stages are."""
    return "--no-pipeline-parallel" not in argv if option == "auto" else option == "on"


def add_flags(parser: ArgumentParser, current: session.Session) -> ArgumentParser:
    """A group with what was given as defaults, and the plan's digest and nodes as arguments, for checkpoints.

    Both programs have help texts with a bare "%", on which argparse ends --help with a traceback: they are escaped.
    """
    group = parser.add_argument_group("holmes", "one job over several clusters with different NICs")
    group.add_argument(PREFIX, action="store_true", default=True, help="switch holmes on")
    for name in NAMES:
        text = HELP[name].replace("%", "%%")
        group.add_argument(flag(name), default=getattr(current.options, name), choices=CHOICES.get(name), help=text)
    parser.set_defaults(holmes_plan_digest=current.plan.digest, holmes_nodes=list(current.plan.nodes))
    for action in parser._actions:
        try:
            (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
    return parser

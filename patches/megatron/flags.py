"""Adds the --holmes flags to the argument parsers of Megatron-LM and Megatron-DeepSpeed.

holmes reads its flags and removes them from sys.argv before the program starts. They are added to the
program's parser for two reasons: --help then lists them, and checkpoints record them with all other
arguments.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.options import PREFIX, choices_of, flag, help_of, names
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.megatron.command_line.refusals import refused_first_rank
from holmes_ext.patches.megatron.features import LM, MEGATRON_DEEPSPEED_FLAGS
from holmes_ext.plan.plan import Plan
from holmes_ext.runtime.deadline import told_once
from holmes_ext.runtime.session import Session
from holmes_ext.words import nearest

#: Smallest ratio of difflib.SequenceMatcher at which a flag is suggested for a misspelt one.
MIN_SIMILARITY = 0.75


def add_flags(parser: ArgumentParser, current: Session) -> ArgumentParser:
    """Add the --holmes flags to a program's parser, with the values of this job as defaults.

    holmes has read its flags and removed them from sys.argv before the program parses the rest.
    With the values as defaults, the program's checkpoints record each value like all other
    arguments.

    Two arguments without a flag are also recorded: holmes_plan_digest and holmes_nodes. The plan
    has holmes's decisions for this job, such as the node of each rank.

    Args:
        parser: The parser; it is changed in place.
        current: The session of holmes, with its options and the plan.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("holmes", "one job over several clusters with different NICs")
    # PREFIX is "--holmes". names() are the options, and flag(name) is the flag of one, "--holmes-<name>".
    group.add_argument(PREFIX, action="store_true", default=True, help="switch holmes on")
    for name in names():
        value = current.options.value(name)
        help_text = help_of(name).replace("%", "%%")  # argparse formats help texts with %
        group.add_argument(
            flag(name), default=value, choices=choices_of(name) or None, help=help_text
        )
    parser.set_defaults(
        holmes_plan_digest=current.plan.digest, holmes_nodes=list(current.plan.nodes)
    )
    _escape_percent_signs(parser)
    return parser


def _escape_percent_signs(parser: ArgumentParser) -> None:
    """Escape "%" in those help texts of a parser that argparse cannot format.

    argparse formats a help text with the % operator. Some texts of Megatron-LM and Megatron-DeepSpeed have a
    bare "%", with which --help ends in a traceback.
    """
    for action in parser._actions:
        help_text = action.help or ""
        try:
            help_text % {**vars(action), "prog": parser.prog}  # as argparse does
        except (ValueError, TypeError, KeyError):
            action.help = help_text.replace("%", "%%")


@with_session
@by_name
def _add_flags_to_megatron_lm(current: Session, call: Call, instance: Any) -> Any:
    """Add the --holmes flags, and the planned layers of each stage, to Megatron-LM's parser.

    The layers become an argument without a flag, holmes_stage_layers, by a default of the parser.
    It lists the planned number of layers of each pipeline stage. Megatron-LM's checkpoints record
    it with all other arguments.

    This wrapper runs in place of add_megatron_arguments; call() runs the original and returns the
    parser. All versions build their parser by that function. The usual way, an extra_args_provider
    of pretrain(), does not exist on Megatron-LM's main branch.
    """
    parser = call()
    add_flags(parser, current)
    # Megatron-LM saves all arguments in its checkpoints. If a job with another plan loads the checkpoint,
    # megatron_lm.py prints the layers of each stage in both plans.
    parser.set_defaults(holmes_stage_layers=list(current.plan.stage_layers))
    return parser


def _check_first_ranks(plan: Plan) -> None:
    """Raise HolmesError if Megatron-DeepSpeed would choose other GPUs than the local ranks."""
    import torch

    refusal = refused_first_rank(plan)
    if refusal and torch.cuda.is_available():
        raise told_once(HolmesError(refusal))


@with_session
@by_name
def _add_flags_to_megatron_deepspeed(
    current: Session, call: Call, instance: Any, extra_args_provider: Any
) -> Any:
    """Add the --holmes flags to Megatron-DeepSpeed's argument parser.

    The program calls its function parse_args, and this wrapper runs instead. call() then runs parse_args
    itself, with another extra_args_provider: a function that parse_args calls with the parser. The one
    passed here first calls the program's own, and then adds the flags.

    Args:
        current: The session of holmes, with the plan.
        call: Runs parse_args with the program's arguments. Arguments that are passed to it by name replace
            them.
        instance: None, because parse_args is no method.
        extra_args_provider: The program's argument; None if it adds no arguments.

    Raises:
        HolmesError: Megatron-DeepSpeed would choose other GPUs than the local ranks.
    """
    _check_first_ranks(current.plan)

    def provider(parser: Any, *args: Any, **kwargs: Any) -> Any:
        """Add the program's arguments to the parser, then the --holmes flags."""
        if extra_args_provider is not None:
            parser = extra_args_provider(parser, *args, **kwargs)
        return suggest_similar_flags(add_flags(parser, current))

    return call(extra_args_provider=provider)


def suggest_similar_flags(parser: Any) -> Any:
    """Make a parser suggest the --holmes flag that a misspelt flag resembles, in its usage error.

    argparse calls the parser's method error() for an unknown flag. The method is replaced on this object.

    Returns:
        The parser.
    """
    usage_error = parser.error  # prints the usage and a message, and exits
    holmes_flags = [PREFIX, *map(flag, names())]

    def error(message: str) -> None:
        """Call usage_error with the message, and a suggestion for each misspelt flag in it."""
        parts = [message]
        for word in message.split():
            if not word.startswith("--"):
                continue
            misspelt = word.partition("=")[0]  # without the value
            match = nearest(misspelt, holmes_flags, cutoff=MIN_SIMILARITY)
            if match:  # "": no flag is similar
                parts.append(f"{misspelt}: did you mean {match}?")
        usage_error("; ".join(parts))

    parser.error = error
    return parser


PATCHES = (
    Patch(
        LM,
        "megatron.training.arguments:add_megatron_arguments",
        "--help lists the flags of holmes, and checkpoints record them with all arguments",
        _add_flags_to_megatron_lm,
        parameters=("parser",),
    ),
    Patch(
        MEGATRON_DEEPSPEED_FLAGS,
        "megatron.arguments:parse_args",
        "--help lists the flags of holmes, errors suggest similar ones, and checkpoints record them",
        _add_flags_to_megatron_deepspeed,
    ),
)

"""holmes's flags in the parsers of Megatron-LM and Megatron-DeepSpeed, from whose sys.argv it strips them: in
--help, and in the args that checkpoints record."""

from __future__ import annotations

from argparse import ArgumentParser

from holmes_ext.options import CHOICES, HELP, NAMES, PREFIX, flag
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.megatron.features import LM, MEGATRON_DEEPSPEED_FLAGS
from holmes_ext.runtime import session
from holmes_ext.words import nearest


def add_flags(parser: ArgumentParser, current: session.Session) -> ArgumentParser:
    """Add the --holmes flags to a parser, and the plan's digest and nodes as arguments without flags.

    The flags were stripped from sys.argv before, therefore their values become the defaults. Checkpoints
    record all arguments. The help texts of both programs have a bare "%", with which argparse ends --help in
    a traceback: it is escaped.
    """
    group = parser.add_argument_group("holmes", "one job over several clusters with different NICs")
    group.add_argument(PREFIX, action="store_true", default=True, help="switch holmes on")
    for name in NAMES:
        group.add_argument(flag(name), default=getattr(current.options, name), choices=CHOICES.get(name),
                           help=HELP[name].replace("%", "%%"))
    parser.set_defaults(holmes_plan_digest=current.plan.digest, holmes_nodes=list(current.plan.nodes))
    for action in parser._actions:
        try:
            (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
    return parser


@with_session
@by_name
def _teach_megatron_lm(current, call, instance):
    """Add the --holmes flags, and the plan's layers, to the parser that Megatron-LM fills.

    pretrain() of its main branch takes no extra_args_provider. Therefore the flags are added after
    add_megatron_arguments, through which all versions build their parser.
    """
    parser = call()
    add_flags(parser, current).set_defaults(holmes_stage_layers=list(current.plan.stage_layers))
    return parser


@with_session
@by_name
def _teach_megatron_deepspeed(current, call, instance, extra_args_provider):
    """Parse Megatron-DeepSpeed's arguments with a group of --holmes flags.

    Its parse_args calls extra_args_provider with the parser. The program's own provider is called first.
    """

    def provider(parser, *args, **kwargs):
        extended = parser
        if extra_args_provider is not None:
            extended = extra_args_provider(parser, *args, **kwargs)
        return tell_near_misses(add_flags(extended, current))

    return call(extra_args_provider=provider)


def tell_near_misses(parser):
    """Make the parser's usage error name the --holmes flag that a misspelt flag resembles."""
    usage_error = parser.error
    flags = [PREFIX, *map(flag, NAMES)]

    def error(message):
        named = [item.partition("=")[0] for item in message.split() if item.startswith("--")]
        near = [f"{name}: did you mean {match}?" for name in named if (match := nearest(name, flags, 0.75))]
        usage_error("; ".join([message, *near]))

    parser.error = error
    return parser


PATCHES = (
    Patch(LM, "megatron.training.arguments:add_megatron_arguments",
          "main's pretrain takes no extra_args_provider, and args are what checkpoints record",
          _teach_megatron_lm, parameters=("parser",)),
    Patch(MEGATRON_DEEPSPEED_FLAGS, "megatron.arguments:parse_args",
          "--help names holmes's flags, a misspelt one its near miss; args are what checkpoints record",
          _teach_megatron_deepspeed),
)  # fmt: skip

"""holmes's flags in the parsers of Megatron-LM and Megatron-DeepSpeed, from whose sys.argv it strips them."""

from __future__ import annotations

from argparse import ArgumentParser

from holmes_ext.options import CHOICES, HELP, NAMES, PREFIX, flag
from holmes_ext.runtime import session


def add_flags(parser: ArgumentParser, current: session.Session) -> ArgumentParser:
    """A group with what was given as defaults, and the plan's digest and nodes as arguments, for checkpoints.
    A bare "%" in both programs' help texts, on which argparse ends --help with a traceback, is escaped."""
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

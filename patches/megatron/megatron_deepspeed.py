"""Megatron-DeepSpeed's parser: holmes's flags in its --help, and in the args that its checkpoints record.

It brings a megatron.core of its own (0.2) beside or over an installed one, and keeps its arguments in megatron.arguments, which
Megatron-LM has moved. Where its groups land needs no patch: megatron.core and DeepSpeed's grid both follow the renumbered RANK.
"""

from __future__ import annotations

import importlib
import sys

from holmes_ext.options import CHOICES, HELP, NAMES, PREFIX, flag
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.runtime import session
from holmes_ext.words import nearest

MEGATRON_DEEPSPEED = "megatron-deepspeed==0.2.*"


def loaded_version() -> str | None:
    """The version of the vendored megatron.core; None when the megatron that was imported is not Megatron-DeepSpeed's."""
    if not hasattr(sys.modules.get("megatron.arguments"), "deepspeed"):
        return None
    return importlib.import_module("megatron.core.package_info").__version__


def _teach_flags(wrapped, instance, args, kwargs):
    """parse_args with a holmes group added through its own extra_args_provider."""
    current = session.active()
    if current is None:
        return wrapped(*args, **kwargs)

    def call(extra_args_provider=None, *rest, **more):
        def provider(parser):
            return add_flags(parser if extra_args_provider is None else extra_args_provider(parser), current)

        return wrapped(provider, *rest, **more)

    return call(*args, **kwargs)


def add_flags(parser, current: session.Session):
    """The group; a misspelt flag's near miss in the parser's own usage error; --help that prints although a text has a bare %."""
    group = parser.add_argument_group("holmes", "one job over several clusters with different NICs")
    group.add_argument(PREFIX, action="store_true", default=True, help="switch holmes on")
    for name in NAMES:
        text = HELP[name].replace("%", "%%")
        group.add_argument(flag(name), default=getattr(current.options, name), choices=CHOICES.get(name), help=text)
    parser.set_defaults(holmes_plan_digest=current.plan.digest, holmes_nodes=list(current.plan.nodes))
    for action in parser._actions:
        try:
            action.help and action.help % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):  # arguments.py:639 ends in "100%"
            action.help = action.help.replace("%", "%%")
    usage_error, known = parser.error, [PREFIX, *map(flag, NAMES)]

    def error(message):
        named = [item.partition("=")[0] for item in message.split() if item.startswith("--")]
        near = [f"{name}: did you mean {found}?" for name in named if (found := nearest(name, known, cutoff=0.75))]
        usage_error("; ".join([message, *near]))

    parser.error = error
    return parser


PATCHES = (
    Patch(
        feature="megatron-deepspeed-flags",
        target="megatron.arguments:parse_args",
        versions=MEGATRON_DEEPSPEED,
        version_of=loaded_version,
        parameters=("extra_args_provider",),
        wrap=_teach_flags,
        reason="--help names holmes's flags, a misspelt one its near miss; args are what checkpoints record",
    ),
)

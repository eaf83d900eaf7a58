"""Megatron-DeepSpeed's parser: holmes's flags in its --help, and in the args that its checkpoints record. Its
groups need no patch: megatron.core and DeepSpeed's grid both follow the renumbered RANK."""

from __future__ import annotations

from holmes_ext.options import NAMES, PREFIX, flag
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.megatron.features import MEGATRON_DEEPSPEED_FLAGS
from holmes_ext.patches.megatron.flags import add_flags
from holmes_ext.words import nearest


@with_session
@by_name
def _teach_flags(current, wrapped, instance, extra_args_provider=None, *rest, **more):
    """parse_args with a holmes group added through its own extra_args_provider."""

    def provider(parser):
        extended = parser if extra_args_provider is None else extra_args_provider(parser)
        return tell_near_misses(add_flags(extended, current))

    return wrapped(provider, *rest, **more)


def tell_near_misses(parser):
    """A misspelt flag's near miss in the parser's own usage error."""
    usage_error, flags = parser.error, [PREFIX, *map(flag, NAMES)]

    def error(message):
        named = [item.partition("=")[0] for item in message.split() if item.startswith("--")]
        near = [f"{name}: did you mean {match}?" for name in named if (match := nearest(name, flags, 0.75))]
        usage_error("; ".join([message, *near]))

    parser.error = error
    return parser


PATCHES = (
    Patch(MEGATRON_DEEPSPEED_FLAGS, "megatron.arguments:parse_args",
          "--help names holmes's flags, a misspelt one its near miss; args are what checkpoints record",
          _teach_flags),
)  # fmt: skip

"""Declares joined jobs: several jobs train one model over a WAN and exchange their progress (DiLoCo)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holmes_ext.extensions import Extension, Option
from holmes_ext.options import Options

if TYPE_CHECKING:
    from holmes_ext.runtime.session import Session


def is_active(options: Options) -> bool:
    return bool(options.value("join") or options.value("outer"))


def applies_to(current: Session) -> bool:
    return bool(current.options.value("join"))


EXTENSION = Extension(
    name="join",
    options=(
        Option(
            "join",
            "NAME@HOST:PORT: this job's name in a run of several jobs, each on a cluster of its own, and "
            "where their `holmes join serve` is; HOLMES_JOIN_TOKEN or HOLMES_JOIN_TOKEN_FILE has its token",
        ),
        Option(
            "join_plain",
            "on: joined jobs do not encrypt; anyone on the path can read the weights and who joins (changes "
            "on the path are detected). off (default): TLS 1.3 between hosts (extra `join`)",
            default="off",
            choices=("off", "on"),
        ),
        Option(
            "join_certificate",
            "FILE: PEM with this job's certificate, its chain and its key, of a site's CA (default: made at "
            "start, and bound to the token)",
        ),
        Option(
            "join_ca",
            "FILE: PEM of that CA; all jobs and `holmes join serve` give one of the same CA",
        ),
        Option(
            "join_ports",
            "PORT, FIRST-LAST, any (default) or none: where this job's ranks listen for other jobs; none: "
            "they only call, and are reached through `holmes join serve`",
        ),
        Option(
            "join_address",
            "HOST or HOST:PORT that other jobs call to reach this one: behind NAT, with port forwarding",
        ),
        Option(
            "outer",
            "every=32,fragments=4,delay=5,lr=1,momentum=auto,compress=bf16,...: how joined jobs update each "
            "other (see docs/joined.md)",
        ),
    ),
    variables={
        "HOLMES_JOIN_TOKEN": "the token that `holmes join serve` printed",
        "HOLMES_JOIN_TOKEN_FILE": "a file that holds it",
        "HOLMES_JOIN_PORT": "the port on which local rank 0 listens for joined jobs; rank n takes the n-th "
        "after it",
    },
    commands={"join": "holmes_ext.join.cli"},
    patches={
        "holmes_ext.join.patches.torch": ("joined-torch",),
        "holmes_ext.join.patches.deepspeed": ("joined-deepspeed",),
        "holmes_ext.join.patches.transformers": ("joined-transformers",),
        "holmes_ext.join.patches.megatron": (
            "joined-megatron",
            "joined-megatron-lm",
            "joined-megatron-deepspeed",
        ),
    },
    contributions={
        "plan_companions": {"joined": "holmes_ext.join.show_plan"},
        "report_sections": {"joined": "holmes_ext.join.pictures:report_sections"},
    },
    hooks={
        "on_options": "holmes_ext.join.training:request",
        "on_start": "holmes_ext.join.patches.torch:on_start",
        "on_stop": "holmes_ext.join.patches.torch:on_stop",
    },
    is_active=is_active,
    applies_to=applies_to,
)

"""Joined jobs: several jobs, each on its own cluster, train one model together over a WAN.

Each job takes inner steps with its own optimizer. Now and then the jobs exchange pseudo-gradients (how far
the weights have moved) and take the same outer step with their sum: DiLoCo (arXiv 2311.08105). Like Streaming
DiLoCo (arXiv 2501.18512), they exchange a fragment (part of the model) at a time. A coordinator
(`holmes join serve`) decides who takes part in each exchange (a round); tensors go directly from job to job.

This module declares the options, the command and the patches of joined jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holmes_ext.extensions import Extension, Option
from holmes_ext.options import Options

if TYPE_CHECKING:
    from holmes_ext.runtime.session import Session

#: Help texts of the flags of a job, and of the options of `holmes join`.
CERTIFICATE_HELP = (
    "PEM with a certificate of your own CA, its chain and its key; the certificate has the name of the job, "
    "or for `holmes join serve` its HOST (default: `holmes join serve` is the CA)"
)
CA_HELP = "PEM of that CA; all jobs and `holmes join serve` need certificates of the same CA"


def is_active(options: Options) -> bool:
    """Return whether the user has given --holmes-join or --holmes-outer."""
    return bool(options.value("join") or options.value("outer"))


def applies_to(current: Session) -> bool:
    """Return whether the job of this session joins other jobs."""
    return bool(current.options.value("join"))


EXTENSION = Extension(
    name="join",
    options=(
        Option(
            "join",
            "NAME@HOST:PORT: train one model together with other jobs, each on its own cluster; NAME of this "
            "job, and address of `holmes join serve`",
        ),
        Option(
            "join_invitation",
            "FILE: invitation of this job from `holmes join invite`, used at its first start; not needed on "
            "the host of `holmes join serve`",
        ),
        Option(
            "join_certificate",
            f"FILE: {CERTIFICATE_HELP}",
        ),
        Option(
            "join_ca",
            f"FILE: {CA_HELP}",
        ),
        Option(
            "join_ports",
            "PORT, FIRST-LAST, any (default) or none: ports on which this job's ranks listen for other jobs; "
            "none: they only call, and are reached through `holmes join serve`",
        ),
        Option(
            "join_address",
            "HOST or HOST:PORT that other jobs call to reach this job: behind NAT, with port forwarding",
        ),
        Option(
            "outer",
            "timeout=60,part=0/1: this job's own settings of joined training; all others are those of "
            "`holmes join serve --outer` (docs/joined.md)",
        ),
    ),
    variables={
        "HOLMES_JOIN_PORT": "the port on which local rank 0 listens for other joined jobs; rank n listens on "
        "the n-th port after it",
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

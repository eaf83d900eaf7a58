"""Declares the extension that re-plans a running job: parts of the plan follow measured times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holmes_ext.extensions import Extension, Option
from holmes_ext.options import Options

if TYPE_CHECKING:
    from holmes_ext.runtime.session import Session


def is_active(options: Options) -> bool:
    """Return whether the options allow changes of the plan while the job runs.

    A job that measures a profile (--holmes-profile) keeps its plan, because all its times must be
    those of the same plan.
    """
    return options.value("adapt") != "off" and not options.profile


def applies_to(current: Session) -> bool:
    """Return whether any part of this job's plan can change between two training steps.

    This may be the number of micro-batches in flight, or the algorithm that sums gradients. The ranks
    agree on a change through the job's key-value store, so a job without a store keeps its plan.
    """
    # Inside a single cluster, gradients are always summed in the same way.
    has_clusters = len(current.plan.clusters) > 1
    sums_can_change = has_clusters and current.engine.can("hierarchical", current.options.off)
    return current.store is not None and (can_change_in_flight(current) or sums_can_change)


def can_change_in_flight(current: Session) -> bool:
    """Return whether holmes may change the number of micro-batches in flight between two steps.

    The user must not have fixed it (--holmes-inflight), and the training engine must support it.
    """
    options = current.options
    return options.inflight == "auto" and current.engine.can("in-flight", options.off)


EXTENSION = Extension(
    name="adapt",
    options=(
        Option(
            "adapt",
            "on (default): re-plans while the job runs, from measured steps and messages; all ranks switch "
            "at the same step boundary: micro-batches in flight, how gradients are summed (GradientReducer, "
            "DeepSpeed's overlapped reduction); report: only reports what it would change; off: the plan "
            "stays fixed",
            default="on",
            choices=("on", "report", "off"),
        ),
        Option(
            "restart",
            "report (default): reports changes that need a restart, and their gain; auto: the job restarts "
            "with them after its next checkpoint, under torchrun --max-restarts (layers of megatron-core's "
            "stages; --holmes-adapt on)",
            default="report",
            choices=("report", "auto"),
        ),
    ),
    hooks={
        "on_step": "holmes_ext.adapt.learning:begin_step",
        "on_reduction": "holmes_ext.adapt.learning:begin_sums",
        "on_checkpoint": "holmes_ext.adapt.restart:saved",
        "on_stop": "holmes_ext.adapt.learning:on_stop",
    },
    is_active=is_active,
    applies_to=applies_to,
)

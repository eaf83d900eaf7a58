"""Layers of each stage that a job leaves in its store for its next start.

torchrun's agents keep the store while they start the job again (--holmes-restart auto).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from holmes_ext.plan.sizes import Sizes

_KEY = "holmes/restart"


def leave_layers(store: Any, layers: str, sizes: Sizes) -> None:
    """Keep the layers of each stage for the next start of a job.

    Args:
        store: The job's store.
        layers: As --holmes-partition takes them, such as "5,3".
        sizes: The parallel sizes of the job.
    """
    store.set(_KEY, json.dumps({"partition": layers, "sizes": asdict(sizes)}))


def left_layers(store: Any) -> tuple[str, Sizes | None]:
    """Return the layers and sizes that the previous start of the job has left; ("", None) if it left none."""
    if not store.check([_KEY]):
        return "", None
    left = json.loads(store.get(_KEY))
    return left["partition"], Sizes(**left["sizes"])

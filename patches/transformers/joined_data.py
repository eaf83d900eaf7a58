"""Joined jobs of transformers' Trainer (docs/joined.md): its optimizer is torch's; get_train_dataloader sees
this job's part as train_dataset, and makes and prepares a sampler of that."""

from __future__ import annotations

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.patches.transformers.features import JOINED
from holmes_ext.runtime.outer.data import part_of


@by_name
def _share_out(call, instance):
    """Trainer.get_train_dataloader(), or a script's own that calls it."""
    whole = instance.train_dataset
    instance.train_dataset = part_of(whole)
    try:
        return call()
    finally:
        instance.train_dataset = whole


PATCHES = (
    Patch(JOINED, "transformers.trainer:Trainer.get_train_dataloader",
          "joined jobs read different parts of one data set", _share_out),
)  # fmt: skip

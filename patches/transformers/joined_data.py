"""Joined jobs of transformers' Trainer (docs/joined.md), which read different parts of one data set.

While Trainer.get_train_dataloader runs, Trainer.train_dataset is this job's part of the data set. The
Trainer's sampler and data loader are therefore made for that part alone. The weights need no patch here: the
Trainer's optimizer is torch's (patches/torch/joined.py).
"""

from __future__ import annotations

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.patches.transformers.features import JOINED
from holmes_ext.runtime.outer.data import part_of


@by_name
def _load_job_part(call, instance):
    """Make the data loader of a Trainer for this job's part of its train_dataset.

    The whole data set is put back afterwards. A subclass may override get_train_dataloader and call it.
    """
    whole_dataset = instance.train_dataset
    instance.train_dataset = part_of(whole_dataset)
    try:
        return call()
    finally:
        instance.train_dataset = whole_dataset


PATCHES = (
    Patch(JOINED, "transformers.trainer:Trainer.get_train_dataloader",
          "joined jobs read different parts of one data set", _load_job_part),
)  # fmt: skip

"""Makes transformers' Trainer read only this job's part of the data set, if several jobs train one model.

Such jobs ("joined jobs", --holmes-join) exchange their weights from time to time, and should read different
data (--holmes-outer part=k/K). While Trainer.get_train_dataloader runs, holmes replaces the Trainer's
train_dataset by this job's part. So the Trainer makes its sampler and data loader for this part only.

The exchange of weights needs no code here: it uses hooks of torch's optimizers
(holmes_ext/join/patches/torch.py).
"""

from __future__ import annotations

from holmes_ext.join.data import part_of
from holmes_ext.join.patches.transformers_features import JOINED
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name


@by_name
def _load_job_part(call, instance):
    """Return the training data loader of a Trainer, made for this job's part of the data set only.

    Wrapper of Trainer.get_train_dataloader; call() runs the original.

    The job is one of several that train one model together (--holmes-join). While the loader is made,
    `train_dataset` of the Trainer is this job's part (--holmes-outer part=k/K).
    """
    whole_dataset = instance.train_dataset
    instance.train_dataset = part_of(whole_dataset)
    try:
        return call()
    finally:
        instance.train_dataset = whole_dataset


PATCHES = (
    Patch(
        JOINED,
        "transformers.trainer:Trainer.get_train_dataloader",
        "joined jobs read different parts of one data set",
        _load_job_part,
    ),
)

"""Joined jobs of Megatron-LM and Megatron-DeepSpeed read parts of one data set (--holmes-outer part=k/K).

    build_train_valid_test_datasets    asks for K times as many samples: all jobs build the same index of them
    build_pretraining_data_loader      sees samples k, k + K, k + 2 K, ... of it as its data set

So no sample is read twice, whatever the samplers and batch sizes; consumed_samples stay the job's own. The
same index needs the same --train-samples (or iterations x batch) and --seed."""

from __future__ import annotations

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.patches.megatron.features import JOINED_LM_DATA, JOINED_MDS_DATA
from holmes_ext.runtime.outer import training
from holmes_ext.runtime.outer.data import part_of


@by_name
def _enlarge(wrapped, instance, build_train_valid_test_datasets_provider, *rest, **more):
    """build_train_valid_test_datasets: the provider is called with the numbers of samples."""
    _, parts = training.part()

    def provider(numbers, *others, **named):
        enlarged = [None if number is None else number * parts for number in numbers]
        return build_train_valid_test_datasets_provider(type(numbers)(enlarged), *others, **named)

    return wrapped(build_train_valid_test_datasets_provider if parts == 1 else provider, *rest, **more)


@by_name
def _share_out(wrapped, instance, dataset, *rest, **more):
    return wrapped(part_of(dataset), *rest, **more)


_DATASETS, _LOADER = "build_train_valid_test_datasets", "build_pretraining_data_loader"
PATCHES = tuple(
    patch
    for feature, module, data in (
        (JOINED_LM_DATA, "megatron.training.training", "megatron.training.datasets.data_samplers"),
        (JOINED_MDS_DATA, "megatron.training", "megatron.data.data_samplers"),
    )
    for patch in (
        Patch(feature, f"{module}:{_DATASETS}", "the jobs' parts together are the data set", _enlarge),
        Patch(feature, f"{data}:{_LOADER}", "joined jobs read different parts of one data set", _share_out),
    )
)  # fmt: skip

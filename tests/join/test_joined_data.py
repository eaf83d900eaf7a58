"""Tests that joined jobs, which train one model together, read different samples of Megatron's data sets.

With --holmes-outer part=k/K, a job reads samples k, k + K, k + 2 K, ... of a data set.
"""

import pickle
from collections import Counter

import pytest

from holmes_ext.join import data, training
from holmes_ext.join.patches import megatron as joined
from holmes_ext.options import options_from


class Data(list):
    split = "train"


@pytest.fixture
def job():
    """Make this process's job one that reads part k of K."""

    def of(outer):
        training.request(options_from(join="east@127.0.0.1:1", outer=outer))

    yield of
    training.end()


def loader(dataset, consumed_samples, micro_batch=2, rank=0, ranks=1):
    """Return the batches that MegatronPretrainingSampler hands out.

    They are contiguous, and come after the consumed samples.
    """
    places = range(consumed_samples, len(dataset))
    size = micro_batch * ranks
    return [
        dataset[i]
        for start in range(0, len(places) - size + 1, size)
        for i in places[start + rank * micro_batch : start + (rank + 1) * micro_batch]
    ]


def read(dataset, outer, job, **sizes):
    job(outer)
    try:
        return [
            sample
            for rank in range(sizes.get("ranks", 1))
            for sample in joined._share_out(loader, None, (dataset, 0), {**sizes, "rank": rank})
        ]
    finally:
        training.end()


def test_jobs_of_different_batches_read_each_sample_once(job):
    whole = Data(range(48))
    east = read(whole, "part=0/2", job, micro_batch=3, ranks=2)
    west = read(whole, "part=1/2", job, micro_batch=2, ranks=4)
    assert Counter(east + west) == Counter(whole) and not set(east) & set(west)


def test_a_part_looks_like_the_data_set():
    share = data.Share(Data(range(8)), 2, 3)
    assert list(share) == [2, 5] == [pickle.loads(pickle.dumps(share))[i] for i in range(2)]
    assert share.split == "train" and not hasattr(share, "collate")


def test_all_jobs_build_an_index_of_all_parts(job):
    """If three joined jobs share a data set, each has Megatron build three times the samples it needs."""
    job("part=1/3")  # this job reads the second of three parts
    needed = (100, None, 8)  # samples for training, validation and test; None: all samples
    numbers_for_provider = []
    provider = (
        numbers_for_provider.append
    )  # stands in for the script's function that builds the data sets

    def build_train_valid_test_datasets(build_train_valid_test_datasets_provider, numbers):
        build_train_valid_test_datasets_provider(numbers)

    # Called as a wrapper: the wrapped function, no instance, and the program's arguments.
    joined._enlarge(build_train_valid_test_datasets, None, (provider, needed), {})
    assert numbers_for_provider == [(300, None, 24)]


def test_without_parts_and_for_loaders_of_the_script_nothing_changes(job):
    """Megatron's data loader gets the script's data unchanged if no job shares it, or if it has no index."""

    def data_of_loader(data):
        def build_pretraining_data_loader(dataset):
            return dataset

        # Called as a wrapper: the wrapped function, no instance, and the program's arguments.
        return joined._share_out(build_pretraining_data_loader, None, (data,), {})

    indexed_data = Data(range(4))
    assert data_of_loader(indexed_data) is indexed_data  # before any job is joined
    job("part=0/2")  # from here on, two jobs share the data
    assert data_of_loader(None) is None  # a rank without data, as in Megatron
    stream = iter(range(4))  # data without an index
    assert data_of_loader(stream) is stream

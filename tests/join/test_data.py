"""Tests how joined jobs divide a data set: each job trains on its own part of it.

Joined jobs are separate training jobs that regularly average their weights (DiLoCo). With transformers'
Trainer, the data loader must get only the job's part.
"""

from types import SimpleNamespace

import pytest
from torch.utils.data import IterableDataset

from holmes_ext.join import training
from holmes_ext.join.data import part_of
from holmes_ext.join.patches import transformers as joined_data
from holmes_ext.options import options_from


@pytest.fixture
def second_of_three():
    training.request(options_from(join="east@127.0.0.1:1", outer="part=1/3"))
    yield
    training.end()


class Sharded(list):
    """Hugging Face's data sets shard themselves."""

    def shard(self, num_shards, index, contiguous):
        return "theirs", num_shards, index, contiguous


class Stream(IterableDataset):
    def __len__(self):
        return 7

    def __iter__(self):
        return iter(range(7))


def test_parts(second_of_three):
    assert list(part_of(range(8))) == [1, 4, 7] and part_of(None) is None
    assert part_of(Sharded("abc")) == ("theirs", 3, 1, False)
    assert training._job.is_data_divided


def test_a_stream_is_the_script_s_own(second_of_three):
    stream = Stream()
    assert part_of(stream) is stream and not training._job.is_data_divided


def test_the_trainer_s_loader_is_of_the_part_and_its_data_set_stays_whole(second_of_three):
    trainer = SimpleNamespace(train_dataset=list(range(8)))
    loader = joined_data._load_job_part(lambda: list(trainer.train_dataset), trainer, (), {})
    assert loader == [1, 4, 7] and trainer.train_dataset == list(range(8))
    with pytest.raises(ValueError):
        joined_data._load_job_part(lambda: [].index(1), trainer, (), {})
    assert trainer.train_dataset == list(range(8))

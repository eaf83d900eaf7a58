"""A joined job's part of a data set: samples k, k + K, k + 2 K, ... (--holmes-outer part=k/K).

No sample is read by two jobs, with any sampler, batch size and number of ranks.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.join import training


class Share:
    """Every K-th sample of a map-style data set, for one of K jobs that train the same model.

    Job k (0 to K - 1) gets samples k, k + K, k + 2K, ... Attributes other than length and items are
    those of the whole data set.

    Args:
        dataset: The whole data set.
        k: Number of this job, from 0.
        parts: Number of jobs, K.
    """

    def __init__(self, dataset: Any, k: int, parts: int):
        self._dataset = dataset
        self._k = k
        self._parts = parts

    def __len__(self) -> int:
        return (len(self._dataset) - self._k + self._parts - 1) // self._parts

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._dataset[self._k + index * self._parts]

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look for special methods before __init__ has set _dataset.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


def part_of(dataset: Any) -> Any:
    """Return this job's part of a map-style data set: samples k, k + K, k + 2 K, ...

    K joined jobs divide the data set (--holmes-outer part=k/K).

    Returns:
        The data set itself, if the jobs do not divide it, or if it is a stream: the script must divide that.
    """
    k, parts = training.data_part()  # k and K
    if parts == 1 or dataset is None:
        return dataset
    from torch.utils.data import IterableDataset

    is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        return dataset
    training.mark_data_divided()  # otherwise the user is told that the script must divide the data
    if hasattr(dataset, "shard"):  # a data set of Hugging Face; the result is, too
        return dataset.shard(num_shards=parts, index=k, contiguous=False)
    return Share(dataset, k, parts)

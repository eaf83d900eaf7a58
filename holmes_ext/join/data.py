"""A joined job's part of a data set: samples k, k + K, k + 2 K, ... (--holmes-outer part=k/K).

So whatever sampler reads it, and whatever the jobs' batch sizes and ranks are, no sample is read by two jobs.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.join import training


class Share:
    """Samples k, k + K, ... of a map-style data set; all else is the data set's."""

    def __init__(self, dataset: Any, k: int, parts: int):
        self._dataset, self._k, self._parts = dataset, k, parts

    def __len__(self) -> int:
        return (len(self._dataset) - self._k + self._parts - 1) // self._parts

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._dataset[self._k + index * self._parts]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a worker's copy asks before anything is set
            raise AttributeError(name)
        return getattr(self._dataset, name)


def part_of(dataset: Any) -> Any:
    """Of a map-style data set; the whole where there is one part, or it is a stream (the script's own)."""
    k, parts = training.part()
    if parts == 1 or dataset is None:
        return dataset
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        return dataset
    training.share()
    if hasattr(dataset, "shard"):  # Hugging Face's: stays one of its kind
        return dataset.shard(num_shards=parts, index=k, contiguous=False)
    return Share(dataset, k, parts)

"""The training text and the order in which a job reads it.

The text is the English of ``pydoc_data.topics``, the documentation that ``help()`` prints: about half a
megabyte (it differs between versions) that every Python installation has, read as bytes. It is cut into
windows of one sequence each; every epoch visits all windows once in its own shuffled order.

The samples of a job are numbered 0, 1, 2, ... and dealt out step by step, micro-batch by micro-batch,
data-parallel rank by data-parallel rank:

    number = ((step * micro_batches + micro_batch) * data_ranks + data_rank) * rows + row

What a number stands for depends on the seed alone. So a step's global batch does not depend on which machine
holds which rank, a resumed job continues with the next number, and 4 micro-batches on 2 ranks are the same
batch as 8 on 1 rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pydoc_data.topics import topics

import torch


def load_text() -> torch.Tensor:
    """Return the training text as bytes: uint8, one dimension."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, windows: int) -> torch.Tensor:
    """Return the order in which an epoch visits the windows: a permutation of range(windows)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(windows, generator=generator)


@dataclass(frozen=True)
class Batches:
    """Micro-batches of one data-parallel rank.

    Raises:
        ValueError: the text is too short for one sample.
    """

    text: torch.Tensor  # uint8 [bytes]
    sequence: int  # bytes in a sample
    rows: int  # samples in a micro-batch of one rank
    micro_batches: int  # micro-batches in a step
    data_ranks: int  # number of data-parallel ranks
    data_rank: int  # number of this data-parallel rank
    seed: int  # seed of the order of samples

    def __post_init__(self):
        if self.windows < 1:
            raise ValueError(
                f"a sequence of {self.sequence} bytes and the byte after it do not fit in the text's"
                f" {len(self.text)} bytes"
            )
        assert 0 <= self.data_rank < self.data_ranks

    @property
    def windows(self) -> int:
        """Number of samples in one epoch.

        A sample also needs the byte that follows it, which is its last label.
        """
        return (len(self.text) - 1) // self.sequence

    def sample(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels of a sample: int64 [sequence] each.

        A label is the byte that follows its token.

        Args:
            number: Number of the sample in the whole job.
        """
        epoch, position = divmod(number, self.windows)
        window = int(epoch_order(self.seed, epoch, self.windows)[position])
        start = window * self.sequence
        piece = self.text[start : start + self.sequence + 1].long()
        return piece[:-1], piece[1:]

    def step(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield tokens and labels of this rank's micro-batches of a step.

        Both are int64 [rows, sequence].

        Args:
            step: Number of the step, from 0.
        """
        for micro_batch in range(self.micro_batches):
            micro_batches_before = step * self.micro_batches + micro_batch
            parts_before = micro_batches_before * self.data_ranks + self.data_rank
            first = parts_before * self.rows
            samples = [self.sample(number) for number in range(first, first + self.rows)]
            tokens, labels = zip(*samples)
            yield torch.stack(tokens), torch.stack(labels)

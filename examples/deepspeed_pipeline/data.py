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
    """The text as bytes: uint8, one dimension."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, windows: int) -> torch.Tensor:
    """The order in which an epoch visits the windows: a permutation of range(windows)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(windows, generator=generator)


@dataclass(frozen=True)
class Batches:
    """What one data-parallel rank reads.

    text: uint8 [bytes]; sequence: bytes in a sample; rows: samples in a micro-batch of one rank.
    Raises ValueError when the text is too short for one sample.
    """

    text: torch.Tensor
    sequence: int
    rows: int
    micro_batches: int
    data_ranks: int
    data_rank: int
    seed: int

    def __post_init__(self):
        if self.windows < 1:
            raise ValueError(
                f"a sequence of {self.sequence} bytes and the byte after it do not fit in the text's"
                f" {len(self.text)} bytes"
            )
        assert 0 <= self.data_rank < self.data_ranks

    @property
    def windows(self) -> int:
        """Samples in one epoch. A sample needs the byte that follows it too: its last label."""
        return (len(self.text) - 1) // self.sequence

    def sample(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels (the same, one byte later) of a sample: int64 [sequence] each."""
        epoch, place = divmod(number, self.windows)
        start = int(epoch_order(self.seed, epoch, self.windows)[place]) * self.sequence
        piece = self.text[start : start + self.sequence + 1].long()
        return piece[:-1], piece[1:]

    def step(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's micro-batches of a step (counted from 0): tokens and labels, int64 [rows, sequence]
        each."""
        for micro_batch in range(self.micro_batches):
            first = (
                (step * self.micro_batches + micro_batch) * self.data_ranks + self.data_rank
            ) * self.rows
            tokens, labels = zip(
                *(self.sample(number) for number in range(first, first + self.rows))
            )
            yield torch.stack(tokens), torch.stack(labels)

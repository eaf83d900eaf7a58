"""Weights that a rank holds, as ranges of flat elements: reading, comparing, checksums.

All weights at a position of the model-parallel grid (a pipeline stage, a tensor-parallel rank) are numbered
in the model's order, tensor after tensor. Element i is the same weight in every job (ownership.py).

The patch of a framework makes the parts of a rank: flat views of the tensors that the inner optimizer steps
(the main weights in float32, if there are any). Reading and writing goes through host memory, fragment by
fragment.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holmes_ext.errors import HolmesError
from holmes_ext.join.orthogonal import Matrix, is_matrix
from holmes_ext.join.shards.ownership import Range

#: Elements whose checksum is computed at a time.
_CHUNK = 2**18
#: Checksums are sums modulo 2^64.
CHECKSUM_MASK = 2**64 - 1
#: Tensors that are described to the other jobs one by one; more are summarized.
_NAMED = 2000


@dataclass(frozen=True)
class Tensor:
    """Name, whole shape and dtype of a tensor of the model; its values are not included."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of the tensor that the optimizer steps, such as "float32"

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Part:
    """Consecutive elements of the flat model (all tensors, one after the other) that a rank holds.

    A part has the index of its first element, and a view of the values.
    """

    start: int
    values: torch.Tensor  # flat view of the tensor that the inner optimizer steps, on its device

    @property
    def stop(self) -> int:
        """Return the element after the last."""
        return self.start + self.values.numel()


class Weights:
    """Weights of a rank, as views of the tensors that the inner optimizer steps."""

    def __init__(
        self,
        position: str,
        tensors: Sequence[Tensor],
        parts: Iterable[Part],
        moved: Callable[[], bool] = lambda: False,
    ):
        """Store the views in the order of their elements, after checking that none overlap.

        Args:
            position: This rank's position in the model-parallel grid ("pipeline 0, tensor 1").
            tensors: All tensors at this position, in the model's order. Together with other ranks
                (ZeRO, FSDP), this rank holds them. Their elements are numbered in this order.
            parts: Ranges of these elements that this rank holds, in any order.
            moved: Returns whether the framework has put the weights in other memory since `parts`
                were made. The parts are views, so they would then show outdated values.
        """
        self.position = position
        self.tensors = tuple(tensors)
        self.moved = moved
        self.parts = sorted(parts, key=lambda part: part.start)
        self.total = sum(tensor.numel for tensor in self.tensors)
        for before, after in zip(self.parts, self.parts[1:]):
            assert before.stop <= after.start, f"parts overlap at element {after.start}"
        assert all(part.values.dim() == 1 and part.values.is_contiguous() for part in self.parts)

    @property
    def holdings(self) -> list[Range]:
        """Return the ranges of elements that this rank holds; adjacent ranges are merged."""
        merged: list[Range] = []
        for part in self.parts:
            if merged and merged[-1][1] == part.start:
                merged[-1] = (merged[-1][0], part.stop)
            elif part.values.numel():
                merged.append((part.start, part.stop))
        return merged

    @property
    def digest(self) -> str:
        """Return a digest of the names, shapes and dtypes of `tensors`.

        It is equal on all ranks at the same position of the model-parallel grid (`position`).
        """
        text = json.dumps([[tensor.name, tensor.shape, tensor.dtype] for tensor in self.tensors])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def device(self) -> torch.device:
        """Return the device of the weights; the CPU for a rank without weights."""
        return self.parts[0].values.device if self.parts else torch.device("cpu")

    @property
    def matrices(self) -> list[Matrix]:
        """Return the tensors that Muon's outer step orthogonalizes as matrices."""
        starts = tensor_starts(self.tensors)
        return [
            Matrix(starts[tensor.name], *tensor.shape)
            for tensor in self.tensors
            if is_matrix(tensor.shape)
        ]

    def named(self) -> Any:
        """Return a readable description of `tensors`; it must be equal in all jobs.

        Returns:
            {name: shape and dtype}; if there are many tensors, a line of text with their digest.
        """
        if len(self.tensors) > _NAMED:
            return f"{len(self.tensors)} tensors of {self.total} elements, digest {self.digest}"
        return {tensor.name: f"{list(tensor.shape)} {tensor.dtype}" for tensor in self.tensors}

    def held(self, start: int, stop: int) -> list[Part]:
        """Return views of this rank's elements in the range [start, stop) of the flat model."""
        parts = []
        for part in self.parts:
            first = max(part.start, start)
            last = min(part.stop, stop)
            if first < last:
                view = part.values[first - part.start : last - part.start]
                parts.append(Part(first, view))
        return parts

    def checksum(self) -> int:
        """Return a checksum of the values of all weights that this rank holds.

        The checksum is a sum modulo 2^64. Each element adds a term that depends on its value and on
        its index among the model's flat elements. So the sum over several ranks does not depend on
        how the elements are divided among them.
        """
        total = 0
        # self.position serves as salt below: so equal elements at different positions of the
        # model-parallel grid give different checksums.
        for part in self.parts:
            start = part.start  # index of the chunk's first element
            for chunk in part.values.split(_CHUNK):
                total += checksum(chunk.to("cpu", torch.float32), start, self.position)
                start += chunk.numel()
        return total & CHECKSUM_MASK

    def read(self, ranges: Sequence[Range], out: torch.Tensor) -> torch.Tensor:
        """Copy the elements of the ranges, one range after the other, into `out` (float32, host)."""
        offset = 0  # of the current range in `out`
        for start, stop in ranges:
            for part in self.held(start, stop):
                first = offset + part.start - start
                out[first : first + part.values.numel()].copy_(part.values)
            offset += stop - start
        return out


def tensor_starts(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Return the position of each tensor in the flat weights: its name -> index of its first element.

    The flat weights are all tensors at this position of the model-parallel grid, one after the
    other.

    Args:
        tensors: All these tensors, in the model's order.

    Raises:
        HolmesError: Two tensors have the same name.
    """
    starts: dict[str, int] = {}
    start = 0
    for tensor in tensors:
        if tensor.name in starts:
            raise HolmesError(
                f"two tensors of the model are named {tensor.name!r}; jobs can only join when names are "
                f"different"
            )
        starts[tensor.name] = start
        start += tensor.numel
    return starts


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, without a copy."""
    return tensor.view(torch.uint8).numpy().data


def checksum(values: torch.Tensor, start: int, salt: str) -> int:
    """Return a checksum of elements and their positions; those of parts add up modulo 2^64.

    Each element's bits are multiplied by an odd number that depends on its position and the salt.
    These numbers cannot be predicted before the salt is known. So a job cannot construct other
    elements with the same checksum in advance.

    Args:
        values: Flat tensor, float32 or bfloat16. bfloat16 is converted to float32 first.
        start: Position of the first element in the flat weights.
        salt: Any text. Checksums of other salts cannot be compared.
    """
    total = 0
    salt_digest = hashlib.sha256(salt.encode()).digest()
    seed = int.from_bytes(salt_digest[:8], "big", signed=True)  # 64 bits of it
    for offset in range(0, values.numel(), _CHUNK):
        bits = values[offset : offset + _CHUNK].float().view(torch.int32).to(torch.int64)
        first = start + offset
        positions = torch.arange(first, first + bits.numel(), dtype=torch.int64, device=bits.device)
        odd_multipliers = _mixed(positions.add_(seed)) | 1  # pseudorandom, one for each position
        total += int((bits * odd_multipliers).sum())
    return total & CHECKSUM_MASK


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's finalizer (Steele et al. 2014) to int64 numbers, in place."""
    for shift, mask, factor in _MIX:
        numbers ^= (numbers >> shift) & mask  # the mask makes it a shift that fills with zeros
        numbers *= factor
    return numbers


#: Rounds of the finalizer: shift, mask of the bits that the shift leaves, factor as a signed number.
_MIX = ((30, 2**34 - 1, 0xBF58476D1CE4E5B9 - 2**64), (27, 2**37 - 1, 0x94D049BB133111EB - 2**64))

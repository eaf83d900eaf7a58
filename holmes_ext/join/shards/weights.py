"""The weights that one rank holds, as ranges of its position's row of elements (ownership.py): read, written,
compared.

A framework's patch makes the parts: views of the tensors that its optimizer steps (main weights in float32
where there are some). A part is contiguous; reading and writing goes through host memory, one fragment at a
time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holmes_ext.errors import HolmesError
from holmes_ext.join.orthogonal import Matrix, is_matrix
from holmes_ext.join.shards.ownership import Range

#: Elements whose checksum is taken at a time.
_CHUNK = 2**18
_MASK = 2**64 - 1
#: Tensors of a row that are named to the other jobs one by one.
_NAMED = 2000


@dataclass(frozen=True)
class Tensor:
    """One tensor of the row, as the whole job knows it. dtype: of what the optimizer steps."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Part:
    """Elements [start, ...) of the row; values: a flat view of what training steps, on its device."""

    start: int
    values: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


class Weights:
    """position: where in the model-parallel grid, such as "pipeline 0, tensor 1"; tensors: its row in order;
    parts: what this rank holds; moved: whether the framework has put other memory in their place.
    """

    def __init__(
        self,
        position: str,
        tensors: Sequence[Tensor],
        parts: Iterable[Part],
        moved: Callable[[], bool] = lambda: False,
    ):
        self.position, self.tensors, self.moved = position, tuple(tensors), moved
        self.parts = sorted(parts, key=lambda part: part.start)
        self.total = sum(tensor.numel for tensor in self.tensors)
        for before, after in zip(self.parts, self.parts[1:]):
            assert before.stop <= after.start, f"parts overlap at element {after.start}"
        assert all(part.values.dim() == 1 and part.values.is_contiguous() for part in self.parts)

    @property
    def holdings(self) -> list[Range]:
        """Ranges that this rank holds, touching ones made one."""
        merged: list[Range] = []
        for part in self.parts:
            if merged and merged[-1][1] == part.start:
                merged[-1] = (merged[-1][0], part.stop)
            elif part.values.numel():
                merged.append((part.start, part.stop))
        return merged

    @property
    def digest(self) -> str:
        """Of names, shapes and types of the whole row."""
        text = json.dumps([[tensor.name, tensor.shape, tensor.dtype] for tensor in self.tensors])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def device(self) -> torch.device:
        return self.parts[0].values.device if self.parts else torch.device("cpu")

    @property
    def matrices(self) -> list[Matrix]:
        """The tensors that Muon's step takes as one, by their places in the row."""
        starts = row_of(self.tensors)
        return [
            Matrix(starts[tensor.name], *tensor.shape)
            for tensor in self.tensors
            if is_matrix(tensor.shape)
        ]

    def named(self) -> Any:
        """The row for people: {name: shape and type}, or a count and the digest where that would be long."""
        if len(self.tensors) > _NAMED:
            return f"{len(self.tensors)} tensors of {self.total} elements, digest {self.digest}"
        return {tensor.name: f"{list(tensor.shape)} {tensor.dtype}" for tensor in self.tensors}

    def held(self, start: int, stop: int) -> list[Part]:
        """What this rank holds of [start, stop), as parts: views."""
        parts = []
        for part in self.parts:
            a, b = max(part.start, start), min(part.stop, stop)
            if a < b:
                parts.append(Part(a, part.values[a - part.start : b - part.start]))
        return parts

    def checksum(self) -> int:
        """Of all that this rank holds."""
        sums = (
            checksum(chunk.to("cpu", torch.float32), part.start + k * _CHUNK, self.position)
            for part in self.parts
            for k, chunk in enumerate(part.values.split(_CHUNK))
        )
        return sum(sums) & _MASK

    def read(self, ranges: Sequence[Range], out: torch.Tensor) -> torch.Tensor:
        """The elements of `ranges`, one after the other, into `out` (float32, host)."""
        place = 0
        for start, stop in ranges:
            for part in self.held(start, stop):
                at = place + part.start - start
                out[at : at + part.values.numel()].copy_(part.values)
            place += stop - start
        return out


def row_of(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Where each tensor begins in the row."""
    starts, place = {}, 0
    for tensor in tensors:
        if tensor.name in starts:
            raise HolmesError(
                f"two tensors of the model are named {tensor.name!r}; jobs can only join when names are "
                f"different"
            )
        starts[tensor.name] = place
        place += tensor.numel
    return starts


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor on the host, without a copy."""
    return tensor.view(torch.uint8).numpy().data


def checksum(values: torch.Tensor, start: int, salt: str) -> int:
    """Of the bits of elements (float32, or bfloat16 by its exact value) and where they stand: a sum modulo
    2^64, so that those of parts add up to the whole's. Who does not know the salt cannot find other elements
    with the same sum: each is multiplied by a number that looks random without it."""
    total = 0
    seed = int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "big", signed=True)
    for place in range(0, values.numel(), _CHUNK):
        bits = values[place : place + _CHUNK].float().view(torch.int32).to(torch.int64)
        first = start + place
        where = torch.arange(first, first + bits.numel(), dtype=torch.int64, device=bits.device)
        total += int((bits * (_mixed(where.add_(seed)) | 1)).sum())
    return total & _MASK


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer (Steele et al. 2014), of int64 in place; shifts fill with zeros."""
    for shift, keep, factor in _MIX:
        x ^= (x >> shift) & keep
        x *= factor
    return x


#: Shift, the bits that it leaves, and the factor as a signed number.
_MIX = ((30, 2**34 - 1, 0xBF58476D1CE4E5B9 - 2**64), (27, 2**37 - 1, 0x94D049BB133111EB - 2**64))

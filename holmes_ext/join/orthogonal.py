"""Muon's direction of a matrix (Jordan et al. 2024, kellerjordan.github.io/posts/muon: Newton-Schulz), with
the same bits on every machine.

Jobs must have the same anchors bit for bit, and a matrix product is rounded otherwise on another CPU or
GPU. So here no product is rounded: elements are multiples of 2^-25 in float64, rows and columns are at
most 1.7 long (B: 2.8), thus every product is a multiple of 2^-50 and every sum of some of them below 2^3.
float64 has 53 bits: all sums are exact, in any order, fused or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

_GRID = 2.0**25
#: Of lengths: elements are counted in 2^-16 of the largest, and squares summed as whole numbers.
_LENGTH_GRID = 2.0**16
#: Coefficients of the odd polynomial that moves singular values to about 1, and how often it is applied.
_A, _B, _C, _STEPS = 3.4445, -4.7750, 2.0315, 5
#: Tables of a vocabulary, whose rows are steps of their own, are longer than any layer's matrix.
_LONGEST = 16


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape is made orthogonal: a layer's weight, that is."""
    return len(shape) == 2 and 1 < min(shape) and max(shape) <= _LONGEST * min(shape)


@dataclass(frozen=True)
class Matrix:
    """Elements [start, start + rows * columns) of a flat tensor."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


@dataclass(frozen=True)
class Matrices:
    """Those that a flat tensor on the host holds whole; device: where they are worked on."""

    places: Sequence[Matrix] = ()
    device: torch.device | str = "cpu"

    #: Whether orthogonalize() is collective over ranks of the job.
    needs_others: ClassVar[bool] = False

    def orthogonalize(self, flat: torch.Tensor) -> None:
        """Each matrix becomes the nearest one with orthogonal rows or columns, about, and as long as it was
        (Frobenius). In place; float32."""
        for place in self.places:
            values = flat[place.start : place.stop]
            matrix = values.view(place.rows, place.columns).to(self.device)
            values.copy_(orthogonal(matrix).flatten())


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Of a float32 matrix, in float32; zeros stay zeros."""
    length = frobenius(matrix)
    if not length:
        return matrix
    x = _rounded(matrix.double().div_(length))
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(_STEPS):
        square = _rounded(x @ x.T)
        polynomial = _rounded((square @ square).mul_(_C).add_(square * _B))
        x = _rounded((polynomial @ x).add_(x * _A))
    result = (x if wide else x.T).float()
    return result.mul_(length / frobenius(result))


def frobenius(matrix: torch.Tensor) -> float:
    """The length of a float32 matrix, to 1 % and with the same bits everywhere."""
    largest = float(matrix.abs().max())
    counts = matrix.double().mul_(_LENGTH_GRID / largest if largest else 0.0).round_().long()
    return math.sqrt(int(counts.square().sum())) * largest / _LENGTH_GRID


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(_GRID).round_().div_(_GRID)

"""Orthogonalization of matrices for Muon's outer step, with the same bits on every machine.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces a step M = U S V' by U V', computed
approximately by a Newton-Schulz iteration:

    Q = b X X' + c (X X')^2        X <- a X + Q X        (a, b, c: constants)

The jobs must have the same anchors (weights after the last outer step) bit for bit. But the rounding of a
matrix product depends on the order of its sums, and this order differs between CPUs and GPUs. So here all
matrix products are exact in float64:

1. Before each product, the elements of both matrices are rounded to multiples of 2^-25. The product of two
   elements is then a multiple of 2^-50.
2. An element of a matrix product is a sum of such products. It is at most the length of a row times
   the length of a column, and these are at most the largest singular values s of the two matrices:
       X       s <= 1.01 at first, because the Frobenius norm is 1, to 1 %. An iteration maps s to
               a s + b s^3 + c s^5: below 1.21 for all s from 0 to 1.21
       X X'    s^2, below 1.5
       Q       |b s^2 + c s^4|, below 2.9
   So sums are below 1.5 in X X', 1.5 x 1.5 = 2.3 in (X X')^2, and 2.9 x 1.21 = 3.6 in Q X.
3. A multiple of 2^-50 below 2^3 = 8 fits in the 53 bits of a float64. So no sum is rounded, in any
   order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

#: Elements of matrices are rounded to multiples of 1 / _GRID. Products of two are then multiples of
#: 2^-50, and sums of these below 2^3 need 53 bits, as many as a float64 has.
_GRID = 2.0**25
#: To compute a length, elements are rounded to multiples of (largest element) / _LENGTH_GRID.
_LENGTH_GRID = 2.0**16
#: Coefficients a, b, c of the Newton-Schulz iteration; it moves singular values to about 1.
_A = 3.4445
_B = -4.7750
_C = 2.0315
#: Newton-Schulz iterations.
_STEPS = 5
#: Largest ratio of the sides of a layer's matrix. The embedding of a vocabulary has a larger ratio; each of
#: its rows is a step of its own.
_LONGEST = 16
#: Dimensions of a matrix.
_MATRIX_DIMENSIONS = 2


def is_matrix(shape: Sequence[int]) -> bool:
    """Return whether Muon orthogonalizes a tensor of this shape.

    Muon orthogonalizes the weight matrices of layers, but not embeddings: tensors with two dimensions, both
    greater than 1, the longer at most 16 times the shorter.
    """
    if len(shape) != _MATRIX_DIMENSIONS:
        return False
    shorter, longer = sorted(shape)
    return shorter > 1 and longer <= _LONGEST * shorter


@dataclass(frozen=True)
class Matrix:
    """Position and size of a row-major weight matrix in a flat tensor."""

    start: int  # first element
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """Return the element after the last."""
        return self.start + self.rows * self.columns


@dataclass(frozen=True)
class Matrices:
    """Positions of weight matrices within a flat CPU tensor; orthogonalize() changes them one by one.

    It copies each matrix to `device`, computes there, and writes the result back.
    """

    places: Sequence[Matrix] = ()
    device: torch.device | str = "cpu"  # device that computes

    #: orthogonalize() is collective over ranks of the job.
    needs_others: ClassVar[bool] = False

    def orthogonalize(self, flat: torch.Tensor) -> None:
        """Replace each matrix by a multiple of the nearest orthogonal matrix, in place.

        The multiple has the Frobenius norm that the matrix had. The orthogonal matrix (U V' of the
        singular value decomposition U S V') is approximate: a few Newton-Schulz iterations.

        Args:
            flat: Flat float32 tensor that contains the matrices.
        """
        for place in self.places:
            values = flat[place.start : place.stop]
            matrix = values.view(place.rows, place.columns).to(self.device)
            values.copy_(orthogonal(matrix).flatten())  # scaled to the norm of `matrix`


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return the nearest orthogonal matrix (approximately), scaled to the Frobenius norm of `matrix`.

    All machines get the same bits, because the matrix products are exact. Their factors are rounded
    to multiples of 2^-25, so each product of two elements is a multiple of 2^-50. Sums of such
    products are below 2^3, so they fit in the 53 bits of a float64. They are not rounded, in
    whatever order they are computed.

    Args:
        matrix: float32 matrix. A matrix of zeros is returned as it is.
    """
    length = frobenius(matrix)
    if not length:
        return matrix
    x = _rounded(matrix.double().div_(length))
    is_wide = x.shape[0] <= x.shape[1]
    if not is_wide:
        x = x.T  # so that x @ x.T is the smaller of the two products
    for _ in range(_STEPS):  # Newton-Schulz: X <- a X + (b X X' + c (X X')^2) X
        square = _rounded(x @ x.T)
        polynomial = _rounded((square @ square).mul_(_C).add_(square * _B))
        x = _rounded((polynomial @ x).add_(x * _A))
    if not is_wide:
        x = x.T
    result = x.float()
    return result.mul_(length / frobenius(result))


def frobenius(matrix: torch.Tensor) -> float:
    """Return the Frobenius norm of a float32 matrix, accurate to 1 %, with the same bits on every machine.

    Elements are rounded to whole numbers; the squares of these are summed without rounding errors.
    """
    largest = float(matrix.abs().max())
    scale = _LENGTH_GRID / largest if largest else 0.0
    whole_numbers = matrix.double().mul_(scale).round_().long()
    sum_of_squares = int(whole_numbers.square().sum())
    return math.sqrt(sum_of_squares) * largest / _LENGTH_GRID


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Round the elements of a float64 tensor to multiples of 2^-25 (1 / _GRID), in place."""
    return x.mul_(_GRID).round_().div_(_GRID)

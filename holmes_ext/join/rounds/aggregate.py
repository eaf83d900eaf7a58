"""What the jobs' pseudo-gradients of a fragment become together.

    mean       sum of w_j d_j, w by tokens (or equal)
    median     of each element; trimmed: the mean of each element without the `trim` least and largest (Yin et
               al., arXiv 1803.01498)
    geometric  the point with the least sum of distances, by Weiszfeld's steps (RFA, Pillutla et al., arXiv
               1912.13445, algorithm 2):
                   z <- sum of w_j d_j / max(nu, |d_j - z|), divided by the sum of the factors
    clipping   centered clipping (Karimireddy et al., arXiv 2012.10333, algorithm 2), from v = 0; radius: the
               median of the distances:
                   v <- v + sum of w_j (d_j - v) min(1, radius / |d_j - v|)
    flag       Flag Aggregator (Almasi et al., arXiv 2302.05865, its data term): the subspace Y, m = ceil((J +
               1) / 2) dimensions, that minimizes the sum of sqrt(1 - |Y' d_j|^2 / |d_j|^2), by iteratively
               reweighted least squares; then the mean, projected on Y. Directions alone choose Y, so a long
               vector may lie in it: in the mean none counts as longer than the median length

The last three depend on the vectors through their products d_i . d_j alone, and what comes out is a sum of
c_j d_j. So each rank multiplies the elements that it exchanges, the products are summed over a job's ranks,
and shards do not change the result; only J numbers c_j are needed to combine. (byzfl's take whole vectors and
no products: they serve as reference in the tests.)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from holmes_ext.join.settings import OuterSettings

_STEPS, _CLIPPING_STEPS = 100, 5
#: Distances are not taken for smaller than this share of the longest vector.
_SMALLEST = 1e-6


def products(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """d_i . d_j of flat tensors: float64 [J, J], to be summed over ranks; without a whole copy in float64."""
    result = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for parts in zip(*(gradient.split(2**16) for gradient in gradients)):
        rows = torch.stack(parts).double()
        result += rows @ rows.T
    return result


def coefficients(
    settings: OuterSettings, gram: torch.Tensor, shares: Sequence[float]
) -> list[float]:
    """c_j of the sum; gram: products over all elements; shares: each job's part of the tokens."""
    w = torch.tensor(shares, dtype=torch.float64)
    if settings.aggregate == "geometric":
        return geometric_median(gram, w).tolist()
    if settings.aggregate == "clipping":
        return centered_clipping(gram, w).tolist()
    if settings.aggregate == "flag" and len(shares) > 2:
        return flag_aggregate(gram, w).tolist()
    return list(shares)


def combine(
    settings: OuterSettings, gradients: Sequence[torch.Tensor], factors: Sequence[float]
) -> torch.Tensor:
    """Of this rank's elements; factors: coefficients(). Added up in order: the same bits in every job."""
    count = len(gradients)
    if settings.aggregate in ("median", "trimmed") and count > 2:
        cut = (
            (count - 1) // 2
            if settings.aggregate == "median"
            else min(settings.trim, (count - 1) // 2)
        )
        return torch.stack(list(gradients)).sort(0).values[cut : count - cut].mean(0)
    total = gradients[0] * factors[0]
    for gradient, factor in zip(gradients[1:], factors[1:]):
        total.add_(gradient, alpha=factor)
    return total


def _distances(gram: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """|d_j - sum of c_i d_i| of every j."""
    square = gram.diagonal() - 2 * gram @ c + c @ gram @ c
    return square.clamp(min=0).sqrt()


def geometric_median(gram: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    floor = _SMALLEST * math.sqrt(float(gram.diagonal().max()))
    if floor == 0:
        return w
    c = w
    for _ in range(_STEPS):
        factors = w / _distances(gram, c).clamp(min=floor)
        before, c = c, factors / factors.sum()
        if float((c - before).abs().max()) < 1e-12:
            break
    return c


def centered_clipping(
    gram: torch.Tensor, w: torch.Tensor, radius: float | None = None, steps: int = _CLIPPING_STEPS
) -> torch.Tensor:
    """radius: None takes the median of the distances in every step."""
    c = torch.zeros_like(w)
    for _ in range(steps):
        distances = _distances(gram, c)
        bound = statistics.median(distances.tolist()) if radius is None else radius
        pulled = w * (bound / distances.clamp(min=1e-300)).clamp(max=1.0)
        c = c + pulled - pulled.sum() * c
    return c


def flag_aggregate(gram: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """With A = D S (D: the vectors as columns, S: 1 / length and the square roots of the weights), Y are A's
    first m left singular vectors: A V / s of the eigenvectors V and eigenvalues s^2 of A'A = S gram S. Y Y' x
    = D S V s^-2 V' S D' x needs gram alone."""
    lengths = gram.diagonal().sqrt()
    if float(lengths.min()) == 0:
        return w
    dimensions = math.ceil((len(w) + 1) / 2)
    weights = torch.ones_like(w)
    for _ in range(_STEPS):
        scale = weights.sqrt() / lengths
        values, vectors = torch.linalg.eigh(scale[:, None] * gram * scale)
        values, vectors = values[-dimensions:], vectors[:, -dimensions:]
        kept = values > 1e-12 * values[-1]
        half = scale[:, None] * vectors[:, kept] / values[kept].sqrt()  # Y = D half
        explained = (gram @ half).square().sum(1) / gram.diagonal()
        before, weights = weights, 1 / (1 - explained).clamp(min=1e-8).sqrt()
        if float((weights / before - 1).abs().max()) < 1e-9:
            break
    capped = (statistics.median(lengths.tolist()) / lengths).clamp(max=1.0)
    return half @ (half.T @ (gram @ (w * capped)))

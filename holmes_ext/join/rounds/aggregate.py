"""Aggregation of the jobs' pseudo-gradients of a fragment into one (setting `aggregate`).

With d_j the pseudo-gradient of job j, w_j its share of the tokens, and J jobs:

    mean       sum of w_j d_j (equal shares with weight=equal)
    median     median of each element over the jobs (Yin et al., arXiv 1803.01498)
    trimmed    mean of each element over the jobs, without the `trim` smallest and the `trim`
               largest values (same paper)
    geometric  geometric median: the point with the least sum of distances, by Weiszfeld's iteration
               (RFA, Pillutla et al., arXiv 1912.13445, algorithm 2):
                   z <- sum of w_j d_j / max(nu, |d_j - z|), divided by the sum of the factors
    clipping   centered clipping (Karimireddy et al., arXiv 2012.10333, algorithm 2), from v = 0, with the
               median of the distances as radius:
                   v <- v + sum of w_j (d_j - v) min(1, radius / |d_j - v|)
    flag       Flag Aggregator (Almasi et al., arXiv 2302.05865, its data term): the subspace Y of
               m = ceil((J + 1) / 2) dimensions that is nearest to the directions of all vectors: it
               minimizes the sum of sqrt(1 - |Y' d_j|^2 / |d_j|^2), by iteratively reweighted least
               squares. The result is the mean, projected on Y. Y depends on directions only, so a
               vector of extreme length would still dominate the mean. Before the mean is taken,
               longer vectors are therefore shortened to the median length

The last three need only the inner products d_i . d_j (the Gram matrix), and their result is a sum of
c_j d_j. Each rank computes the products of its own elements, an all-reduce over the job adds them up, and
the J numbers c_j suffice to combine the elements of each rank. So the way a job shards its
weights does not change the result. (The implementations of byzfl take whole vectors; the tests compare
ours with them.)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.shards.job_ranks import JobRanks

#: Iterations of the geometric median and the flag aggregator, at most.
_STEPS = 100
#: Iterations of centered clipping.
_CLIPPING_STEPS = 5
#: Smallest distance in the geometric median (nu), as a share of the longest vector.
_SMALLEST = 1e-6
#: Elements that are converted to float64 at a time.
_CHUNK = 2**16
#: Elements whose squares are summed at a time.
_SQUARES_CHUNK = 2**20
#: Vectors that are needed for the median, the trimmed mean and the flag aggregator to have an effect.
_LEAST_VECTORS = 3
#: Change of the coefficients below which Weiszfeld's iteration has converged.
_WEISZFELD_TOLERANCE = 1e-12
#: Relative change of the weights below which the flag aggregator's iteration has converged.
_FLAG_TOLERANCE = 1e-9
#: Eigenvalues below this share of the largest eigenvalue count as zero.
_EIGENVALUE_TOLERANCE = 1e-12
#: Least residual 1 - |Y' d|^2 / |d|^2 of a vector.
_LEAST_RESIDUAL = 1e-8
#: Least divisor, far below every distance.
_TINY = 1e-300


def square_of(values: torch.Tensor) -> float:
    """Return the sum of squares of a flat tensor, accumulated in float64 chunk by chunk."""
    chunks = values.split(_SQUARES_CHUNK)
    return float(sum(torch.dot(chunk, chunk).double() for chunk in chunks))


def products(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the inner products d_i . d_j of J flat tensors of equal length, as float64 [J, J].

    Added up over all ranks' elements, they are the products of whole vectors. The tensors are
    converted to float64 chunk by chunk.
    """
    result = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for chunks in zip(*(gradient.split(_CHUNK) for gradient in gradients)):
        rows = torch.stack(chunks).double()
        result += rows @ rows.T
    return result


class ExchangeSums(NamedTuple):
    """Sums over all ranks of this job after an exchange of pseudo-gradients."""

    failures: list[float]  # for each member of the round: number of ranks that did not reach it
    gram: torch.Tensor  # inner products of the whole pseudo-gradients, float64 [J, J]


def sum_over_ranks(
    job_ranks: JobRanks, is_unreached: Sequence[bool], gram: torch.Tensor
) -> ExchangeSums:
    """Add up the ranks' failures and inner products in a single all-reduce; collective.

    Args:
        job_ranks: Collectives over the ranks of this job.
        is_unreached: For each member of the round, whether this rank's exchange with it has failed.
        gram: Result of products() for this rank's elements; zeros if the exchange has failed.
    """
    failures = [float(unreached) for unreached in is_unreached]
    sums = job_ranks.all_reduce_sum([*failures, *gram.flatten().tolist()])
    summed_gram = torch.tensor(sums[len(failures) :], dtype=torch.float64).view(gram.shape)
    return ExchangeSums(sums[: len(failures)], summed_gram)


def coefficients(
    settings: OuterSettings, gram: torch.Tensor, shares: Sequence[float]
) -> list[float]:
    """Return a coefficient for each job: combine() adds up the jobs' pseudo-gradients with them.

    The setting `aggregate` selects the formula. All but `mean` limit the effect of a few jobs with
    false pseudo-gradients:

        geometric           coefficients of the geometric median
        clipping            coefficients of centered clipping
        flag                coefficients of the Flag Aggregator. With fewer than three jobs, no
                            majority can show which vector is false, so it is the mean
        mean                the shares themselves: the weighted mean
        median, trimmed     the shares; they are not used, because combine() sorts the elements

    Args:
        settings: The --holmes-outer settings; `aggregate` is used.
        gram: Inner products of the J jobs' whole pseudo-gradients, float64 [J, J].
        shares: Each job's share of the tokens; they add up to 1.
    """
    weights = torch.tensor(shares, dtype=torch.float64)
    if settings.aggregate == "geometric":
        return geometric_median(gram, weights).tolist()
    if settings.aggregate == "clipping":
        return centered_clipping(gram, weights).tolist()
    if settings.aggregate == "flag" and len(shares) >= _LEAST_VECTORS:
        return flag_aggregate(gram, weights).tolist()
    return list(shares)


def combine(
    settings: OuterSettings, gradients: Sequence[torch.Tensor], factors: Sequence[float]
) -> torch.Tensor:
    """Return the aggregate of the jobs' pseudo-gradients, for the elements of this rank.

    It is the sum of factor * pseudo-gradient, in the order of the jobs, so that all jobs get the
    same bits. With aggregate=median or trimmed and at least three jobs, it is the median or trimmed
    mean of each element; the factors are not used.

    Args:
        settings: The --holmes-outer settings; `aggregate` and `trim` are used.
        gradients: The pseudo-gradient of each job: flat tensors of equal length. They are not changed.
        factors: The factor of each job, from coefficients().
    """
    count = len(gradients)
    if settings.aggregate in ("median", "trimmed") and count >= _LEAST_VECTORS:
        # Of the sorted values of each element, drop `trimmed` at each end, and average the others.
        most_trimmed = (count - 1) // 2  # leaves a single value, or two: their mean is the median
        if settings.aggregate == "median":
            trimmed = most_trimmed
        else:
            trimmed = min(settings.trim, most_trimmed)
        values = torch.stack(list(gradients)).sort(0).values
        return values[trimmed : count - trimmed].mean(0)
    total = gradients[0] * factors[0]
    for gradient, factor in zip(gradients[1:], factors[1:]):
        total.add_(gradient, alpha=factor)
    return total


def _distances(gram: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Return the distance of each vector d_j from the point sum of c_i d_i.

    Args:
        gram: Inner products of the vectors, [J, J].
        point: The coefficients c of the point, [J].
    """
    squares_of_vectors = gram.diagonal()
    square_of_point = point @ gram @ point
    squares = squares_of_vectors - 2 * gram @ point + square_of_point
    return squares.clamp(min=0).sqrt()


def geometric_median(gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return c, [J], so that sum of c_j d_j is the weighted geometric median of J vectors d_j.

    Weiszfeld's iteration needs only the inner products of the vectors.

    Args:
        gram: Inner products of the vectors, [J, J].
        weights: Weight of each vector's distance, [J].
    """
    least_distance = _SMALLEST * math.sqrt(float(gram.diagonal().max()))
    if least_distance == 0:  # all vectors are zero
        return weights
    point = weights  # coefficients of the current estimate; the first estimate is the mean
    for _ in range(_STEPS):
        factors = weights / _distances(gram, point).clamp(min=least_distance)
        previous = point
        point = factors / factors.sum()
        if float((point - previous).abs().max()) < _WEISZFELD_TOLERANCE:
            break
    return point


def centered_clipping(
    gram: torch.Tensor,
    weights: torch.Tensor,
    radius: float | None = None,
    steps: int = _CLIPPING_STEPS,
) -> torch.Tensor:
    """Return c, [J], so that sum of c_j d_j is the result of centered clipping of J vectors d_j.

    From 0, the center moves by the weighted mean of the differences d_j - center in each step.
    Longer differences are first shortened to `radius`.

    Args:
        gram: Inner products of the vectors, [J, J].
        weights: Weight of each vector, [J].
        radius: Length to which differences are shortened; None: in each step, the median of their
            lengths.
        steps: Number of steps.
    """
    center = torch.zeros_like(weights)  # coefficients of the current center, at first 0
    for _ in range(steps):
        distances = _distances(gram, center)
        bound = statistics.median(distances.tolist()) if radius is None else radius
        clipped_weights = weights * (bound / distances.clamp(min=_TINY)).clamp(max=1.0)
        # center + sum of clipped_weight_j (d_j - center), in coefficients of the vectors d_j.
        center = center + clipped_weights - clipped_weights.sum() * center
    return center


def flag_aggregate(gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the coefficients of the Flag Aggregator: the mean, projected on the vectors' common subspace.

    The subspace minimizes the sum of the sines of the angles between the vectors and the subspace (Almasi et
    al., arXiv 2302.05865). It is found by iteratively reweighted least squares: plain least squares would
    minimize the sum of the squared sines, so each squared sine is weighted by 1 / sine of the last iteration.

    Args:
        gram: Inner products of the vectors, [J, J].
        weights: Weight of each vector in the mean, [J].

    Returns:
        Coefficients, [J]: the sum of coefficient * vector is the aggregate.
    """
    lengths = gram.diagonal().sqrt()
    if float(lengths.min()) == 0:  # a zero vector has no direction: return the plain mean
        return weights
    # The paper's size of the subspace: the vectors of a majority of the J jobs can lie in it.
    dimensions = math.ceil((len(weights) + 1) / 2)
    reweighting = torch.ones_like(weights)
    for _ in range(_STEPS):
        # Unit vectors, multiplied by the square roots of their weights in the least squares.
        scale = reweighting.sqrt() / lengths
        # Column k has the coefficients of the vectors that add up to basis vector k.
        basis = _principal_basis(gram, scale, dimensions)
        # Squared cosine of each vector and the subspace: |Y' d_j|^2 / |d_j|^2.
        squared_cosines = (gram @ basis).square().sum(1) / gram.diagonal()
        sines = (1 - squared_cosines).clamp(min=_LEAST_RESIDUAL).sqrt()
        previous = reweighting
        reweighting = 1 / sines
        if float((reweighting / previous - 1).abs().max()) < _FLAG_TOLERANCE:
            break
    # The subspace depends on directions only, so a very long vector would still dominate the mean.
    # Vectors that are longer than the median length are therefore shortened to it before the mean
    # is taken.
    median_length = statistics.median(lengths.tolist())
    shortening = (median_length / lengths).clamp(max=1.0)  # factor of each vector
    mean = weights * shortening  # as coefficients of the vectors, like `basis`
    return basis @ (basis.T @ (gram @ mean))  # the projection Y Y' of the mean


def _principal_basis(gram: torch.Tensor, scale: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return an orthonormal basis of the principal components of J scaled vectors, as coefficients.

    The vectors d_j are not needed, only their inner products. Let D have the columns d_j, and S be
    the diagonal matrix of `scale`. The basis Y is the first left singular vectors of D S. The
    eigenvectors V and eigenvalues s^2 of S gram S = (D S)' (D S) give Y = D S V / s.

    Args:
        gram: Inner products of the vectors, [J, J].
        scale: Factor of each vector, [J].
        dimensions: Number of basis vectors; fewer are returned if the vectors span less.

    Returns:
        S V / s, [J, dimensions]: basis vector k is the sum of d_j times element [j, k].
    """
    eigenvalues, eigenvectors = torch.linalg.eigh(scale[:, None] * gram * scale)
    eigenvalues = eigenvalues[-dimensions:]  # the largest: they are in ascending order
    eigenvectors = eigenvectors[:, -dimensions:]
    nonzero = eigenvalues > _EIGENVALUE_TOLERANCE * eigenvalues[-1]
    return scale[:, None] * eigenvectors[:, nonzero] / eigenvalues[nonzero].sqrt()

"""Tests the robust aggregates, such as the median, with which joined jobs combine their weight updates.

Each aggregate is compared with its definition, computed on whole vectors. It must not depend on how the
vectors are sharded over ranks.
"""

import importlib.util
import sys
import types

import pytest
import torch

from holmes_ext.join.rounds.aggregate import (
    centered_clipping,
    coefficients,
    combine,
    flag_aggregate,
    geometric_median,
    products,
)
from holmes_ext.join.settings import AGGREGATES, parse_outer


def vectors(
    count: int, length: int = 4000, seed: int = 0, outlier: float = 0.0
) -> list[torch.Tensor]:
    """Vectors about a common one; the last a far one where `outlier` says so."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(length, generator=generator)
    made = [common + 0.5 * torch.randn(length, generator=generator) for _ in range(count)]
    if outlier:
        made[-1] = outlier * torch.randn(length, generator=generator)
    return made


def aggregate(
    name: str, gradients: list[torch.Tensor], shares: list[float] | None = None, parts: int = 1
) -> torch.Tensor:
    """As `parts` ranks of a job do it: each its elements, the products summed."""
    settings = parse_outer(f"aggregate={name}")
    shares = shares or [1 / len(gradients)] * len(gradients)
    cut = [
        one.tensor_split([k * len(one) // parts + 7 * k for k in range(1, parts)])
        for one in gradients
    ]
    gram = sum(products([one[k] for one in cut]) for k in range(parts))
    factors = coefficients(settings, gram, shares)
    return torch.cat([combine(settings, [one[k] for one in cut], factors) for k in range(parts)])


@pytest.mark.parametrize("name", AGGREGATES)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shards_do_not_change_the_result(name, count):
    whole, sharded = (aggregate(name, vectors(count), parts=parts) for parts in (1, 3))
    torch.testing.assert_close(sharded, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", AGGREGATES)
def test_jobs_that_agree_are_followed(name):
    one = vectors(1)[0]
    torch.testing.assert_close(
        aggregate(name, [one.clone() for _ in range(4)]), one, rtol=1e-5, atol=1e-6
    )


def test_the_mean_counts_tokens():
    a, b = vectors(2)
    torch.testing.assert_close(aggregate("mean", [a, b], [0.75, 0.25]), 0.75 * a + 0.25 * b)


def test_median_and_trimmed_mean_are_those_of_each_element():
    odd, even = vectors(5), vectors(4)
    torch.testing.assert_close(aggregate("median", odd), torch.stack(odd).median(0).values)
    torch.testing.assert_close(
        aggregate("median", even), torch.stack(even).sort(0).values[1:3].mean(0)
    )
    torch.testing.assert_close(
        aggregate("trimmed", odd), torch.stack(odd).sort(0).values[1:4].mean(0)
    )


def test_the_geometric_median_has_the_least_sum_of_distances():
    made = vectors(5, outlier=20.0)
    found = torch.stack(made).T.double() @ geometric_median(
        products(made), torch.full((5,), 0.2, dtype=torch.float64)
    )

    def cost(point):
        return sum(float((one.double() - point).norm()) for one in made)

    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        assert (
            cost(found)
            < cost(found + 0.05 * torch.randn(len(found), generator=generator, dtype=torch.float64))
            + 1e-9
        )


def test_centered_clipping_is_the_papers_step_on_whole_vectors():
    made, radius, steps = vectors(4, outlier=30.0), 40.0, 3
    v = torch.zeros(len(made[0]), dtype=torch.float64)
    for _ in range(steps):
        v = v + sum(
            (one.double() - v) * min(1.0, radius / float((one.double() - v).norm())) for one in made
        ) / len(made)
    c = centered_clipping(
        products(made), torch.full((4,), 0.25, dtype=torch.float64), radius, steps
    )
    torch.testing.assert_close(torch.stack(made).T.double() @ c, v, rtol=1e-9, atol=1e-9)


def test_the_flag_aggregate_is_the_projection_on_the_subspace_of_whole_vectors():
    made = vectors(5, length=300, outlier=3.0)
    whole = torch.stack(made).T.double()
    unit, weights = whole / whole.norm(dim=0), torch.ones(5, dtype=torch.float64)
    for _ in range(100):  # the same problem by singular vectors of the weighted matrix
        basis = torch.linalg.svd(unit * weights.sqrt(), full_matrices=False).U[:, :3]
        weights = 1 / (1 - (basis.T @ unit).square().sum(0)).clamp(min=1e-8).sqrt()
    lengths = whole.norm(dim=0)
    expected = basis @ (basis.T @ (unit * lengths.clamp(max=lengths.median())).mean(1))
    found = whole @ flag_aggregate(products(made), torch.full((5,), 0.2, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", AGGREGATES[1:])
def test_one_wild_job_of_five_moves_a_robust_aggregate_little(name):
    honest = vectors(5)[:4]
    wild = [*honest, 30.0 * torch.randn(4000, generator=torch.Generator().manual_seed(9))]
    truth = torch.stack(honest).mean(0)
    assert (aggregate(name, wild) - truth).norm() < 0.25 * (aggregate("mean", wild) - truth).norm()


def test_byzfl_gives_the_same(monkeypatch):
    """Our robust aggregates give the same results as those of the package byzfl.

    byzfl's __init__.py imports torchvision, which may be missing. The module of aggregators does not need
    torchvision, so the test imports this module without executing __init__.py.
    """
    spec = importlib.util.find_spec("byzfl")
    if spec is None:
        pytest.skip("byzfl is not installed")
    # Put empty packages with the paths of the real ones into sys.modules. An import of a module in them
    # finds its file, but executes no __init__.py.
    for name, folder in (("byzfl", ""), ("byzfl.aggregators", "/aggregators")):
        package = types.ModuleType(name)
        package.__path__ = [spec.submodule_search_locations[0] + folder]
        monkeypatch.setitem(sys.modules, name, package)
    aggregators = importlib.import_module("byzfl.aggregators.aggregators")

    five = vectors(5, outlier=10.0)  # random ones; the last is far from the others
    # aggregate() calls the functions of holmes.
    torch.testing.assert_close(aggregate("median", five), aggregators.Median()(five))
    torch.testing.assert_close(aggregate("trimmed", five), aggregators.TrMean(f=1)(five))

    # The other aggregates are weighted sums of the vectors. Our functions return the weights, computed from
    # products(five), the inner products of the vectors.
    matrix = torch.stack(five).T.double()
    equal_weights = torch.full((5,), 0.2, dtype=torch.float64)  # the start of the iteration
    weights = geometric_median(products(five), equal_weights)
    expected = aggregators.GeometricMedian(T=100)(five).double()
    torch.testing.assert_close(matrix @ weights, expected, rtol=1e-3, atol=1e-3)

    weights = centered_clipping(products(five), equal_weights, radius=50.0, steps=2)
    expected = aggregators.CenteredClipping(L=2, tau=50.0)(five).double()
    torch.testing.assert_close(matrix @ weights, expected, rtol=1e-4, atol=1e-5)

"""network: prices against hand-made numbers."""

import pytest

from holmes_ext.cluster.site import Fabric
from holmes_ext.plan.cost.network_old import all_reduce, chunks_of, message

FABRIC = Fabric("f", "ib", 8_000_000, 0.0)  # a megabyte a second


def test_allreduce():
    assert all_reduce(2, FABRIC).seconds(1e6) == pytest.approx(1.0)  # 2 (n-1)/n = 1
    assert all_reduce(4, FABRIC).seconds(1e6) == pytest.approx(1.5)
    assert all_reduce(2, FABRIC, sharers=8).seconds(1e6) == pytest.approx(8.0)
    assert all_reduce(8, FABRIC).seconds(0) == 0.0
    slow = Fabric("f", "ib", 8_000_000, 0.25)
    assert all_reduce(3, slow).seconds(1e6) == pytest.approx(4 / 3 + 4 * 0.25)


@pytest.mark.parametrize("size, chunks", [(0, 1), (90, 1), (100, 1), (199, 1), (200, 2), (1050, 10)])
def test_chunks_are_as_large_as_they_should_be_or_larger(size, chunks):
    assert chunks_of(size, 100) == chunks


def test_send():
    assert message(Fabric("f", "ib", 8_000_000, 0.5), sharers=2, messages=3).seconds(2e6) == pytest.approx(4 + 1.5)

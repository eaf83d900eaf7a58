"""buckets: the size that suits a fabric, and where gradients are cut."""

import pytest

from holmes_ext.cluster.fabric import Fabric
from holmes_ext.plan.buckets import bucket_bytes, cut


def fabric(rate, latency):
    return Fabric("a", "ib", int(rate), latency)


def test_latency_is_the_given_share_of_the_time():
    latency, rate, ranks = 20e-6, 100e9, 8
    size = bucket_bytes(fabric(rate, latency), ranks, 1e12, share=0.1)
    step = size / ranks / (rate / 8)
    assert latency / (latency + step) == pytest.approx(0.1, abs=1e-6)


def test_size_is_held_between_the_bounds():
    assert bucket_bytes(fabric(1e9, 0.0), 4, 1e9) == 2**20
    assert bucket_bytes(fabric(400e9, 1.0), 64, 1e9) == 256 * 2**20


def test_few_gradients_are_eight_buckets_unless_latency_forbids():
    assert bucket_bytes(fabric(1e9, 0.0), 4, 80_000) == 10_000
    assert bucket_bytes(fabric(1e9, 1e-3), 4, 80_000) == 4 * 125_000 * 9
    assert bucket_bytes(fabric(1e9, 0.0), 4, 0) == 1


def test_a_bucket_ends_before_the_limit_or_with_what_reaches_it():
    sizes = (4, 4, 4, 20, 1)
    assert cut(sizes, 8) == ((0, 1), (2,), (3,), (4,))
    assert cut(sizes, 8, exceed=True) == ((0, 1), (2, 3), (4,))
    assert cut(sizes, 8, exceed=True, first_bytes=4) == ((0,), (1, 2), (3,), (4,))
    assert cut((), 8) == ()

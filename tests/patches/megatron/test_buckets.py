"""Tests bucket sizes with which megatron-core's distributed optimizer needs no padding between buckets."""

import random
from types import SimpleNamespace

import pytest

from holmes_ext.patches.megatron.reduce import buckets as megatron_buckets
from holmes_ext.patches.megatron.reduce.buckets import (
    BucketedParameter,
    bucket_ends,
    unpadded_bucket_size,
)


class Parameter:
    def __init__(self, elements, shared=False):
        self.elements, self.shared_embedding = elements, shared

    def numel(self):
        return self.elements


def layers(hidden, count):
    """Return the sizes of a GPT's parameters in the order of the backward pass."""
    one = [
        4 * hidden * hidden,
        hidden,
        4 * hidden * hidden,
        4 * hidden,
        hidden,
        hidden,
        3 * hidden * hidden,
        3 * hidden,
        hidden * hidden,
        hidden,
    ]
    return [BucketedParameter(elements, False) for elements in one * count]


def test_where_buckets_end():
    assert bucket_ends(
        [
            BucketedParameter(100, False),
            BucketedParameter(100, False),
            BucketedParameter(300, False),
        ],
        None,
        128,
    ) == [128 + 100 + 28 + 300]
    assert bucket_ends(
        [
            BucketedParameter(100, False),
            BucketedParameter(100, False),
            BucketedParameter(300, False),
        ],
        150,
        128,
    ) == [228, 256 + 300]
    assert bucket_ends(
        [BucketedParameter(100, False), BucketedParameter(64, True), BucketedParameter(64, False)],
        None,
        128,
    ) == [128, 128 + 64, 256 + 64]


def test_sizes_without_padding():
    assert unpadded_bucket_size(layers(128, 4), 100_000, 128) in range(50_000, 400_001)
    assert unpadded_bucket_size(layers(128, 4), 10_000_000, 128) is None  # one bucket
    assert unpadded_bucket_size([BucketedParameter(100, False)] * 50, 500, 128) is None
    assert (
        unpadded_bucket_size(
            [*layers(128, 2), BucketedParameter(32, False), BucketedParameter(128, True)],
            100_000,
            128,
        )
        is None
    )  # megatron-core's own cut is padded


def test_no_bucket_but_the_last_is_padded():
    draw, found = random.Random(1), 0
    for _ in range(300):
        params = [
            BucketedParameter(draw.choice([32, 64, 96, 128, 1024, 4096]), False)
            for _ in range(draw.randint(1, 40))
        ]
        divisor, wanted = draw.choice([128, 256, 384]), draw.randint(500, 20_000)
        size = unpadded_bucket_size(params, wanted, divisor)
        if size is not None:
            ends = bucket_ends(params, size, divisor)
            assert (
                len(ends) > 1
                and not any(end % divisor for end in ends[:-1])
                and wanted / 2 <= size <= 4 * wanted
            )
            found += 1
    assert found > 100


@pytest.mark.parametrize("high, size", [(False, 4096), (True, None)])
def test_of_a_buffer(high, size):
    params = [Parameter(elements) for elements in (4096, 32, 4096, 4096)]
    config = SimpleNamespace(pad_buckets_for_high_nccl_busbw=high)
    assert megatron_buckets.unpadded_size_for_buffer(params, 2, config, 3000) == size

"""Finds bucket sizes that make the checkpoints of megatron-core's distributed optimizer correct.

megatron-core cuts the gradients into buckets. It pads each bucket to a multiple of a number, the
divisor, so that the ranks get equal shards. (The divisor is a multiple of the number of ranks and
of an alignment.) Before 0.20, fully reshardable checkpoints are wrong if a bucket other than the
last one is padded: get_parameter_state_dp_zero leaves out the padding between buckets, and
sharded_param_state_fully_reshardable counts it. A bucket needs no padding if its end is already at
a multiple of the divisor. This module searches for a bucket size with which all buckets but the
last end so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

#: A parameter starts at a multiple of this number of elements (_pad_start_of_param_if_needed).
PARAMETER_ALIGNMENT = 64
#: A bucket ends at a multiple of this number of elements.
BUCKET_ALIGNMENT = 128
#: With pad_buckets_for_high_nccl_busbw, a bucket also ends at a multiple of this number of elements.
HIGH_BANDWIDTH_ALIGNMENT = 2**16
#: Smallest and largest bucket size that replaces the planned size, as multiples of it.
MIN_SIZE_FACTOR = 1 / 2
MAX_SIZE_FACTOR = 4


class BucketedParameter(NamedTuple):
    """Size of a parameter, and whether it needs a bucket of its own.

    megatron-core fills buckets of gradients with parameters, in the order of the backward pass. These two
    values decide where it ends a bucket.
    """

    elements: int
    has_own_bucket: bool  # True for a shared embedding: its bucket has no other parameters


def bucket_ends(
    parameters: Sequence[BucketedParameter], bucket_size: int | None, divisor: int
) -> list[int]:
    """Return the end of each bucket of megatron-core, as an offset in the gradient buffer.

    megatron-core fills a bucket with parameters until it has `bucket_size` elements, then begins
    the next one. Every parameter starts at a multiple of 64, every bucket at a multiple of
    `divisor`. The gap before a bucket is the padding of the bucket before it. A returned offset is
    where this padding begins.

    For example, parameters of 100, 300 and 100 elements, bucket size 350 and divisor 256:

        0-100, 128-428   first bucket; its end is 428, its padding 428-512
        512-612          second bucket; its end is 612

    The result is [428, 612].

    Args:
        parameters: In the order of the backward pass.
        bucket_size: Number of elements at which a bucket is full. None: there is no limit, and a
            bucket ends only before and after a shared embedding, which has a bucket of its own.
        divisor: Each bucket starts at a multiple of this number of elements.
    """
    ends = []
    bucket_start = 0
    position = 0  # end of the latest parameter
    bucket_is_empty = True
    for elements, has_own_bucket in parameters:
        position = _round_up(position, PARAMETER_ALIGNMENT)
        if has_own_bucket and not bucket_is_empty:
            # The parameters before this one form a bucket. As in megatron-core, its end includes
            # the gap after its last parameter: `position` is rounded up above.
            ends.append(position)
            bucket_start = _round_up(position, divisor)
            position = bucket_start
        position += elements
        bucket_is_empty = False
        is_full = bucket_size is not None and position - bucket_start >= bucket_size
        if has_own_bucket or is_full:
            ends.append(position)
            bucket_start = _round_up(position, divisor)
            position = bucket_start
            bucket_is_empty = True
    if not bucket_is_empty:
        ends.append(position)
    return ends


def unpadded_bucket_size(
    parameters: Sequence[BucketedParameter], planned_size: int, divisor: int
) -> int | None:
    """Return the bucket size nearest to the planned size such that only the last bucket needs padding.

    Sizes from half the planned size to four times the planned size are tried. The result is None if none of
    them fits, or if there would be a single bucket.

    Args:
        parameters: In the order of the backward pass.
        planned_size: In elements.
        divisor: A bucket needs no padding if it ends at a multiple of this number.
    """
    min_size = planned_size * MIN_SIZE_FACTOR
    max_size = planned_size * MAX_SIZE_FACTOR
    # A bucket is full when it has the bucket size. If that is the end of some parameter, the first
    # bucket ends exactly there. Candidates are therefore the ends of parameters that are multiples
    # of the divisor. They ignore buckets of shared embeddings, and all buckets but the first:
    # bucket_ends() below counts these.
    candidates = []
    position = 0
    for parameter in parameters:
        position = _round_up(position, PARAMETER_ALIGNMENT) + parameter.elements
        if position % divisor == 0 and min_size <= position <= max_size:
            candidates.append(position)

    # Stable: of two sizes at the same distance, the smaller one comes first.
    candidates.sort(key=lambda size: abs(size - planned_size))
    for size in candidates:
        ends = bucket_ends(parameters, size, divisor)
        is_aligned = all(end % divisor == 0 for end in ends[:-1])
        if len(ends) > 1 and is_aligned:
            return size
    return None


def unpadded_size_for_buffer(
    parameters: Sequence[Any], ranks: int, ddp_config: Any, planned_size: int
) -> int | None:
    """Return a bucket size such that a buffer of megatron-core needs no padding between buckets.

    Args:
        parameters: The torch parameters in the _ParamAndGradBuffer, in the order of the model.
        ranks: Number of ranks that reduce the gradients.
        ddp_config: DistributedDataParallelConfig.
        planned_size: Planned number of elements of a bucket.

    Returns:
        The size nearest to the planned one, in elements; None if no size near it fits.
    """
    # megatron-core pads buckets to a multiple of this number, so that all ranks get equal, aligned
    # shards.
    divisor = math.lcm(ranks, BUCKET_ALIGNMENT)
    if getattr(ddp_config, "pad_buckets_for_high_nccl_busbw", False):
        divisor = math.lcm(divisor, HIGH_BANDWIDTH_ALIGNMENT)
    sizes_in_backward_order = [
        BucketedParameter(parameter.numel(), getattr(parameter, "shared_embedding", False))
        for parameter in reversed(parameters)
    ]
    return unpadded_bucket_size(sizes_in_backward_order, planned_size, divisor)


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple

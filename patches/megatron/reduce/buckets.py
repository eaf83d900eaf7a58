"""Bucket sizes of megatron-core's distributed optimizer that its checkpoints survive.

Before core 0.20 a fully reshardable checkpoint is wrong when a bucket other than the last is padded:
get_parameter_state_dp_zero drops the padding between buckets, sharded_param_state_fully_reshardable counts it
(0.14, 0.15, 0.16.1; mended in 0.20). Cut where the sum is a multiple of the divisor, buckets have none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

#: Elements at whose multiples a parameter starts (_pad_start_of_param_if_needed), and a bucket ends; ends as
#: well with pad_buckets_for_high_nccl_busbw.
START, END, HIGH_BANDWIDTH = 64, 128, 2**16


def cuts(params: Sequence[tuple[int, bool]], size: int | None, divisor: int) -> list[int]:
    """Return the offsets in the buffer at which megatron-core's buckets end, before padding.

    Args:
        params: (number of elements, whether it has its own bucket) of each parameter, in the order of the
            backward pass.
        size: Elements after which megatron-core ends a bucket; None: it ends none.
        divisor: megatron-core pads the end of each bucket to a multiple of this number.
    """
    # at: end of the latest parameter. begin: start of its bucket. filled: whether the bucket has parameters.
    ends, begin, at, filled = [], 0, 0, False

    def cut() -> None:
        """End the bucket. The next one starts after its padding."""
        nonlocal begin, at, filled
        ends.append(at)
        begin = at = math.ceil(at / divisor) * divisor
        filled = False

    for elements, alone in params:
        at = math.ceil(at / START) * START  # where megatron-core lets the parameter start
        if alone and filled:  # the parameters before it stay in a bucket without it
            cut()
        at, filled = at + elements, True
        if alone or size is not None and at - begin >= size:
            cut()
    return [*ends, at] if filled else ends


def unpadded(params: Sequence[tuple[int, bool]], wanted: int, divisor: int) -> int | None:
    """Return the bucket size nearest to `wanted` with which only the last bucket needs padding.

    Sizes from half of `wanted` to four times `wanted` are tried. The result is None if none of them fits.

    Args:
        params: As for cuts().
        divisor: A bucket needs no padding if it ends at a multiple of this number.
    """
    # The first bucket of a size ends after a parameter. Only ends that need no padding are candidates.
    aligned, at = [], 0
    for elements, _ in params:
        at = math.ceil(at / START) * START + elements
        if at % divisor == 0 and wanted / 2 <= at <= 4 * wanted:
            aligned.append(at)
    # The nearest size first. The first bucket fits: check the later ones, except the last.
    for size in sorted(aligned, key=lambda size: (abs(size - wanted), size)):
        ends = cuts(params, size, divisor)
        if len(ends) > 1 and not any(end % divisor for end in ends[:-1]):
            return size
    return None


def of_buffer(params: Sequence[Any], ranks: int, ddp_config: Any, wanted: int) -> int | None:
    """Return unpadded() for the parameters of a _ParamAndGradBuffer.

    Args:
        params: The parameters, in the order of the model.
        ranks: Number of ranks that reduce the gradients.
        wanted: Planned number of elements of a bucket.
    """
    high = getattr(ddp_config, "pad_buckets_for_high_nccl_busbw", False)
    divisor = math.lcm(ranks, END, HIGH_BANDWIDTH if high else 1)
    backwards = [
        (param.numel(), getattr(param, "shared_embedding", False)) for param in params[::-1]
    ]
    return unpadded(backwards, wanted, divisor)

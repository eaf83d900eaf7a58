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
    """Offsets at which megatron-core's buckets of `size` elements would end unpadded. params: (elements,
    whether it has its own bucket), in the backward pass's order. divisor: of every bucket's padded end."""
    ends, begin, at, filled = [], 0, 0, False

    def cut() -> None:
        nonlocal begin, at, filled
        ends.append(at)
        begin = at = math.ceil(at / divisor) * divisor
        filled = False

    for elements, alone in params:
        at = math.ceil(at / START) * START
        if alone and filled:
            cut()
        at, filled = at + elements, True
        if alone or size is not None and at - begin >= size:
            cut()
    return [*ends, at] if filled else ends


def unpadded(params: Sequence[tuple[int, bool]], wanted: int, divisor: int) -> int | None:
    """The bucket size nearest to `wanted`, from half of it to four times it, that needs no padding but at the
    last; None: there is none."""
    aligned, at = [], 0
    for elements, _ in params:
        at = math.ceil(at / START) * START + elements
        if at % divisor == 0 and wanted / 2 <= at <= 4 * wanted:
            aligned.append(at)
    for size in sorted(aligned, key=lambda size: (abs(size - wanted), size)):
        ends = cuts(params, size, divisor)
        if len(ends) > 1 and not any(end % divisor for end in ends[:-1]):
            return size
    return None


def of_buffer(params: Sequence[Any], ranks: int, ddp_config: Any, wanted: int) -> int | None:
    """unpadded() for the parameters of a _ParamAndGradBuffer that is reduced among `ranks`."""
    high = getattr(ddp_config, "pad_buckets_for_high_nccl_busbw", False)
    divisor = math.lcm(ranks, END, HIGH_BANDWIDTH if high else 1)
    backwards = [(param.numel(), getattr(param, "shared_embedding", False)) for param in params[::-1]]
    return unpadded(backwards, wanted, divisor)

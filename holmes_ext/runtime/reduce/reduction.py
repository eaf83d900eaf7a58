"""The interface of everything that sums gradients over a process group, and its simplest implementations.

FlatReduction            torch's own all-reduce
HierarchicalAllReduce    all-reduce inside each cluster, then between clusters, over gloo
HierarchicalCollectives  the same with NCCL's collectives
ReduceToOwners           each rank gets the sums of its own part only (ZeRO 1)
CallersReduction         a function that the caller of GradientReducer passed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from holmes_ext.runtime.reduce.flat_bucket import FlatBucket


class Reduction(Protocol):
    """Algorithm that sums flat tensors of gradients over the ranks of a process group.

    All ranks of the group must make a reduction together, and start its sums in the same order.
    """

    #: A tensor whose number of elements is a multiple of this is summed without padding; 1 if no tensor is
    #: padded.
    multiple: int

    def all_reduce(self, flat: torch.Tensor, bucket: FlatBucket | None = None) -> Any:
        """Start the sum of a tensor over all ranks of the group, in place.

        Args:
            flat: One-dimensional and contiguous.
            bucket: The bucket whose buffer `flat` is, or None. A reduction that compresses may keep
                rounding errors from step to step. They are stored by bucket, or by tensor if None.

        Returns:
            A work with wait() and get_future().
        """
        ...

    def close(self) -> None:
        """Finish the sums under way and end the threads of the reduction, if it has any."""
        ...


class FlatReduction:
    """torch's own all-reduce over a process group, in the interface of a Reduction."""

    multiple = 1

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def all_reduce(self, flat: torch.Tensor, bucket: FlatBucket | None = None) -> Any:
        """Start the sum of a tensor over all ranks of the group, in place; see Reduction.all_reduce."""
        return dist.all_reduce(flat, group=self._group, async_op=True)

    def close(self) -> None:
        """Do nothing: torch's all-reduce has no threads to end."""


class CallersReduction:
    """Reduction by a function that the caller of GradientReducer passed."""

    multiple = 1

    def __init__(self, start_sum: Callable[[torch.Tensor], Any]):
        self._start_sum = start_sum

    def all_reduce(self, flat: torch.Tensor, bucket: FlatBucket | None = None) -> Any:
        """Start the sum of a tensor with the caller's function; see Reduction.all_reduce."""
        return self._start_sum(flat)

    def close(self) -> None:
        """Do nothing: the reduction function belongs to the caller."""

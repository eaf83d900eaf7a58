"""The interface of everything that sums gradients over a process group, and its simplest implementations.

FlatReduction                            torch's own all-reduce
HierarchicalAllReduce, HierarchicalCollectives   hierarchical: inside each cluster, then between clusters
ReduceToOwners                           each rank gets the sums of its own part only (ZeRO 1)
CallersReduction                         a function that the caller of GradientReducer gave
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from holmes_ext.runtime.reduce.flat_bucket import FlatBucket


class Reduction(Protocol):
    """Way to sum flat tensors of gradients over the ranks of a process group.

    All ranks of the group must make a reduction together, and start its sums in the same order.
    """

    #: A tensor whose number of elements is a multiple of this is summed without padding; 1 if any number is
    #: as good.
    multiple: int

    def all_reduce(self, flat: torch.Tensor, bucket: FlatBucket | None = None) -> Any:
        """Start the sum of a tensor over all ranks of the group, in place.

        Args:
            flat: One-dimensional and contiguous.
            bucket: The bucket whose buffer `flat` is. It stays the same object in all steps, although its
                buffer may not. None: `flat` is the same tensor in all steps, or nothing is kept between them.

        Returns:
            A work with wait() and get_future().
        """
        ...

    def close(self) -> None:
        """End the threads of the reduction, if it has any. Sums under way are finished first."""
        ...

    def describe(self) -> str:
        """Return what the reduction does, as a noun phrase for messages."""
        ...


class FlatReduction:
    """torch's own all-reduce over a process group."""

    multiple = 1

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def all_reduce(self, flat: torch.Tensor, bucket: FlatBucket | None = None) -> Any:
        return dist.all_reduce(flat, group=self._group, async_op=True)

    def close(self) -> None:
        pass

    def describe(self) -> str:
        return f"all-reduce over {self._group.size()} ranks"


class CallersReduction:
    """A function of the caller of GradientReducer, which starts the sum of a flat tensor."""

    multiple = 1

    def __init__(self, start_sum: Callable[[torch.Tensor], Any]):
        self._start_sum = start_sum

    def all_reduce(self, flat: torch.Tensor, bucket: FlatBucket | None = None) -> Any:
        return self._start_sum(flat)

    def close(self) -> None:
        """Do nothing: the function belongs to the caller."""

    def describe(self) -> str:
        return f"all-reduce by the caller's {getattr(self._start_sum, '__qualname__', 'function')}"

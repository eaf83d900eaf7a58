"""Buckets of gradients: flat buffers that are filled, reduced and stored back.

plan/buckets.py decides how large a bucket should be and where a list of gradients is cut.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holmes_ext.errors import HolmesError
from holmes_ext.plan.buckets import cut

#: Size of a bucket if the fabric is unknown: bucket_cap_mb of torch's DistributedDataParallel.
DEFAULT_BYTES = 25 * 2**20
#: Returns the final gradient of a parameter, or None if this rank has none.
Gradient = Callable[[torch.nn.Parameter], torch.Tensor | None]

_DIGEST_BYTES = 8


@dataclass(frozen=True)
class Item:
    """Name, size, type and device of a gradient that is reduced."""

    name: str  # of the parameter
    numel: int
    itemsize: int  # bytes of an element as it is sent
    key: tuple[torch.dtype, torch.device]  # items with different keys never share a bucket

    @classmethod
    def of(cls, name: str, parameter: torch.nn.Parameter, dtype: torch.dtype | None) -> Item:
        """Describe the gradient of a parameter.

        Args:
            name: Name of the parameter.
            parameter: The parameter.
            dtype: Type of the sent gradient; None for the parameter's.
        """
        dtype = dtype or parameter.dtype
        return cls(name, parameter.numel(), dtype.itemsize, (dtype, parameter.device))

    @property
    def bytes(self) -> int:
        """Bytes of the gradient as it is sent."""
        return self.numel * self.itemsize


def named_parameters(parameters: Iterable[Any]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that have gradients to reduce, each once, with their names.

    Parameters without elements or without requires_grad are left out.

    Args:
        parameters: Parameters, or (name, parameter) pairs.

    Raises:
        HolmesError: no parameter is left.
    """
    named = []
    seen = set()
    for number, entry in enumerate(parameters):
        name, parameter = entry if isinstance(entry, tuple) else (f"parameter {number}", entry)
        if parameter.requires_grad and parameter.numel() and id(parameter) not in seen:
            seen.add(id(parameter))
            named.append((name, parameter))
    if not named:
        raise HolmesError(
            "GradientReducer: no parameter given that requires a gradient; pass model.named_parameters()"
        )
    return named


def fill_buckets(
    items: Sequence[Item], order: Sequence[int], limit_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Divide gradients among buckets of limited size, in the order in which they become final.

    Args:
        items: All gradients.
        order: Indices of the gradients to divide, in the order of their last accumulation.
        limit_bytes: Largest size of a bucket; only a single larger gradient exceeds it.

    Returns:
        The indices of the gradients in each bucket. The bucket that is complete first comes first.
    """
    sizes = [items[index].bytes for index in order]
    keys = [items[index].key for index in order]  # dtype and device
    buckets = []
    # cut() returns buckets of positions in `order`. Gradients with different keys never share a bucket.
    for positions in cut(sizes, limit_bytes, keys):
        buckets.append(tuple(order[position] for position in positions))
    return tuple(buckets)


def layout_digest(items: Sequence[Item], limit_bytes: int) -> int:
    """Return a 63-bit hash of the buckets' layout. Ranks compare their hashes, since buckets must be equal.

    The hash depends on the gradients, their order and the size of a bucket. Devices are renumbered in the
    order of their first gradients, because the GPUs of different ranks have different numbers.

    Args:
        items: All gradients, in order.
        limit_bytes: Largest size of a bucket.
    """
    device_numbers: dict[torch.device, int] = {}
    content = []
    for item in items:
        dtype, device = item.key
        device_number = device_numbers.setdefault(device, len(device_numbers))
        content.append(
            [item.name, item.numel, item.itemsize, str(dtype), device.type, device_number]
        )
    text = json.dumps([content, limit_bytes])
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:_DIGEST_BYTES], "big") >> 1  # 63 bits fit into an int64 tensor


def check_same_layout(
    items: Sequence[Item], bucket_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise HolmesError if ranks would make different buckets: these would mix up gradients or hang.

    Args:
        items: All gradients of this rank, in order.
        bucket_bytes: Largest size of a bucket.
        group: Process group that reduces the gradients. All of its ranks call this function.
        device: Device for the tensors of this comparison.
    """
    ranks = dist.get_process_group_ranks(group)
    own_digest = torch.tensor([layout_digest(items, bucket_bytes)], device=device)
    digests = [torch.empty_like(own_digest) for _ in ranks]
    dist.all_gather(digests, own_digest, group=group)
    for rank, digest_of_rank in zip(ranks, digests):
        if int(digest_of_rank) != int(digests[0]):
            raise HolmesError(
                f"GradientReducer: rank {rank} has other parameters or another bucket size than rank "
                f"{ranks[0]}: names, shapes, dtypes, order and bucket_bytes must be the same in one "
                f"group"
            )


class _PendingCopy(NamedTuple):
    """A gradient, and the reduced values that must be copied into it."""

    gradient: torch.Tensor
    view: torch.Tensor  # the gradient's elements in the buffer of the bucket


class FlatBucket:
    """Flat buffer that reduces several gradients together.

    In each step, fill() copies the gradients into the buffer, a reduction sums the buffer over the ranks, and
    store() brings the sums back into the gradients.
    """

    def __init__(
        self,
        indices: tuple[int, ...],
        items: Sequence[Item],
        multiple: int = 1,
        keeps_buffer: bool = True,
    ):
        """Create a flat buffer for several gradients; its memory is allocated by the first fill().

        Args:
            indices: Indices of the bucket's gradients in `items`.
            items: All gradients.
            multiple: The buffer is padded with zeros to a multiple of so many elements.
            keeps_buffer: True: the buffer is kept for the next step, because the first access to
                new memory is slow. False: each step has a new buffer. To save memory, fill() then
                replaces contiguous gradients of the same dtype by views of the buffer.
        """
        self._dtype, self._device = items[indices[0]].key
        self._sizes = [items[index].numel for index in indices]
        self._padding = -sum(self._sizes) % multiple
        self._names = [items[index].name for index in indices]
        self._flat: torch.Tensor | None = None
        self.indices = indices
        self.keeps_buffer = keeps_buffer
        self.bytes = sum(self._sizes) * self._dtype.itemsize
        #: (number of elements, rank that needs their sum), for a reduction to owners (owned.py).
        self.spans: list[tuple[int, int]] = []
        self.reset()

    def reset(self) -> None:
        """Mark all gradients of the bucket as not final and not reduced, for the next training step."""
        #: Number of gradients that are not final yet.
        self.missing = len(self.indices)
        #: Events of the final gradients (side_stream.py).
        self.gradient_events: Any = {}
        #: The reduction under way; None before.
        self.work: Any = None
        #: Whether the sums are in the gradients.
        self.stored = False
        #: When the reduction ended, by time.perf_counter(); 0 before.
        self.done_at = 0.0
        #: Sums that store() must copy from the buffer into a gradient.
        self._pending_copies: list[_PendingCopy] = []

    @property
    def flat(self) -> torch.Tensor:
        """The flat tensor with the bucket's gradients. It exists from fill() to store()."""
        assert self._flat is not None
        return self._flat

    def fill(
        self, parameters: Sequence[torch.nn.Parameter], gradient_of: Gradient, divisor: float
    ) -> None:
        """Copy the gradients into the bucket's flat buffer, and divide the values in the buffer.

        A parameter without a gradient counts as zeros, and its .grad becomes zeros. If the bucket
        keeps no buffer (keeps_buffer=False), .grad becomes a view of the buffer, provided that it
        is contiguous and of the buffer's dtype. All other gradients stay where they are. After the
        reduction, store() copies the results back into them.

        Args:
            parameters: All parameters of the reducer.
            gradient_of: Returns the final gradient of a parameter.
            divisor: Divides all values.
        """
        if self._flat is None:
            self._flat = self._new_buffer()
        own_parameters = [parameters[index] for index in self.indices]
        gradients = []
        for parameter in own_parameters:
            gradient = gradient_of(parameter)
            if gradient is None:
                gradient = torch.zeros_like(parameter)
                parameter.grad = gradient
            gradients.append(gradient)
        pieces = self._flat.split([*self._sizes, self._padding])

        # zip() leaves out the last piece, the padding.
        views = [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients)]
        with torch.no_grad():
            torch._foreach_copy_(views, gradients)
        if divisor != 1:
            self._flat.div_(divisor)
        for parameter, gradient, view in zip(own_parameters, gradients, views):
            if self._can_become_view(parameter, gradient):
                parameter.grad = view
                if gradient.is_cuda:
                    # The backward pass must not reuse the old gradient's memory before the copy.
                    gradient.record_stream(torch.cuda.current_stream())
            else:
                self._pending_copies.append(_PendingCopy(gradient, view))

    def store(self, divisor: float) -> None:
        """Divide the reduced values in the bucket's buffer, and copy them back into the gradients.

        Gradients that are views of the buffer need no copy.

        Args:
            divisor: Divides all sums.
        """
        if divisor != 1:
            self.flat.mul_(1 / divisor)
        if self._pending_copies:
            gradients = [copy.gradient for copy in self._pending_copies]
            views = [copy.view for copy in self._pending_copies]
            with torch.no_grad():
                torch._foreach_copy_(gradients, views)
        self.stored = True
        self._pending_copies = []
        if not self.keeps_buffer:
            self._flat = None

    def _new_buffer(self) -> torch.Tensor:
        """Return a new buffer for the bucket's gradients, with zeros as padding."""
        numel = sum(self._sizes)
        buffer = torch.empty(numel + self._padding, dtype=self._dtype, device=self._device)
        buffer[numel:].zero_()
        return buffer

    def _can_become_view(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> bool:
        """Return whether a view of the buffer may replace a gradient, so that no copy back is needed."""
        return (
            not self.keeps_buffer
            and gradient is parameter.grad
            and gradient.dtype == self._dtype
            and not gradient.requires_grad
            and gradient.is_contiguous()
        )

    def __str__(self) -> str:
        return f"{self.bytes} bytes, {self._names[0]} to {self._names[-1]}"

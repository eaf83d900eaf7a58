"""Flat buffers of gradients on their way: filled, reduced, stored back. Where buckets are cut: plan/cost/buckets.py."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holmes_ext.plan.cost.buckets import cut

#: torch DistributedDataParallel's bucket_cap_mb; used where nothing is known of the fabric.
DEFAULT_BYTES = 25 * 2**20
#: A parameter's final gradient, or None where this rank has none.
Gradient = Callable[[torch.nn.Parameter], torch.Tensor | None]


@dataclass(frozen=True)
class Item:
    """One gradient to be reduced: its parameter's name, number of elements, bytes of an element on the wire, and a key
    (dtype, device) that all items of a bucket share."""

    name: str
    numel: int
    itemsize: int
    key: Any

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


def fill_buckets(items: Sequence[Item], order: Sequence[int], limit_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Indices into `items`, in `order`, cut as plan/cost/buckets.py says."""
    found = cut([items[index].bytes for index in order], limit_bytes, [items[index].key for index in order])
    return tuple(tuple(order[place] for place in bucket) for bucket in found)


def layout_digest(items: Sequence[Item], limit_bytes: int) -> int:
    """A 63-bit number that differs where the items, their order or the bucket size differ."""
    content = [[item.name, item.numel, item.itemsize, str(item.key)] for item in items]
    text = json.dumps([content, limit_bytes])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class FlatBucket:
    """indices: of its parameters; missing: how many of their gradients are not final yet; work: its reduction once
    launched; done_at: when that ended (time.perf_counter), 0 before; spans: who needs which part (owned.py)."""

    def __init__(self, indices: tuple[int, ...], items: Sequence[Item]):
        dtype, device = items[indices[0]].key
        sizes = [items[index].numel for index in indices]
        self.indices = indices
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.bytes = self.flat.nbytes
        self._views = self.flat.split(sizes)
        self._names = [items[index].name for index in indices]
        self.spans: list[tuple[int, int]] = []
        self.reset()

    def reset(self) -> None:
        """Before a step."""
        self.missing = len(self.indices)
        self._gradients: list[torch.Tensor] = []
        self.work: Any = None
        self.done_at = 0.0

    def fill(self, parameters: Sequence[torch.nn.Parameter], gradient_of: Gradient, divisor: float) -> None:
        """Copy the gradients in, divided; zeros, here and in .grad, for a parameter that has none."""
        for index, view in zip(self.indices, self._views):
            parameter = parameters[index]
            gradient = gradient_of(parameter)
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            view.copy_(gradient.detach().reshape(-1))
            self._gradients.append(gradient)
        if divisor != 1:
            self.flat.div_(divisor)

    def store(self, divisor: float) -> None:
        """Copy the sums back, divided."""
        if divisor != 1:
            self.flat.mul_(1 / divisor)
        with torch.no_grad():
            for gradient, view in zip(self._gradients, self._views):
                gradient.copy_(view.view(gradient.shape))

    def __str__(self) -> str:
        return f"{self.bytes} bytes, {self._names[0]} to {self._names[-1]}"

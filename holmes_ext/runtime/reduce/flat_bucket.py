"""Flat buffers of gradients: filled, reduced, stored back. Where buckets are cut: plan/buckets.py."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holmes_ext.errors import HolmesError
from holmes_ext.plan.buckets import cut

#: torch DistributedDataParallel's bucket_cap_mb; used where nothing is known of the fabric.
DEFAULT_BYTES = 25 * 2**20
#: A parameter's final gradient, or None where this rank has none.
Gradient = Callable[[torch.nn.Parameter], torch.Tensor | None]


@dataclass(frozen=True)
class Item:
    """One gradient: its parameter's name, elements, bytes of an element on the wire, and the key (dtype,
    device) that all items of a bucket share."""

    name: str
    numel: int
    itemsize: int
    key: tuple[torch.dtype, torch.device]

    @classmethod
    def of(cls, name: str, parameter: torch.nn.Parameter, dtype: torch.dtype | None) -> Item:
        """dtype: on the wire; None: the gradient's."""
        dtype = dtype or parameter.dtype
        return cls(name, parameter.numel(), dtype.itemsize, (dtype, parameter.device))

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


def named_parameters(parameters: Iterable[Any]) -> list[tuple[str, torch.nn.Parameter]]:
    """Of (name, parameter) pairs or parameters those that are reduced, each once."""
    named, seen = [], set()
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
    """Indices into `items`, in `order`, cut as plan/buckets.py says."""
    buckets = cut(
        [items[index].bytes for index in order], limit_bytes, [items[index].key for index in order]
    )
    return tuple(tuple(order[place] for place in bucket) for bucket in buckets)


def layout_digest(items: Sequence[Item], limit_bytes: int) -> int:
    """A 63-bit number that differs where items, order or bucket size do. Of devices count the kind, and which
    items share one: ranks of a node have others."""
    places: dict[torch.device, int] = {}
    content = [
        [
            item.name,
            item.numel,
            item.itemsize,
            str(dtype),
            device.type,
            places.setdefault(device, len(places)),
        ]
        for item in items
        for dtype, device in (item.key,)
    ]
    text = json.dumps([content, limit_bytes])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class FlatBucket:
    """indices: of its parameters; missing: gradients that are not final yet; ready: side_stream.py's; work:
    its reduction; done_at: when that ended (time.perf_counter), 0 before; spans: who needs what (owned.py);
    multiple: of elements, zeros at the end.

    kept: the buffer stays (fresh pages cost as much as the copy). Else it lives from fill() on, and gradients
    that travel as they are become views of it: never more than one bucket is there twice.
    """

    def __init__(
        self, indices: tuple[int, ...], items: Sequence[Item], multiple: int = 1, kept: bool = True
    ):
        self._dtype, self._device = items[indices[0]].key
        self._sizes = [items[index].numel for index in indices]
        self._padding = -sum(self._sizes) % multiple
        self.indices, self.kept = indices, kept
        self.bytes = sum(self._sizes) * self._dtype.itemsize
        self._names = [items[index].name for index in indices]
        self.spans: list[tuple[int, int]] = []
        self._flat: torch.Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Before a step."""
        self.missing = len(self.indices)
        self.ready: Any = {}
        self._stores: list[tuple[torch.Tensor, torch.Tensor]] = []  # (gradient, view)
        self.work: Any = None
        self.stored = False
        self.done_at = 0.0

    @property
    def flat(self) -> torch.Tensor:
        """The buffer, from fill() to store()."""
        assert self._flat is not None
        return self._flat

    def fill(
        self, parameters: Sequence[torch.nn.Parameter], gradient_of: Gradient, divisor: float
    ) -> None:
        """Copy the gradients in, divided; zeros, here and in .grad, for a parameter that has none."""
        if self._flat is None:
            self._flat = torch.empty(
                sum(self._sizes) + self._padding, dtype=self._dtype, device=self._device
            )
            self._flat[sum(self._sizes) :].zero_()
        of, gradients = [parameters[index] for index in self.indices], []
        for parameter in of:
            if (gradient := gradient_of(parameter)) is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            gradients.append(gradient)
        views = [
            view.view(g.shape)
            for view, g in zip(self._flat.split([*self._sizes, self._padding]), gradients)
        ]
        with torch.no_grad():
            torch._foreach_copy_(views, gradients)
        if divisor != 1:
            self._flat.div_(divisor)
        for parameter, gradient, view in zip(of, gradients, views):
            travels = (
                gradient is parameter.grad
                and gradient.dtype == view.dtype
                and not gradient.requires_grad
            )
            if self.kept or not travels or not gradient.is_contiguous():
                self._stores.append((gradient, view))
            else:
                parameter.grad = view
                if (
                    gradient.is_cuda
                ):  # its memory may be given to the backward pass only after the copy
                    gradient.record_stream(torch.cuda.current_stream())

    def store(self, divisor: float) -> None:
        """The sums, divided, into the gradients."""
        if divisor != 1:
            self.flat.mul_(1 / divisor)
        if self._stores:
            with torch.no_grad():
                into, sums = map(list, zip(*self._stores))
                torch._foreach_copy_(into, sums)
        self.stored, self._stores = True, []
        if not self.kept:
            self._flat = None

    def __str__(self) -> str:
        return f"{self.bytes} bytes, {self._names[0]} to {self._names[-1]}"

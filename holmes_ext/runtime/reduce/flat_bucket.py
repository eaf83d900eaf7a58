"""One flat buffer of gradients on its way: filled, reduced, stored back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from holmes_ext.runtime.reduce.buckets import Item

#: A parameter's final gradient, or None where this rank has none.
Gradient = Callable[[torch.nn.Parameter], torch.Tensor | None]


class FlatBucket:
    """indices: of its parameters; missing: how many of their gradients are not final yet; work: its reduction once launched; done_at: when that
    ended (time.perf_counter), 0 before; spans: who needs which part (runtime/reduce/owned.py)."""

    def __init__(self, indices: tuple[int, ...], items: Sequence[Item]):
        dtype, device = items[indices[0]].key
        sizes = [items[index].numel for index in indices]
        self.indices = indices
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=device)
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

    @property
    def bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def __str__(self) -> str:
        return f"{self.bytes} bytes, {self._names[0]} to {self._names[-1]}"

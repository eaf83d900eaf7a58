"""Backward passes in two: linear layers' weights get their gradients when the plan says.

    forward    under of(micro_batch) each linear layer keeps its weight out of the graph
    backward   makes all other gradients, of inputs too, and keeps (input, gradient of the output) of each
               such layer
    make(...)  the weights' gradients of a micro-batch, by autograd's accumulation: hooks of parameters see
               them

What a linear layer keeps between the two is what its backward would need, and no more (Qi et al. 2024, arXiv
2401.10241, section 2.3). Calls that are not F.linear of a parameter (or under autocast, which makes another
weight of it) take the usual way: all their gradients come with the backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


class WeightGradients:
    """Of one pipeline stage."""

    def __init__(self) -> None:
        # ((weight,), input, gradient of the output) of each layer, in the order of the backward pass
        self._kept: dict[int, list[tuple[Any, Any, Any]]] = defaultdict(list)

    @contextmanager
    def of(self, micro_batch: int) -> Iterator[None]:
        """Linear layers that run meanwhile are the micro-batch's."""
        mode, _ = _classes()
        with mode(self._kept[micro_batch]):
            yield

    def make(self, micro_batch: int) -> None:
        """Its weights' gradients; its backward pass is over."""
        import torch

        kept = self._kept.pop(micro_batch, [])
        weights, gradients = [], []
        with torch.no_grad():
            for (weight,), given, gradient in kept:
                rows = gradient.reshape(-1, gradient.shape[-1])
                weights.append(weight)
                gradients.append(rows.t().mm(given.reshape(-1, given.shape[-1])))
        if weights:
            torch.autograd.backward(weights, gradients)


@cache
def _classes() -> tuple[Any, Any]:
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    class Linear(torch.autograd.Function):
        """F.linear that keeps what its weight's gradient needs. owner: (the parameter,), out of the graph."""

        @staticmethod
        def forward(ctx: Any, given: Any, weight: Any, bias: Any, owner: Any, kept: Any) -> Any:
            ctx.save_for_backward(given, weight)
            ctx.owner, ctx.kept = owner, kept
            return functional.linear(given, weight, bias)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            given, weight = ctx.saved_tensors
            ctx.kept.append((ctx.owner, given, gradient))
            rows = gradient.reshape(-1, gradient.shape[-1])
            return (
                gradient.matmul(weight),
                None,
                rows.sum(0) if ctx.needs_input_grad[2] else None,
                None,
                None,
            )

    class Keeping(TorchFunctionMode):
        def __init__(self, kept: list[Any]):
            super().__init__()
            self.kept = kept

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is functional.linear and torch.is_grad_enabled():
                bound = dict(zip(("input", "weight", "bias"), args), **(kwargs or {}))
                given, weight, bias = bound["input"], bound["weight"], bound.get("bias")
                later = weight.is_leaf and weight.requires_grad and given.requires_grad
                if later and not torch.is_autocast_enabled(given.device.type):
                    return Linear.apply(given, weight.detach(), bias, (weight,), self.kept)
            return func(*args, **(kwargs or {}))

    return Keeping, Linear

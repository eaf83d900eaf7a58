"""Splits the backward pass of linear layers: the gradients of weights are computed later than the others.

Another pipeline stage waits for the gradient of a stage's input, but none waits for gradients of weights.
So a stage sends the former early, and computes the latter when it would idle otherwise. The plan lists when
(zero-bubble schedules).

    1  forward    Inside of(micro_batch), each linear layer keeps its weight out of autograd's graph.
    2  backward   autograd computes all other gradients, including those of inputs. Each such layer keeps its
                  input and the gradient of its output.
    3  make()     computes the gradients of the weights of a micro-batch, and accumulates them by autograd,
                  so that hooks of parameters run.

A linear layer keeps between steps 2 and 3 exactly what its whole backward pass would need (Qi et al. 2024,
arXiv 2401.10241, section 2.3). Only calls of torch.nn.functional.linear with a parameter as weight are split,
and not under autocast: it replaces the weight by a copy. All other gradients are computed in step 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple


class _KeptLayer(NamedTuple):
    """Tensors of a linear layer that are kept to compute the gradient of its weight later."""

    weight: Any  # the parameter
    layer_input: Any  # of the forward pass
    output_gradient: Any  # from the backward pass


class WeightGradients:
    """Weight gradients of a pipeline stage that are computed after the backward pass."""

    def __init__(self) -> None:
        #: Micro-batch -> its linear layers, in the order of the backward pass.
        self._kept: dict[int, list[_KeptLayer]] = defaultdict(list)

    @contextmanager
    def of(self, micro_batch: int) -> Iterator[None]:
        """Postpone the weight gradients of linear layers, if their forward pass runs in this `with` block.

        Their backward pass computes all other gradients, and keeps the tensors that make() needs.

        Args:
            micro_batch: Number of the micro-batch in the forward pass.
        """
        mode = _split_linear_mode()
        with mode(self._kept[micro_batch]):
            yield

    def make(self, micro_batch: int) -> None:
        """Compute the postponed weight gradients of a micro-batch, and add them to the .grad of the weights.

        The micro-batch's backward pass has computed all other gradients. Of each linear layer it has kept the
        input x and the gradient g of the output. The gradient of the weight is the product of g, transposed,
        and x.

        Args:
            micro_batch: Number of the micro-batch, as the `with` block of its forward pass got it.
        """
        import torch

        weights = []
        gradients = []
        with torch.no_grad():
            for layer in self._kept.pop(micro_batch, []):
                output_gradient = _as_rows(layer.output_gradient)
                layer_input = _as_rows(layer.layer_input)
                weights.append(layer.weight)
                gradients.append(output_gradient.t().mm(layer_input))
        if weights:
            # Accumulates like any backward pass, so the hooks of the parameters run.
            torch.autograd.backward(weights, gradients)


def _as_rows(tensor: Any) -> Any:
    """Return a tensor as a matrix: the last dimension stays, the others are flattened."""
    return tensor.reshape(-1, tensor.shape[-1])


@cache
def _split_linear_function() -> Any:
    """Return the autograd function of a linear layer without a weight gradient.

    The class is defined inside a function, so that importing this module does not import torch.
    """
    import torch
    from torch.nn import functional

    class SplitLinear(torch.autograd.Function):
        """functional.linear whose backward pass keeps the tensors for the weight gradient.

        Arguments of apply(): the input, the detached weight, the bias or None, a tuple with the weight itself
        (the tuple hides it from autograd), and a list. The backward pass appends the layer to it.
        """

        @staticmethod
        def forward(
            ctx: Any, layer_input: Any, weight: Any, bias: Any, parameter: Any, kept: Any
        ) -> Any:
            ctx.save_for_backward(layer_input, weight)
            ctx.parameter = parameter
            ctx.kept = kept
            return functional.linear(layer_input, weight, bias)

        @staticmethod
        def backward(ctx: Any, output_gradient: Any) -> Any:
            layer_input, weight = ctx.saved_tensors
            (parameter,) = ctx.parameter
            ctx.kept.append(_KeptLayer(parameter, layer_input, output_gradient))
            input_gradient = output_gradient.matmul(weight)
            bias_gradient = None
            _, _, needs_bias_gradient, _, _ = ctx.needs_input_grad
            if needs_bias_gradient:
                bias_gradient = _as_rows(output_gradient).sum(0)
            # A gradient for each argument of forward(). The weight's is computed later, by make().
            return input_gradient, None, bias_gradient, None, None

    return SplitLinear


@cache
def _split_linear_mode() -> Any:
    """Return a torch-function mode: inside it, linear layers postpone the gradients of their weights.

    It replaces functional.linear by SplitLinear. The backward pass of SplitLinear computes no gradient of the
    weight, but keeps the tensors that WeightGradients.make() computes it from later.

    The class is defined inside a function, so that importing this module does not import torch.
    """
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    split_linear = _split_linear_function()

    class SplitLinearMode(TorchFunctionMode):
        """Mode that leaves the gradients of weights out of the backward pass of linear layers.

        Each layer appends the tensors for the later computation of this gradient to the list `kept`.
        """

        def __init__(self, kept: list[_KeptLayer]):
            super().__init__()
            self.kept = kept

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            """Call SplitLinear for a linear layer whose weight is trained; call all other functions as is.

            SplitLinear has the result of functional.linear. Its backward pass computes no gradient
            of the weight. Instead it appends (weight, layer input, output gradient) to self.kept,
            to compute the gradient of the weight later.
            """
            keywords = kwargs or {}
            if func is not functional.linear or not torch.is_grad_enabled():
                return func(*args, **keywords)
            arguments = dict(zip(("input", "weight", "bias"), args), **keywords)
            layer_input = arguments["input"]
            weight = arguments["weight"]
            is_trained = weight.is_leaf and weight.requires_grad and layer_input.requires_grad

            # Autocast replaces the weight by a copy, so its gradient would not reach the parameter.
            if not is_trained or torch.is_autocast_enabled(layer_input.device.type):
                return func(*args, **keywords)
            bias = arguments.get("bias")

            # autograd gets the weight detached, so it computes no gradient of the weight. self.kept
            # needs the parameter itself. It is passed in a tuple, because autograd ignores tensors
            # inside of containers.
            return split_linear.apply(layer_input, weight.detach(), bias, (weight,), self.kept)

    return SplitLinearMode

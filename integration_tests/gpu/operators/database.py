"""Calls each operator of torch's own test database (OpInfo) on the CPU and on an emulated GPU."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

warnings.simplefilter("ignore")

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.bool,
)

#: Operators whose results are random numbers or uninitialized memory. They are not compared.
RANDOM = {
    "bernoulli",
    "cauchy",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "new_empty",
    "new_empty_strided",
    "normal",
    "pca_lowrank",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "svd_lowrank",
    "uniform",
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.rrelu",
}

#: Operators whose sample inputs name a device, or have a memory layout that a copy would lose. They are not
#: compared.
NOT_MOVED = {
    "as_strided",
    "full_like",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "tensor_split",
    "to",
    "zeros_like",
}

#: Operators that torch computes differently on CUDA than on the CPU -> the difference.
OTHERWISE = {
    "linalg.lstsq": "LAPACK's driver: gels on CUDA, gelsy on the CPU",
    "renorm": "its derivative adds up in float on CUDA, in double on the CPU",
    "nn.functional.linear_cross_entropy": "chunks add up in another type on CUDA",
    "sparse.mm.reduce": "torch has it for the CPU only",
    "nn.functional.multi_head_attention_forward": (
        "its samples draw dropout (test_training.py has it without)"
    ),
}


def moved(value: Any, device: str) -> Any:
    """Return a copy of a tree whose tensors are leaves on the device."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to(device).requires_grad_(leaf.requires_grad)

    return tree_map(move, value)


def tensors(value: Any) -> list[torch.Tensor]:
    leaves, _ = tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are equal in all bits; NaN equals NaN."""
    right = right.detach().cpu()
    left = left.detach()
    if left.layout != torch.strided:
        left, right = left.to_dense(), right.to_dense()
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_complex():
        left = torch.view_as_real(left.resolve_conj().contiguous())
        right = torch.view_as_real(right.resolve_conj().contiguous())
    if left.is_floating_point():
        if not torch.equal(left.isnan(), right.isnan()):
            return False
        return torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0))
    return torch.equal(left, right)


def operators() -> list[Any]:
    return [op for op in op_db if op.name not in RANDOM | NOT_MOVED]


def title(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def dtypes_of(op: Any) -> list[torch.dtype]:
    return [dtype for dtype in DTYPES if dtype in op.dtypes and dtype in op.dtypesIfCUDA]


def differences(op: Any, dtype: torch.dtype, most: int) -> Iterator[str]:
    """Run up to `most` samples on both devices, forward and backward, and yield the differences."""
    with_gradients = (
        op.supports_autograd
        and (dtype.is_floating_point or dtype.is_complex)
        and dtype in op.backward_dtypes
        and dtype in op.backward_dtypesIfCUDA
    )
    for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=with_gradients)):
        if index == most:
            break
        call = (sample.input, sample.args, sample.kwargs)
        if sample.kwargs.get("dropout_p"):
            continue
        on_cpu = moved(call, "cpu")
        on_gpu = moved(call, "cuda")
        try:
            expected = _call(op, on_cpu)
        except RuntimeError:  # the CPU has no kernel for this operator
            continue
        result = _call(op, on_gpu)
        pairs = list(zip(tensors(expected), tensors(result), strict=True))
        for left, right in pairs:
            if not equal_bits(left, right):
                yield f"{dtype}, sample {index}: {left.shape} {left.flatten()[:4]} and {right.flatten()[:4]}"
            if left.layout == torch.strided and left.stride() != right.stride():
                yield f"{dtype}, sample {index}: strides {left.stride()} and {right.stride()}"
        if with_gradients:
            for problem in gradient_differences(pairs, on_cpu, on_gpu):
                yield f"{dtype}, sample {index}: {problem}"


def _call(op: Any, call: tuple[Any, tuple, dict]) -> Any:
    first_input, args, kwargs = call
    return op(first_input, *args, **kwargs)


def gradient_differences(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], on_cpu: Any, on_gpu: Any
) -> Iterator[str]:
    """Yield the differences between the gradients of the inputs on the CPU and on the GPU."""
    pairs = [
        (left, right)
        for left, right in pairs
        if left.requires_grad and left.layout == torch.strided
    ]
    inputs = [
        (left, right)
        for left, right in zip(tensors(on_cpu), tensors(on_gpu), strict=True)
        if left.requires_grad
    ]
    if not pairs or not inputs:
        return
    weights = [torch.randn_like(left) for left, _ in pairs]
    try:
        expected = torch.autograd.grad(
            [left for left, _ in pairs], [left for left, _ in inputs], weights, allow_unused=True
        )
    except RuntimeError:  # the CPU has no derivative of this operator
        return
    gradients = torch.autograd.grad(
        [right for _, right in pairs],
        [right for _, right in inputs],
        [weight.cuda() for weight in weights],
        allow_unused=True,
    )
    for left, right in zip(expected, gradients, strict=True):
        if left is None or right is None:
            is_equal = left is right
        else:
            is_equal = equal_bits(left, right)
        if not is_equal:
            yield f"gradients {left} and {right}"

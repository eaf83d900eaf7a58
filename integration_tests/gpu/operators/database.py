"""torch's own database of operators (OpInfo): the same call on the CPU and on an emulated GPU."""

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

#: Their numbers are random, or memory that nobody wrote.
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

#: Their calls name a device, or lay their input out in memory in a way that a copy loses.
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

#: torch itself computes them otherwise on CUDA than on the CPU. operator -> how
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
    """With each tensor in it on a device, a leaf like before."""
    return tree_map(
        lambda one: (
            one.detach().to(device).requires_grad_(one.requires_grad)
            if isinstance(one, torch.Tensor)
            else one
        ),
        value,
    )


def tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in tree_flatten(value)[0] if isinstance(one, torch.Tensor)]


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Also where both are not a number."""
    right = right.detach().cpu()
    left = left.detach()
    if left.layout != torch.strided:
        left, right = left.to_dense(), right.to_dense()
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_complex():
        left, right = (torch.view_as_real(one.resolve_conj().contiguous()) for one in (left, right))
    if left.is_floating_point():
        return torch.equal(left.isnan(), right.isnan()) and torch.equal(
            left.nan_to_num(7.0), right.nan_to_num(7.0)
        )
    return torch.equal(left, right)


def operators() -> list[Any]:
    return [op for op in op_db if op.name not in RANDOM | NOT_MOVED]


def title(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def dtypes_of(op: Any) -> list[torch.dtype]:
    return [dtype for dtype in DTYPES if dtype in op.dtypes and dtype in op.dtypesIfCUDA]


def differences(op: Any, dtype: torch.dtype, most: int) -> Iterator[str]:
    """Runs `most` samples on both devices, forward and, where there is one, backward."""
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
        on_cpu, on_gpu = moved(call, "cpu"), moved(call, "cuda")
        try:
            expected = op(on_cpu[0], *on_cpu[1], **on_cpu[2])
        except RuntimeError:  # the CPU has no kernel for it
            continue
        found = op(on_gpu[0], *on_gpu[1], **on_gpu[2])
        pairs = list(zip(tensors(expected), tensors(found), strict=True))
        for left, right in pairs:
            if not equal_bits(left, right):
                yield f"{dtype}, sample {index}: {left.shape} {left.flatten()[:4]} and {right.flatten()[:4]}"
            if left.layout == torch.strided and left.stride() != right.stride():
                yield f"{dtype}, sample {index}: strides {left.stride()} and {right.stride()}"
        if with_gradients:
            for problem in gradient_differences(pairs, on_cpu, on_gpu):
                yield f"{dtype}, sample {index}: {problem}"


def gradient_differences(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], on_cpu: Any, on_gpu: Any
) -> Iterator[str]:
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
    except RuntimeError:  # the CPU has no derivative for it
        return
    found = torch.autograd.grad(
        [right for _, right in pairs],
        [right for _, right in inputs],
        [weight.cuda() for weight in weights],
        allow_unused=True,
    )
    for left, right in zip(expected, found, strict=True):
        if (left is None) != (right is None) or left is not None and not equal_bits(left, right):
            yield f"gradients {left} and {right}"

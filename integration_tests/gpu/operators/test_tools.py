"""Tests tools on an emulated GPU: CUDA sanitizer, torch.compile, profiler, attention backends."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from integration_tests.gpu.operators.test_asynchrony import in_a_process

RACE = """
    import torch
    side = torch.cuda.Stream()
    values = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    values.add_(1)
    {wait}
    with torch.cuda.stream(side):
        try:
            print((values * 2).sum().item())
        except Exception as error:
            print(type(error).__name__, *error.errors)
"""


def test_the_sanitizer_names_both_sides_of_a_race():
    output = in_a_process(RACE.format(wait=""), TORCH_CUDA_SANITIZER="1")
    assert "CUDASanitizerErrors" in output and "possible data race" in output
    assert "aten::mul.Tensor" in output and "aten::add_.Tensor" in output


def test_the_sanitizer_finds_nothing_where_the_stream_waits():
    code = RACE.format(wait="side.wait_stream(torch.cuda.current_stream())")
    output = in_a_process(code, TORCH_CUDA_SANITIZER="1")
    assert output.strip() == "4000.0"


def test_compiled_functions_compute_the_same():
    inputs = torch.randn(8, 8, device="cuda", requires_grad=True)

    def function(x):
        return (x.sin() @ x + 1).relu().sum()

    function(inputs).backward()
    expected, inputs.grad = inputs.grad, None
    torch.compile(function, mode="max-autotune")(inputs).backward()
    assert torch.equal(inputs.grad, expected)


def test_the_profiler_sees_the_host():
    inputs = torch.randn(8, 8, device="cuda")
    with torch.profiler.profile() as profile:
        inputs @ inputs
    assert any(event.key == "aten::mm" for event in profile.key_averages())


BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_attention_whichever_is_chosen(backend, dtype):
    """Attention has the CPU's numbers, forward and backward.

    With a fused backend, all bits are those of the CPU's flash kernel.
    """
    if (backend, dtype) == (SDPBackend.FLASH_ATTENTION, torch.float32):
        pytest.skip("CUDA's flash kernel takes no float32")
    inputs = [torch.randn(1, 2, 8, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    inputs_on_cpu = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(backend):
        output = attend(*(tensor.cuda() for tensor in inputs), is_causal=True)
    output.sum().backward()
    output_on_cpu = attend(*inputs_on_cpu, is_causal=True)
    output_on_cpu.sum().backward()
    pairs = [(output.cpu(), output_on_cpu)]
    pairs += [(left.grad, right.grad) for left, right in zip(inputs, inputs_on_cpu)]
    for left, right in pairs:
        if backend is SDPBackend.MATH:
            assert torch.allclose(left, right, atol=1e-2)
        else:
            assert torch.equal(left, right)


def test_a_graph_is_refused_by_name():
    with (
        pytest.raises(RuntimeError, match="CUDA graphs are not emulated"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        pass
    assert (torch.ones(2, device="cuda") + 1).tolist() == [2, 2]


def test_memory_that_is_out_is_torchs_own_error():
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(1 << 40, device="cuda")
    assert torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties(0).total_memory


def test_batches_through_pinned_memory():
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    batches = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    assert [batch.cuda(non_blocking=True).sum().item() for (batch,) in batches] == [6.0, 22.0]

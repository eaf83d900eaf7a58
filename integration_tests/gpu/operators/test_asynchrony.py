"""Tests that an emulated GPU runs asynchronously like a physical one.

The host runs ahead of the device, memory is reused in the order of a stream, and an error in a kernel is
reported later, with the operator's name.
"""

import ctypes
import json
import os
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def blocked():
    """Hold back all work that is launched on the current stream, until the context ends.

    The test fails if the host has waited for the stream meanwhile. The context yields the event that opens
    the stream early.
    """
    gate = threading.Event()
    was_opened = []  # False: the function below waited until its timeout
    stream = torch.cuda.current_stream()
    # The stream calls this function on the host before any kernel that is launched after it.
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: was_opened.append(gate.wait(30)))
    ctypes.CDLL(None).cudaLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), function, None)
    try:
        yield gate
    finally:
        gate.set()
        stream.synchronize()
    assert was_opened == [True], "the host waited for the stream"


def in_a_process(code: str, **environ: str) -> str:
    """Run code in another process, and return its output.

    A process cannot use a device any more after a kernel has failed.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environ},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + 1,
        lambda x: x @ x,
        lambda x: torch.nn.functional.layer_norm(x, (8,)),
        lambda x: torch.nn.functional.conv1d(x[None], x[:, :, None]),
        lambda x: torch.nn.functional.dropout(x, 0.5),
        lambda x: x.sort()[0],
        lambda x: torch.linalg.inv_ex(x @ x.T + 10 * torch.eye(8, device="cuda")),
        lambda x: torch.nn.functional.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None]
        ),
        lambda x: x.index_select(0, torch.arange(3, device="cuda")),
        lambda x: torch.randn(5, device="cuda"),
        lambda x: torch._foreach_mul([x, x], 2.0),
        lambda x: x.to(torch.bfloat16),
        lambda x: torch.cat([x, x]),
        lambda x: x.clone().masked_fill_(x > 0, 0.0),
        lambda x: torch.empty(8, 8, pin_memory=True).copy_(x, non_blocking=True),
    ],
    ids=[
        "add",
        "matmul",
        "layer_norm",
        "conv1d",
        "dropout",
        "sort",
        "inv_ex",
        "attention",
        "index_select",
        "randn",
        "foreach",
        "to",
        "cat",
        "masked_fill",
        "copy to pinned",
    ],
)
def test_host_runs_ahead(call):
    inputs = torch.randn(8, 8, device="cuda")
    torch.cuda.synchronize()
    with blocked():
        call(inputs)  # at the first call, the shapes of the outputs are not known yet
        call(inputs)


def test_host_runs_ahead_through_a_training_step():
    layer = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    ).cuda()
    optimizer = torch.optim.AdamW(layer.parameters())
    inputs = torch.randn(4, 8, device="cuda")
    layer(inputs).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    with blocked():
        for _ in range(3):
            optimizer.zero_grad()
            layer(inputs).sum().backward()
            optimizer.step()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.unique(x),
        lambda x: x.cpu(),
        lambda x: torch.equal(x, x),
        lambda x: x.masked_select(x > 0),
        lambda x: bool(x.any()),
        lambda x: x.repeat_interleave(torch.ones(8, dtype=torch.long, device="cuda"), 0),
    ],
    ids=[
        "item",
        "nonzero",
        "mask",
        "unique",
        "cpu",
        "equal",
        "masked_select",
        "bool",
        "repeat_interleave",
    ],
)
def test_who_reads_values_waits(call):
    inputs = torch.randn(8, 8, device="cuda")
    torch.cuda.synchronize()
    with blocked() as gate:
        returned_while_blocked = []

        def run():
            call(inputs)
            returned_while_blocked.append(not gate.is_set())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(timeout=1)  # a call that does not wait returns within this time
        gate.set()
        thread.join()
    assert returned_while_blocked == [False]


def test_streams_do_not_wait_for_each_other():
    side = torch.cuda.Stream()
    inputs = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with blocked(), torch.cuda.stream(side):
        assert (inputs + 1).sum().item() == 8


def test_a_missing_wait_gives_old_numbers():
    side = torch.cuda.Stream()
    source, wrong, right = (torch.zeros(4, device="cuda") for _ in range(3))
    torch.cuda.synchronize()
    written = torch.cuda.Event()
    with torch.cuda.stream(side), blocked():
        source.fill_(5)
        written.record()
        with torch.cuda.stream(torch.cuda.default_stream()):
            wrong.copy_(source)
            torch.cuda.current_stream().synchronize()
    torch.cuda.current_stream().wait_event(written)
    right.copy_(source)
    assert wrong.tolist() == [0] * 4 and right.tolist() == [5] * 4


def test_memory_is_reused_in_stream_order():
    """The next tensor of a stream takes freed memory at once, as a stream's kernels run in order."""
    torch.cuda.empty_cache()
    first = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    with blocked():
        doubled = first * 2
        address = first.data_ptr()
        del first
        second = torch.full((1000,), 7.0, device="cuda")
        assert second.data_ptr() == address
    assert doubled.sum().item() == 2000 and second.sum().item() == 7000


def test_a_buffer_that_another_stream_still_reads_is_overwritten():
    """Freed memory is reused while another stream reads it, unless record_stream was called."""
    results = []
    for recorded in False, True:
        side = torch.cuda.Stream()
        source = torch.ones(1000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side), blocked():
            read = source.clone()
            if recorded:
                source.record_stream(side)
            del source
            with torch.cuda.stream(torch.cuda.default_stream()):
                torch.full((1000,), 9.0, device="cuda")
                torch.cuda.current_stream().synchronize()
        results.append(read.sum().item())
    assert results == [9000, 1000]


def test_an_index_out_of_range_is_told_with_its_operator():
    output = in_a_process("""
        import torch
        table = torch.randn(4, 2, device="cuda")
        out = table.index_select(0, torch.tensor([1, 9], device="cuda"))
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(error)
        try:
            table + 1
        except RuntimeError as error:
            print("again", error)
    """)
    first_error, second_error = output.split("again")
    assert "aten::index_select" in first_error and "index out of range" in first_error
    assert "aten::index_select" in second_error


def ones(*sizes, **options):
    return torch.ones(*sizes, **{"device": "cuda", **options})


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: ones(3) + ones(4), "must match the size"),
        (lambda: ones(3, 4) @ ones(3, 4), "cannot be multiplied"),
        (lambda: ones(3) + torch.ones(3), "Expected all tensors to be on the same device"),
        (
            lambda: ones(3) + ones(3, device="cuda:1"),
            "Expected all tensors to be on the same device",
        ),
        (lambda: ones(3, dtype=torch.long).add_(1.5), "can't be cast"),
        (lambda: torch.nn.functional.layer_norm(ones(3), (4,)), "normalized_shape"),
        (lambda: ones(3).normal_(std=-1), "std"),
        (lambda: torch.nn.functional.conv2d(ones(1, 2, 5, 5), ones(1, 3, 3, 3)), "channels"),
        (
            lambda: torch.ops.aten._weight_int4pack_mm(ones(2, 2), ones(2, 2), 32, ones(2, 2, 2)),
            "_weight_int4pack_mm is not emulated",
        ),
    ],
    ids=[
        "sizes",
        "matmul",
        "devices",
        "two GPUs",
        "types",
        "layer_norm",
        "normal_",
        "conv2d",
        "not emulated",
    ],
)
def test_wrong_arguments_are_refused_at_the_call(call, text):
    with pytest.raises(RuntimeError, match=text):
        call()
    assert (torch.ones(2, device="cuda") + 1).tolist() == [2, 2]  # the device lives on


def random_tensors() -> list[torch.Tensor]:
    return [
        torch.rand(5, device="cuda"),
        torch.randn(5, device="cuda"),
        torch.randperm(9, device="cuda"),
        torch.bernoulli(torch.full((9,), 0.5, device="cuda")),
        torch.empty(5, device="cuda").exponential_(),
        torch.multinomial(ones(9), 3),
        torch.nn.functional.dropout(ones(9)),
    ]


def test_random_numbers_repeat():
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = random_tensors()
    torch.cuda.set_rng_state(state)
    second = random_tensors()
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
    with torch.random.fork_rng(devices=[0]):
        inside = torch.rand(5, device="cuda")
    assert torch.equal(inside, torch.rand(5, device="cuda"))
    assert not torch.equal(inside, torch.rand(5, device="cuda"))
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert torch.equal(torch.rand(5, device="cuda", generator=generator), first[0])
    assert abs(torch.randn(100_000, device="cuda").std().item() - 1) < 0.02


def test_threads_of_the_program_have_streams_of_their_own_order():
    results = {}

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            value = torch.full((64,), float(number), device="cuda")
            for _ in range(50):
                value = value * 1.0 + 1.0
            results[number] = value.sum().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: 64 * (number + 50.0) for number in range(4)}


def test_a_matrix_product_takes_its_flops():
    """At 100 MFLOP/s, 2 x 256^3 operations keep a stream busy for a third of a second.

    The host runs ahead meanwhile.
    """
    is_host_ahead, took_ms = json.loads(
        in_a_process(
            """
        import json, torch
        a = torch.randn(256, 256, device="cuda")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a @ a
        torch.cuda.synchronize()
        begin.record()
        a @ a
        end.record()
        ahead = not end.query()
        end.synchronize()
        print(json.dumps([ahead, begin.elapsed_time(end)]))
    """,
            HOLMES_GPU_MFLOPS="100",
        )
    )
    flops = 2 * 256**3
    expected_ms = flops / 100e6 * 1000
    assert is_host_ahead and took_ms >= expected_ms * 0.999


@pytest.mark.parametrize("lengths", [[], [32, 32]], ids=["attention", "packed sequences"])
def test_attention_takes_its_flops(lengths):
    """Both passes take at least as long as torch's FLOP counter implies."""
    took_ms, flops = json.loads(
        in_a_process(
            f"""
        import json, torch
        from torch.utils.flop_counter import FlopCounterMode
        lengths = {lengths}
        shape = (sum(lengths), 4, 16) if lengths else (2, 4, 64, 16)
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                  for _ in range(3)]
        bounds = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)

        def both_passes():
            if lengths:
                attention = torch.ops.aten._flash_attention_forward(
                    *inputs, bounds, bounds, max(lengths), max(lengths), 0.0, False, False)[0]
            else:
                attention = torch.nn.functional.scaled_dot_product_attention(*inputs)
            attention.backward(torch.ones_like(attention))

        both_passes()
        with FlopCounterMode(display=False) as counter:
            both_passes()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        both_passes()
        end.record()
        end.synchronize()
        print(json.dumps([begin.elapsed_time(end), counter.get_total_flops()]))
    """,
            HOLMES_GPU_MFLOPS="20",
        )
    )
    assert flops > 0 and took_ms >= flops / 20e6 * 1000 * 0.999


def test_autograd_without_waits_in_between():
    inputs = torch.ones(64, requires_grad=True, device="cuda")
    torch.cuda.synchronize()
    with blocked():
        value = inputs
        for _ in range(20):
            value = (value * 1.5).tanh()
        value.sum().backward()
    assert inputs.grad.isfinite().all()

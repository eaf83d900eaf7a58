"""DistributedDataParallel over two clusters of two: the same weights as stock's, whatever option the program
takes."""

import io
import os
import signal
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from carriers import ON_GPUS, gloo_only
from clusters import TWO, site
from ranks import RankError, run_ranks, seeded
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from holmes_ext.options import Options
from holmes_ext.patches import registry
from holmes_ext.patches.torch import ddp as ddp_patches
from holmes_ext.plan.build import build_plan
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process

#: Loopback has no InfiniBand, which holmes would ask NCCL for.
CLUSTERS = [f"{cluster} net=Socket" for cluster in TWO] if ON_GPUS else TWO


class Model(nn.Module):
    """1.2 MB of gradients; the last layer is used on even ranks only, or by nobody, as `unused` says."""

    def __init__(self, unused="", sparse=False):
        super().__init__()
        torch.manual_seed(1)
        self.unused = unused
        self.table = nn.Embedding(64, 128, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(16))
        self.norm = nn.BatchNorm1d(128)  # has buffers

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            skipped = self.unused == "everywhere" or self.unused == "odd" and dist.get_rank() % 2
            if not (number == 15 and skipped):
                x = torch.tanh(layer(x))
        return self.norm(x + self.table(torch.arange(8)).mean(0))


def batch(rank, step, part=0):
    return torch.randn(8, 128, generator=seeded(100 * step + 10 * part + rank))


def train(rank, options, model_options, hook=None, accumulate=1, steps=4, join=None):
    """Weights after some steps, MB that this rank sent across, and the comm hook that DDP says it has."""
    model = Model(**model_options)
    wrapped = DistributedDataParallel(model, **options)
    if hook:
        hook(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = steps if join is None else steps - rank % 2  # odd ranks end one step earlier
    with wrapped.join(**join) if join is not None else nullcontext():
        for step in range(count):
            for part in range(accumulate):
                with wrapped.no_sync() if part < accumulate - 1 else nullcontext():
                    wrapped(batch(rank, step, part)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    state = ddp_patches._reducers.get(wrapped)
    across = getattr(state and state.all_reduce, "bytes_across", 0) / 1e6
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return weights, across, wrapped._get_ddp_logging_data().get("comm_hook", "")


def start(rank, *clusters, **options):
    here = site(*clusters or CLUSTERS)
    current = session.Session(
        Options(**options), Process(rank, 4, 0, 1, "", 0, "test"), here,
        build_plan(here, options=Options(**options)),
        rank)
    session.set_active(current)
    registry().enable(["ddp"], required=True)


def both(rank, options, model_options, more):
    """(largest difference from stock, MB that this rank sent across, the comm hook)"""
    stock, *_ = train(rank, options, model_options, **more)
    start(rank)
    ours, across, hook = train(rank, options, model_options, **more)
    return max((a - b).abs().max().item() for a, b in zip(stock, ours)), across, hook


CASES = {
    "plain": ({}, {}, {}),
    "accumulation": ({}, {}, {"accumulate": 3}),
    "unused on some ranks": ({"find_unused_parameters": True}, {"unused": "odd"}, {}),
    "unused everywhere": ({"find_unused_parameters": True}, {"unused": "everywhere"}, {}),
    "static graph": ({"static_graph": True}, {}, {}),
    "bucket views": ({"gradient_as_bucket_view": True}, {}, {"accumulate": 2}),
    "own bucket size": ({"bucket_cap_mb": 1}, {}, {}),
    "sparse": ({}, {"sparse": True}, {}),
    "join": ({}, {}, {"join": {}}),
    "join by those left": ({}, {}, {"join": {"divide_by_initial_world_size": False}}),
}


CASES_OF_THIS_BACKEND = [
    pytest.param(case, marks=gloo_only) if case == "sparse" else case  # NCCL sums no sparse tensors
    for case in CASES
]


@pytest.mark.row("DDP")
@pytest.mark.parametrize("case", CASES_OF_THIS_BACKEND)
def test_weights_are_stock_s(case):
    """Weights trained with the two-level hook are those of stock, and gradients cross in two levels."""
    for difference, across, hook in run_ranks(both, 4, *CASES[case]):
        assert difference < 1e-6
        assert hook == "two_level_hook"
        # Every bucket goes through the hook: a rank's share of the gradients is more than 1.6 MB.
        assert ON_GPUS or across > 1.6, "a bucket went another way"


def fp16(wrapped):
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)


def fp16_in_cpp(wrapped):
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def fp16_wrapper(wrapped):
    wrapped.register_comm_hook(wrapped.process_group,
                               default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


@pytest.mark.parametrize("hook", [fp16, fp16_in_cpp, fp16_wrapper])
def test_the_program_s_half_precision_travels_in_two_levels(hook):
    """Half the bytes; sums of four float16 in another order."""
    for difference, across, name in run_ranks(both, 4, {}, {}, {"hook": hook}):
        assert difference < 2e-4 and "fp16" in name and (ON_GPUS or 0.8 < across < 1.5)


def halved(state, bucket):
    return state.allreduce(bucket.buffer().div_(2)).get_future().then(lambda done: done.value()[0])


def own_hook(wrapped):
    wrapped.register_comm_hook(wrapped.process_group, halved)


def told(rank, function, *args):
    """What the function returns, and what holmes said meanwhile."""
    sys.stderr = io.StringIO()
    try:
        return function(rank, *args), sys.stderr.getvalue()
    finally:
        sys.stderr = sys.__stderr__


def test_the_program_s_own_hook_wins():
    answers = run_ranks(told, 4, both, {}, {}, {"hook": own_hook})
    for (difference, across, name), _ in answers:
        assert difference < 1e-6 and across == 0 and name == "halved"
    assert [text.count("holmes: the comm hook halved reduces") for _, text in answers] == [1, 0, 0, 0]


def second_hook(rank):
    start(rank)
    wrapped = DistributedDataParallel(nn.Linear(512, 512))
    own_hook(wrapped)
    with pytest.raises(RuntimeError, match="only be called once"):
        own_hook(wrapped)


def test_a_second_hook_of_the_program_is_refused_as_torch_does():
    run_ranks(second_hook, 4)


def half_in_bucket(rank):
    """Stock: mixed precision. The hook is torch's own."""
    from torch.nn.parallel.distributed import _MixedPrecision

    start(rank)
    policy = _MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)
    wrapped = DistributedDataParallel(Model(), mixed_precision=policy)
    return wrapped._get_ddp_logging_data()["comm_hook"]


@pytest.mark.skipif(torch.backends.cuda.is_built() and not torch.cuda.is_available(),
                    reason="stock DDP makes a stream for it, on CUDA if torch was built for it")
def test_mixed_precision_stays_stock_with_one_line():
    answers = run_ranks(told, 4, half_in_bucket)
    assert [hook for hook, _ in answers] == ["_reducer_allreduce_and_upcast_hook"] * 4
    assert [text.count("on one level, because of mixed_precision") for _, text in answers] == [1, 0, 0, 0]


def in_one_cluster(rank):
    start(rank, "a ib 2Gb/s a[0-3]")
    wrapped = DistributedDataParallel(nn.Linear(512, 512))
    return wrapped.bucket_bytes_cap, "comm_hook" in wrapped._get_ddp_logging_data(), len(
        ddp_patches._reducers)


def test_inside_a_cluster_nothing_is_touched():
    assert run_ranks(in_one_cluster, 4) == [(25 * 2**20, False, 0)] * 4


def seen(rank):
    """(largest difference from stock, MB of all-reduces that torch.distributed.all_reduce was asked for)"""
    stock, *_ = train(rank, {}, {})
    start(rank, "a ib 2Gb/s a[0-3]", telemetry="somewhere")
    asked, all_reduce = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        asked.append(tensor.nbytes / 1e6)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    ours, *_ = train(rank, {}, {})
    return max((a - b).abs().max().item() for a, b in zip(stock, ours)), sum(asked)


def test_telemetry_sees_what_the_reducer_sends_inside_a_cluster():
    gradients = sum(parameter.nbytes for parameter in Model().parameters()) / 1e6
    for difference, asked in run_ranks(seen, 4):
        assert difference < 1e-6 and asked == pytest.approx(4 * gradients)


def int8(rank, wire):
    """(largest error of the first step's gradient, of the sum over all steps, buffers that have residuals):
    the same gradient in 7 steps; buckets are new after the first."""
    model = nn.Linear(512, 512, bias=False)
    exact = DistributedDataParallel(model)
    inputs = torch.randn(4, 512, generator=seeded(rank))
    exact(inputs).square().mean().backward()
    true, errors = model.weight.grad.clone(), []
    start(rank, compress="int8")
    wrapped = DistributedDataParallel(model)
    if wire:
        fp16(wrapped)
    for _ in range(7):
        model.zero_grad()
        wrapped(inputs).square().mean().backward()
        errors.append(model.weight.grad - true)
    state = ddp_patches._reducers[wrapped]
    return (errors[1].abs().max().item(), sum(errors[1:]).abs().max().item(),
            len(state.all_reduce._residuals._of))


@pytest.mark.parametrize("wire", [False, True])
def test_int8_makes_up_for_its_rounding_in_later_steps(wire):
    for first, total, buffers in run_ranks(int8, 4, wire):
        assert 0 < total < 3 * first, "six times the same error: nothing was carried on"
        assert buffers <= 2


def dies(rank):
    start(rank)
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)))
    for step in range(3):
        if (rank, step) == (3, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        wrapped(batch(rank, step)).square().mean().backward()


@gloo_only
def test_a_rank_that_dies_ends_the_step_with_the_bucket_and_the_fabric():
    with pytest.raises(RankError, match="the reduction of DistributedDataParallel's bucket [0-9]+ failed "
                                        "over fabric"):
        run_ranks(dies, 4)


class Recording:
    """A bucket on a GPU, its two levels and the streams: what is done on which stream, in order."""

    def __init__(self, monkeypatch):
        self.log, self.stream = [], "backward"
        self.is_cuda, self.is_sparse = True, False
        self.device = "cuda:0"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: "side")
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.futures, "Future", lambda devices: self)

    @contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def note(self, what, answer=None):
        self.log.append((what, self.stream))
        return answer

    def buffer(self):
        return self

    def index(self):
        return 0

    def div_(self, divisor):
        return self.note(f"divide by {divisor}", self)

    def __call__(self, flat):
        return self.note("launch", self)

    def wait(self):
        self.note("wait")

    def set_result(self, value):
        assert value is self
        self.note("complete")


def on_a_gpu(monkeypatch):
    """(a bucket, its state, the module that the state must not keep)"""
    one, ddp = Recording(monkeypatch), nn.Module()
    ddp.process_group = SimpleNamespace(size=lambda: 4)
    return one, ddp_patches.BucketReducer(ddp, one), ddp


def test_on_a_gpu_a_side_stream_waits_for_the_sum_and_completes_the_future(monkeypatch):
    """The backward pass's stream divides and launches, and waits for nothing; the future records the side
    stream."""
    one, state, _ddp = on_a_gpu(monkeypatch)
    assert ddp_patches.two_level_hook(state, one) is one
    expected = [("divide by 4", "backward"), ("launch", "backward"), ("wait", "side"), ("complete", "side")]
    assert one.log == expected and one.stream == "backward"


def test_on_a_gpu_a_pipeline_s_buckets_wait_when_its_schedule_ends(monkeypatch):
    """Nothing waits in the backward pass; then the stream of the schedule waits, and copies what DDP copied
    too early.
    """
    one, state, _ddp = on_a_gpu(monkeypatch)
    copy = SimpleNamespace(data_ptr=lambda: 1, copy_=lambda gradient: one.note("copy"))
    one.parameters = lambda: [SimpleNamespace(grad=copy)]
    one.gradients = lambda: [SimpleNamespace(data_ptr=lambda: 2)]
    state.postponed = []
    assert ddp_patches.two_level_hook(state, one) is one
    assert one.log == [("divide by 4", "backward"), ("launch", "backward"), ("complete", "backward")]
    state.finish()
    assert one.log[3:] == [("wait", "backward"), ("copy", "backward")] and one.stream == "backward"

"""DistributedDataParallel over two clusters of two: the same weights as stock's, whatever option the program takes."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from clusters import site
from ranks import RankError, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from holmes_ext.options import Options
from holmes_ext.patches import registry
from holmes_ext.patches.torch import ddp as ddp_patches
from holmes_ext.plan.build import build_plan
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process


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
    return torch.randn(8, 128, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


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
    state = ddp_patches._installed.get(wrapped)
    across = state._two_level.bytes_across / 1e6 if state else 0.0
    return [p.detach().clone() for p in model.parameters()], across, wrapped._get_ddp_logging_data().get("comm_hook", "")


def start(rank, *clusters, **options):
    here = site(*clusters)
    current = session.Session(
        Options(**options), Process(rank, 4, 0, 1, "", 0, "test"), here, build_plan(here, options=Options(**options)),
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


@pytest.mark.parametrize("case", CASES)
def test_weights_are_stock_s(case):
    for difference, across, hook in run_ranks(both, 4, *CASES[case]):
        assert difference < 1e-6 and hook == "two_level_hook"
        assert across > 1.6, "a bucket went another way"


def fp16(wrapped):
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)


def fp16_in_cpp(wrapped):
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def fp16_wrapper(wrapped):
    wrapped.register_comm_hook(wrapped.process_group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


@pytest.mark.parametrize("hook", [fp16, fp16_in_cpp, fp16_wrapper])
def test_the_program_s_half_precision_travels_in_two_levels(hook):
    """Half the bytes; sums of four float16 in another order."""
    for difference, across, name in run_ranks(both, 4, {}, {}, {"hook": hook}):
        assert difference < 2e-4 and "fp16" in name and 0.8 < across < 1.5


def halved(state, bucket):
    return state.allreduce(bucket.buffer().div_(2)).get_future().then(lambda done: done.value()[0])


def own_hook(wrapped):
    wrapped.register_comm_hook(wrapped.process_group, halved)


def test_the_program_s_own_hook_wins(capfd):
    for difference, across, name in run_ranks(both, 4, {}, {}, {"hook": own_hook}):
        assert difference < 1e-6 and across == 0 and name == "halved"
    assert capfd.readouterr().err.count("holmes: the comm hook halved reduces DistributedDataParallel's buckets") == 1


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


def test_mixed_precision_stays_stock_with_one_line(capfd):
    assert run_ranks(half_in_bucket, 4) == ["_reducer_allreduce_and_upcast_hook"] * 4
    assert capfd.readouterr().err.count("on one level, because of mixed_precision") == 1


def in_one_cluster(rank):
    start(rank, "a ib 2Gb/s a[0-3]")
    wrapped = DistributedDataParallel(nn.Linear(512, 512))
    return wrapped.bucket_bytes_cap, "comm_hook" in wrapped._get_ddp_logging_data(), len(ddp_patches._installed)


def test_inside_a_cluster_nothing_is_touched():
    assert run_ranks(in_one_cluster, 4) == [(25 * 2**20, False, 0)] * 4


def int8(rank, wire):
    """Weights of DDP with int8 between the clusters, and of GradientReducer with the same, from the second step on:
    DDP orders its buckets anew after the first."""
    from holmes_ext.runtime.reduce.reducer import GradientReducer

    start(rank, compress="int8")
    ddp, own = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
    own.load_state_dict(ddp.state_dict())
    wrapped = DistributedDataParallel(ddp)
    own.load_state_dict(ddp.state_dict())
    if wire:
        fp16(wrapped)
    reducer = GradientReducer(own.named_parameters())
    inputs = torch.randn(4, 512, generator=torch.Generator().manual_seed(rank))
    residuals = []
    for _ in range(5):
        wrapped(inputs).square().mean().backward()
        own(inputs).square().mean().backward()
        reducer.finish()
        difference = (ddp.weight.grad - own.weight.grad).abs().max().item()
        residuals.append(len(ddp_patches._installed[wrapped]._two_level._residuals._of))
        for model in (ddp, own):
            model.zero_grad()
    return difference, residuals[-1], own.weight.numel()


@pytest.mark.parametrize("wire", [False, True])
def test_int8_carries_its_rounding_on_from_step_to_step(wire):
    for difference, tensors, _ in run_ranks(int8, 4, wire):
        assert difference < (1e-5 if wire else 1e-7)
        assert tensors <= 2, "a new buffer in every step has no residual"


def dies(rank):
    import os
    import signal

    start(rank)
    wrapped = DistributedDataParallel(Model())
    wrapped(batch(rank, 0)).square().mean().backward()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    wrapped(batch(rank, 1)).square().mean().backward()


def test_a_rank_that_dies_ends_the_step_with_the_bucket_and_the_fabric():
    with pytest.raises(RankError, match="the reduction of DistributedDataParallel's bucket [0-9]+ failed over fabric"):
        run_ranks(dies, 4)

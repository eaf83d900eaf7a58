"""DistributedDataParallel over two clusters of two.

The weights are the same as stock's, whatever option the program takes.
"""

import io
import os
import signal
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import NamedTuple

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
from holmes_ext.plan import maker
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
    """Train a model in DistributedDataParallel (DDP) for some steps; with holmes if a session is active.

    Args:
        options: Keyword arguments of DDP.
        hook: Function that registers a comm hook of the program with the DDP.
        accumulate: Number of backward passes in a step; only the last one reduces gradients.
        join: Keyword arguments of DDP.join(), which is used if they are given: odd ranks make a step less.

    Returns:
        The weights, the MB that this rank sent to other clusters, and the name of DDP's comm hook.
    """
    model = Model(**model_options)
    wrapped = DistributedDataParallel(model, **options)
    if hook:
        hook(wrapped)  # registers a comm hook
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_count = steps
    join_context = nullcontext()
    if join is not None:
        step_count = steps - rank % 2
        join_context = wrapped.join(**join)
    with join_context:
        for step in range(step_count):
            for part in range(accumulate):
                is_last_part = part == accumulate - 1
                with nullcontext() if is_last_part else wrapped.no_sync():
                    wrapped(batch(rank, step, part)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)  # both ways to clear gradients
    sent_across_mb = 0
    reducer = ddp_patches._reducers.get(
        wrapped
    )  # holmes's reducer of gradients; None without holmes
    if reducer is not None:
        # Only an all-reduce hierarchically (inside clusters, then between them) counts its bytes.
        sent_across_mb = getattr(reducer.reduction, "bytes_across", 0) / 1e6
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    hook_name = wrapped._get_ddp_logging_data().get("comm_hook", "")
    return weights, sent_across_mb, hook_name


def start(rank, *clusters, **options):
    here = site(*clusters or CLUSTERS)
    current = session.Session(
        Options(**options),
        Process(rank, 4, 0, 1, "", 0, "test"),
        here,
        build_plan(here, options=Options(**options)),
        rank,
        maker=maker,
    )
    session.set_active(current)
    registry().enable(["ddp"], required=True)


def both(rank, options, model_options, more):
    """Train twice, first without holmes and then with it.

    Returns the largest difference between the two runs' weights, the MB that this rank sent to the other
    cluster, and the name of the comm hook.
    """
    weights_without_holmes, *_ = train(rank, options, model_options, **more)
    start(rank)
    weights, sent_across_mb, hook = train(rank, options, model_options, **more)
    difference = max((a - b).abs().max().item() for a, b in zip(weights_without_holmes, weights))
    return difference, sent_across_mb, hook


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
    """DistributedDataParallel trains the same weights with holmes as without it, for options in CASES.

    holmes's comm hook reduces all buckets of gradients hierarchically: inside clusters, then between them.
    """
    for difference, sent_across_mb, hook in run_ranks(both, 4, *CASES[case]):
        assert difference < 1e-6
        assert hook == "hierarchical_hook"  # the comm hook of holmes
        # If the hook reduces all buckets, a rank sends more than 1.6 MB to the other cluster in all steps.
        assert ON_GPUS or sent_across_mb > 1.6, "a bucket went another way"


def fp16(wrapped):
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)


def fp16_in_cpp(wrapped):
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def fp16_wrapper(wrapped):
    wrapped.register_comm_hook(
        wrapped.process_group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    )


@pytest.mark.parametrize("hook", [fp16, fp16_in_cpp, fp16_wrapper])
def test_the_program_s_half_precision_travels_hierarchically(hook):
    """Half the bytes; sums of four float16 in another order."""
    for difference, across, name in run_ranks(both, 4, {}, {}, {"hook": hook}):
        assert difference < 2e-4 and "fp16" in name and (ON_GPUS or 0.8 < across < 1.5)


def halved(state, bucket):
    return state.allreduce(bucket.buffer().div_(2)).get_future().then(lambda done: done.value()[0])


def own_hook(wrapped):
    wrapped.register_comm_hook(wrapped.process_group, halved)


def told(rank, function, *args):
    """Return the function's result, and what holmes printed meanwhile."""
    sys.stderr = io.StringIO()
    try:
        return function(rank, *args), sys.stderr.getvalue()
    finally:
        sys.stderr = sys.__stderr__


def test_the_program_s_own_hook_wins():
    answers = run_ranks(told, 4, both, {}, {}, {"hook": own_hook})
    for (difference, across, name), _ in answers:
        assert difference < 1e-6 and across == 0 and name == "halved"
    assert [text.count("holmes: the comm hook halved reduces") for _, text in answers] == [
        1,
        0,
        0,
        0,
    ]


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


@pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="stock DDP makes a stream for it, on CUDA if torch was built for it",
)
def test_mixed_precision_stays_stock_with_one_line():
    answers = run_ranks(told, 4, half_in_bucket)
    assert [hook for hook, _ in answers] == ["_reducer_allreduce_and_upcast_hook"] * 4
    assert [
        text.count("without a hierarchical all-reduce, because of mixed_precision")
        for _, text in answers
    ] == [
        1,
        0,
        0,
        0,
    ]


def in_one_cluster(rank):
    """Construct a DistributedDataParallel (DDP) in a job of four ranks in one cluster.

    Returns the bucket size of the DDP, whether it has a comm hook, and the number of holmes's reducers.
    """
    start(rank, "a ib 2Gb/s a[0-3]")
    wrapped = DistributedDataParallel(nn.Linear(512, 512))
    has_hook = "comm_hook" in wrapped._get_ddp_logging_data()
    return wrapped.bucket_bytes_cap, has_hook, len(ddp_patches._reducers)


def test_inside_a_cluster_nothing_is_touched():
    default_bucket_bytes = 25 * 2**20  # of torch
    assert run_ranks(in_one_cluster, 4) == [(default_bucket_bytes, False, 0)] * 4


def seen(rank):
    """Return the difference from stock and the traffic of all-reduces.

    Returns:
        (largest difference from stock, MB of all-reduces that went through
        torch.distributed.all_reduce)
    """
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


class Int8Errors(NamedTuple):
    """Errors of a gradient that is reduced in int8, the same one in several steps."""

    of_one_step: float  # largest error of an element
    of_sum_of_six_steps: float
    residual_count: int  # tensors whose rounding errors are kept for the next step


def int8(rank, with_fp16_hook):
    """Reduce the same gradient in 7 steps, compressed to int8 between clusters, and return the errors."""
    model = nn.Linear(512, 512, bias=False)
    without_holmes = DistributedDataParallel(model)
    inputs = torch.randn(4, 512, generator=seeded(rank))
    without_holmes(inputs).square().mean().backward()
    exact_gradient = model.weight.grad.clone()

    start(rank, compress_gradients="int8")  # switches holmes on
    wrapped = DistributedDataParallel(model)
    if with_fp16_hook:
        fp16(wrapped)  # registers torch's fp16 comm hook
    errors_of_steps = []
    for _ in range(7):
        model.zero_grad()
        wrapped(inputs).square().mean().backward()
        errors_of_steps.append(model.weight.grad - exact_gradient)
    # DDP makes new buckets after the first step, so the rounding error of that step is lost.
    six_errors = errors_of_steps[1:]
    reducer = ddp_patches._reducers[wrapped]  # holmes's reducer of gradients
    # For each bucket: the rounding errors of a step, which the next step adds to its gradient.
    residuals = reducer.reduction._residuals._of
    return Int8Errors(
        of_one_step=six_errors[0].abs().max().item(),
        of_sum_of_six_steps=sum(six_errors).abs().max().item(),
        residual_count=len(residuals),
    )


@pytest.mark.parametrize("with_fp16_hook", [False, True])
def test_int8_makes_up_for_its_rounding_in_later_steps(with_fp16_hook):
    """Rounding errors of int8 do not add up: each step adds the error of the step before to its gradient."""
    for errors in run_ranks(int8, 4, with_fp16_hook):
        # If the rounding errors were not carried on, the sum would be six times the error of one step.
        assert 0 < errors.of_sum_of_six_steps < 3 * errors.of_one_step
        assert errors.residual_count <= 2


def dies(rank):
    start(rank)
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)))
    for step in range(3):
        if (rank, step) == (3, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        wrapped(batch(rank, step)).square().mean().backward()


@gloo_only
def test_a_rank_that_dies_ends_the_step_with_the_bucket_and_the_fabric():
    with pytest.raises(
        RankError,
        match="the reduction of DistributedDataParallel's bucket [0-9]+ failed over fabric",
    ):
        run_ranks(dies, 4)


class Recording:
    """Stand-in for a bucket on a GPU, its tensor, its all-reduce, the Work of that and the hook's future.

    `log` lists what was done on which stream: (action, "backward" or "side").
    """

    def __init__(self, monkeypatch):
        self.log = []
        self.stream = "backward"  # the current stream
        self.is_cuda, self.is_sparse = True, False
        self.device = "cuda:0"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: "side")
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.futures, "Future", lambda devices: self)

    @contextmanager
    def on(self, stream):
        previous_stream = self.stream
        self.stream = stream
        yield
        self.stream = previous_stream

    def note(self, action, result=None):
        self.log.append((action, self.stream))
        return result

    def buffer(self):
        return self

    def index(self):
        return 0

    def div_(self, divisor):
        return self.note(f"divide by {divisor}", self)

    def all_reduce(self, flat):
        return self.note("launch", self)

    def wait(self):
        self.note("wait")

    def set_result(self, value):
        assert value is self
        self.note("complete")


def recorded_reducer(monkeypatch):
    """Return a stand-in for a bucket on a GPU, holmes's reducer of it, and the DDP of 4 ranks.

    The reducer has a weak reference to the DDP only, so the caller must keep the DDP.
    """
    bucket = Recording(monkeypatch)
    ddp = nn.Module()
    ddp.process_group = SimpleNamespace(size=lambda: 4)
    return bucket, ddp_patches.BucketReducer(ddp, reduction=bucket), ddp


def test_on_a_gpu_a_side_stream_waits_for_the_sum_and_completes_the_future(monkeypatch):
    """The comm hook divides and launches on the stream of the backward pass, which waits for nothing."""
    bucket, reducer, _ddp = recorded_reducer(monkeypatch)
    future = ddp_patches.hierarchical_hook(reducer, bucket)
    assert future is bucket  # one stand-in for both
    assert bucket.log == [
        ("divide by 4", "backward"),
        ("launch", "backward"),
        ("wait", "side"),
        ("complete", "side"),
    ]
    assert bucket.stream == "backward"


def test_on_a_gpu_a_pipeline_s_buckets_wait_when_its_schedule_ends(monkeypatch):
    """If waiting is postponed, the comm hook does not wait; finish() waits, and stores the average.

    DDP copies the bucket to the gradient before finish() waits. Until then the gradient must be a view of
    the bucket, so that DDP's copy reads nothing that the all-reduce writes.
    """
    # `bucket` stands in for a DDP bucket on a GPU. Its log has tuples (action, stream of the action).
    bucket, reducer, _ddp = recorded_reducer(monkeypatch)
    parameter = nn.Parameter(torch.zeros(2, 3))
    gradient = parameter.grad = torch.zeros(2, 3)
    unused = nn.Parameter(torch.zeros(1))  # has no gradient
    flat = torch.arange(7.0)
    bucket.parameters = lambda: [parameter, unused]
    bucket.gradients = lambda: [flat[:6].view(2, 3), flat[6:]]

    reducer.unfinished_buckets = []  # a list, not None: postpones waiting until finish()
    future = ddp_patches.hierarchical_hook(reducer, bucket)  # the comm hook
    assert future is bucket  # one stand-in for both
    assert bucket.log == [
        ("divide by 4", "backward"),
        ("launch", "backward"),
        ("complete", "backward"),
    ]
    assert parameter.grad.data_ptr() == flat.data_ptr()
    assert unused.grad.data_ptr() == flat[6:].data_ptr()
    assert gradient.sum() == 0  # not written yet

    reducer.finish()
    assert bucket.log[3:] == [("wait", "backward")]
    assert bucket.stream == "backward"  # still the current stream
    assert parameter.grad is gradient
    assert gradient.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert unused.grad.tolist() == [6]
    assert unused.grad.data_ptr() != flat[6:].data_ptr()

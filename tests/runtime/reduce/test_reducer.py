"""The gradient reducer against a plain all-reduce of every gradient, in several processes."""

import os

import pytest
import ranks
import torch
import torch.distributed as dist
from carriers import gloo_only
from ranks import run_ranks, seeded
from torch.utils.checkpoint import checkpoint

from holmes_ext.cluster.fabric import Fabric
from holmes_ext.errors import HolmesError
from holmes_ext.runtime.reduce.flat_bucket import FlatBucket
from holmes_ext.runtime.reduce.reducer import GradientReducer

WIDTH = 16
SMALL = 2 * WIDTH * WIDTH * 4  # two of the model's matrices


class Model(torch.nn.Module):
    """Model of `layers` blocks, with options for what real models have.

    These are an unused block, tied ones and checkpointed ones.
    """

    def __init__(self, layers=6, unused=(), tied=False, checkpointed=None, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(layers)
        )
        if tied:
            self.layers[layers - 1].weight = self.layers[0].weight
        self.unused, self.checkpointed = set(unused), checkpointed

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number in self.unused:
                continue
            if self.checkpointed is None:
                x = torch.tanh(layer(x))
            else:
                x = checkpoint(
                    lambda y, layer=layer: torch.tanh(layer(y)),
                    x,
                    use_reentrant=self.checkpointed == "reentrant",
                )
        return x


def data(rank, step, dtype=torch.float32):
    generator = seeded(1000 * step + rank)
    return torch.randn(4, WIDTH, generator=generator).to(dtype).requires_grad_()


def plain_average(model, world_size):
    """Average gradients as the reference does: one all-reduce for each after the backward pass."""
    gradients = []
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(gradient)
        gradients.append(gradient.mul_(1 / world_size))
    return gradients


def compare(
    rank,
    world_size,
    options,
    model_options,
    steps=3,
    micro_batches=2,
    unused_on_odd_ranks=(),
    hold=False,
):
    """Compare a GradientReducer with the reference over some steps.

    hold: reduce after the backward pass.

    Returns:
        largest difference from the reference, and how many buckets were sent before finish() in
        each step
    """
    model = Model(**model_options)
    if rank % 2:
        model.unused |= set(unused_on_odd_ranks)
    reference = Model(**model_options)
    reference.unused = model.unused
    reducer = GradientReducer(model.named_parameters(), **options)
    worst, early = 0.0, []
    for step in range(steps):
        for some in (model, reference):
            some.zero_grad(set_to_none=True)
        for micro_batch in range(micro_batches):
            x = data(rank, step * micro_batches + micro_batch)
            reference(x).square().sum().backward()
            if micro_batch == micro_batches - 1:
                reducer.arm(hold)
            model(x).square().sum().backward()
        if hold:
            assert reducer._launched == 0
            reducer.release()
        early.append(reducer.finish().early)
        for got, wanted in zip(model.parameters(), plain_average(reference, world_size)):
            worst = max(worst, (got.grad - wanted).abs().max().item())
    reducer.close()
    return worst, early, len(reducer._buckets)


@pytest.mark.parametrize(
    "model_options",
    [
        {},
        {"tied": True},
        {"checkpointed": "reentrant"},
        {"checkpointed": "plain"},
        {"tied": True, "checkpointed": "reentrant"},
    ],
    ids=[
        "plain",
        "tied in one rank",
        "reentrant checkpointing",
        "checkpointing",
        "tied and reentrant",
    ],
)
def test_equals_a_plain_all_reduce_bit_for_bit_on_two_ranks(model_options):
    for worst, early, count in run_ranks(compare, 2, 2, {"bucket_bytes": SMALL}, model_options):
        assert worst == 0.0
        # the first step learns, then all go during the backward
        assert early == [0, count, count] and count >= 3


def test_what_is_held_leaves_when_it_is_released():
    for worst, early, count in run_ranks(
        compare, 2, 2, {"bucket_bytes": SMALL}, {}, 3, 2, (), True
    ):
        assert worst == 0.0 and early == [0, count, count]


def as_on_a_gpu(rank, *args):
    """compare(), with buffers that live from their filling on."""
    kept = FlatBucket.__init__
    FlatBucket.__init__ = lambda self, indices, items, *_, **__: kept(
        self, indices, items, multiple=3, keeps_buffer=False
    )
    return compare(rank, *args)


@pytest.mark.parametrize(
    "model_options", [{}, {"tied": True}, {"checkpointed": "reentrant"}], ids=str
)
def test_gradients_that_become_views_are_the_same_bits(model_options):
    for worst, early, count in run_ranks(as_on_a_gpu, 2, 2, {"bucket_bytes": SMALL}, model_options):
        assert worst == 0.0 and early == [0, count, count]


def test_three_ranks_differ_by_rounding_only():
    for worst, early, count in run_ranks(compare, 3, 3, {"bucket_bytes": SMALL}, {}):
        assert worst < 1e-6 and early[1:] == [count, count]


def test_a_parameter_unused_on_some_ranks_counts_as_zeros_and_nobody_hangs():
    results = run_ranks(compare, 3, 3, {"bucket_bytes": SMALL}, {}, 3, 2, (2, 5))
    for worst, early, _ in results:
        assert worst < 1e-6 and early[2] > 0
    count = results[0][2]
    assert (
        results[0][1][2] == count and results[1][1][2] < count
    )  # rank 1 lacks two of the six layers
    for worst, early, count in run_ranks(compare, 2, 2, {"bucket_bytes": SMALL}, {"unused": (1,)}):
        assert (
            worst == 0.0 and count - 2 <= early[2] < count
        )  # only the end of the order waits for finish()


def without_arm(rank):
    model = Model()
    reducer = GradientReducer(
        model.parameters(), average=False, predivide=4.0, fabric=Fabric("ib", "ib", 10**9, 1e-6)
    )
    model(data(rank, 0)).sum().backward()
    mine = [parameter.grad.clone() for parameter in model.parameters()]
    times = reducer.finish()
    for gradient in mine:
        dist.all_reduce(gradient)
    worst = max((p.grad - g).abs().max().item() for p, g in zip(model.parameters(), mine))
    return worst, times, reducer.bucket_bytes


def test_finish_alone_reduces_everything_and_can_leave_the_sum():
    for worst, times, size in run_ranks(without_arm, 2):
        assert worst < 1e-6 and times.early == 0 and times.fabric == "ib"
        assert times.bytes == 6 * (WIDTH * WIDTH + WIDTH) * 4
        assert times.exposed_s > 0 and times.seconds > 0
        assert size == 2250  # of the fabric: n rate latency (1 - 0.1) / 0.1


def low_precision(rank):
    model = Model(dtype=torch.bfloat16)
    reducer = GradientReducer(model.parameters(), communication_dtype=torch.float32)
    model(data(rank, 0, torch.bfloat16)).sum().backward()
    mine = [parameter.grad.float() for parameter in model.parameters()]
    reducer.finish()
    for gradient in mine:
        dist.all_reduce(gradient)
    exact = all(torch.equal(p.grad, (g / 2).bfloat16()) for p, g in zip(model.parameters(), mine))
    return exact, {p.grad.dtype for p in model.parameters()}


def test_communication_dtype_is_what_travels():
    assert run_ranks(low_precision, 2) == [(True, {torch.bfloat16})] * 2


def not_a_number(rank):
    model = Model()
    if rank == 1:
        third = torch.tensor([3])
        model.layers[0].bias.register_hook(
            lambda gradient: gradient.index_fill(0, third, float("nan"))
        )
    reducer = GradientReducer(model.parameters(), bucket_bytes=SMALL)
    for _ in range(2):
        with reducer.overlapped():
            model(data(rank, 0)).sum().backward()
    return [torch.isnan(p.grad).sum().item() for p in (model.layers[0].bias, model.layers[1].bias)]


def test_nan_of_one_rank_reaches_all():
    assert run_ranks(not_a_number, 2) == [[1, 0], [1, 0]]


def deferred(rank):
    model = Model()
    late = model.layers[0].weight
    reducer = GradientReducer(model.parameters(), bucket_bytes=SMALL, deferred=[late])
    values = []
    for _ in range(2):
        model.zero_grad()
        reducer.arm()
        model(data(rank, 0)).sum().backward()
        late.grad.fill_(rank + 1.0)  # as a reduction over pipeline stages does, after the backward
        values.append((reducer.finish().early, late.grad.unique().tolist()))
    return values, len(reducer._buckets)


def test_deferred_parameters_leave_with_finish():
    for values, count in run_ranks(deferred, 2):
        assert values == [(0, [1.5]), (count - 1, [1.5])]


def times_ten(parameter):
    parameter.grad.mul_(10.0)


def other_hooks(rank):
    """Another library scales gradients in a hook of its own, registered before."""
    model = Model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(times_ten)
    reducer = GradientReducer(model.parameters(), bucket_bytes=SMALL)
    for _ in range(2):
        model.zero_grad()
        with reducer.overlapped():
            model(data(0, 0)).sum().backward()
    plain = Model()
    plain(data(0, 0)).sum().backward()
    return max(
        (a.grad - 10 * b.grad).abs().max().item()
        for a, b in zip(model.parameters(), plain.parameters())
    )


def test_hooks_of_other_libraries_come_first():
    assert max(run_ranks(other_hooks, 2)) < 1e-5


def wrong_use(rank):
    messages = []
    model = Model()
    try:
        GradientReducer(model.parameters(), bucket_bytes=SMALL * (1 + rank))
    except HolmesError as error:
        messages.append(str(error))
    reducer = GradientReducer(model.named_parameters(), bucket_bytes=SMALL)
    for repeats in (1, 2):
        reducer.arm()
        try:
            for _ in range(repeats):
                model(data(rank, 0)).sum().backward()
            reducer.finish()
        except HolmesError as error:
            messages.append(str(error))
    try:
        reducer.arm()
    except HolmesError as error:
        messages.append(str(error))
    for call in (
        lambda: GradientReducer([]),
        lambda: GradientReducer(model.parameters(), bucket_bytes=0),
    ):
        try:
            call()
        except HolmesError as error:
            messages.append(str(error))
    return messages


def test_wrong_use_is_told_in_one_line():
    for messages in run_ranks(wrong_use, 2):
        assert "rank 1 has other parameters or another bucket size than rank 0" in messages[0]
        assert (
            "layers.5." in messages[1]
            and "another gradient after its bucket was sent" in messages[1]
        )
        assert "arm() was called twice" in messages[2]
        assert "no parameter" in messages[3] and "bucket_bytes is 0" in messages[4]


def dies(rank):
    model = Model()
    reducer = GradientReducer(
        model.named_parameters(), bucket_bytes=SMALL, fabric=Fabric("roce", "roce", 10**9, 1e-6)
    )
    ranks.all_are_here(rank, 3)
    if rank == 2:
        os._exit(0)
    model(data(rank, 0)).sum().backward()
    try:
        reducer.finish()
    except HolmesError as error:
        ranks.say(error)
        os._exit(0)


@gloo_only
def test_a_rank_that_dies_ends_the_step_with_a_line_for_rank_bucket_and_fabric():
    with pytest.raises(ranks.RankError, match="gave no answer") as error:
        run_ranks(dies, 3)
    assert len(error.value.said) == 2
    for line in error.value.said:
        assert (
            "the reduction of bucket 0 of" in line
            and "layers.5.bias" in line
            and "fabric roce" in line
        )
        assert "group of ranks 0, 1, 2" in line

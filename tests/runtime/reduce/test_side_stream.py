"""The stream of a bucket, and its memory on GPUs.

A bucket is filled when the gradients of all streams are there, on a stream of its own.
"""

from contextlib import contextmanager

import pytest
import torch

from holmes_ext.plan.buckets import BUCKETS_IN_FLIGHT
from holmes_ext.runtime.reduce import reducer
from holmes_ext.runtime.reduce.flat_bucket import FlatBucket, Item
from holmes_ext.runtime.reduce.reduction import CallersReduction
from holmes_ext.runtime.reduce.side_stream import SideStream


class Gpu:
    """Streams that note what is recorded, waited for and copied, in order."""

    def __init__(self, monkeypatch):
        self.log, self.current = [], "main"
        monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(self, "side"))
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(self, self.current))
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, getattr(stream, "name", stream)
        yield
        self.current = before


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self, stream):
        self.name = stream.name
        self.gpu.log.append(("record", stream.name))


class Stream:
    def __init__(self, gpu, name):
        self.gpu, self.name = gpu, name

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)

    def wait_event(self, event):
        self.gpu.log.append(("wait", event.name))

    def wait_stream(self, other):
        self.gpu.log.append(("wait", other.name))


def test_a_bucket_waits_for_the_gradients_of_all_streams(monkeypatch):
    gpu = Gpu(monkeypatch)
    side, ready = SideStream(), {}
    side.begin_step()
    for stream in ("a", "b", "a"):
        gpu.current = stream
        side.record_gradient(ready)
    with side.launch_after(ready):
        gpu.log.append(("copy", gpu.current))
    before = gpu.log[: gpu.log.index(("copy", "side"))]
    assert {name for what, name in before if what == "wait"} == {"main", "a", "b"}
    assert [name for what, name in before if what == "record"] == ["main", "a", "b", "a"]
    assert gpu.current == "a" and len(ready) == 2


class Done:
    def wait(self):
        pass

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(None)
        return future


def reducer_on(gpu, count, dtype=None):
    """Return a GradientReducer of `count` parameters in as many buckets.

    It is past its first step, on recorded streams.
    """
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(count)]
    made = object.__new__(reducer.GradientReducer)
    made.__dict__.update(
        _parameters=parameters,
        group=None,
        ranks=(0,),
        _predivide=1.0,
        _average=True,
        _gradient=lambda p: p.grad,
        _items=[Item.of(str(n), p, dtype) for n, p in enumerate(parameters)],
        fabric=None,
        _callers_reduction=CallersReduction(
            lambda flat: gpu.log.append(("reduce", gpu.current)) or Done()
        ),
        _planned=None,
        _owners_of=None,
        _reduction_to_owners=None,
        bucket_bytes=32,
        _deferred=[],
        _step=0,
        _expected=[1] * count,
        _arrivals=[],
        _side_stream=SideStream(),
        times=None,
    )
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    return made


def test_a_reducer_leaves_an_event_at_every_hook(monkeypatch):
    """Two streams produce gradients of one bucket: the copies come after both, whichever hook is the last."""
    gpu = Gpu(monkeypatch)
    made = reducer_on(gpu, 2)
    made._build_buckets([1, 0])
    filled = FlatBucket.fill
    monkeypatch.setattr(
        FlatBucket, "fill", lambda *args: gpu.log.append(("copy", gpu.current)) or filled(*args)
    )
    made.arm()
    for index, stream in ((1, "b"), (0, "a")):
        gpu.current = stream
        made._gradient_arrived(index, made._parameters[index])
    place = gpu.log.index(("copy", "side"))
    assert {("wait", "main"), ("wait", "a"), ("wait", "b")} <= set(gpu.log[:place])
    assert gpu.log[place + 1] == ("reduce", "side")
    gpu.current = "main"
    made.finish()
    assert gpu.log[-1] == ("wait", "side")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_no_more_buckets_have_memory_than_the_plan_counts(monkeypatch, dtype):
    gpu, most = Gpu(monkeypatch), 0
    made = reducer_on(gpu, 20, dtype)
    made.bucket_bytes = 1  # each parameter its own
    made._build_buckets(range(20))
    reduced = made._reduction.all_reduce

    def count(flat, bucket):
        nonlocal most
        most = max(most, sum(bucket._flat is not None for bucket in made._buckets))
        return reduced(flat, bucket)

    made._reduction.all_reduce = count
    made.arm()
    for index, parameter in enumerate(made._parameters):
        made._gradient_arrived(index, parameter)
    made.finish()
    assert most == BUCKETS_IN_FLIGHT and not any(
        bucket._flat is not None for bucket in made._buckets
    )


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_bucket_keeps_after_a_step(dtype):
    """Nothing but the gradients themselves; where they travel in another dtype not even their buffer."""
    parameters = [torch.nn.Parameter(torch.ones(6)) for _ in range(3)]
    items = [Item.of(str(number), parameter, dtype) for number, parameter in enumerate(parameters)]
    bucket = FlatBucket((2, 1, 0), items, multiple=4, keeps_buffer=False)
    for parameter in parameters[1:]:
        parameter.grad = torch.full((6,), 2.0)
    bucket.fill(parameters, lambda parameter: parameter.grad, 2.0)
    assert bucket.flat.tolist() == [1.0] * 12 + [0.0] * 8 and bucket.bytes == 18 * (
        2 if dtype else 4
    )
    inside = {parameter.grad.untyped_storage().data_ptr() for parameter in parameters}
    assert (inside == {bucket.flat.untyped_storage().data_ptr()}) == (dtype is None)
    bucket.flat.mul_(3)
    bucket.store(0.5)
    assert [parameter.grad.tolist() for parameter in parameters] == [
        [0.0] * 6,
        [6.0] * 6,
        [6.0] * 6,
    ]
    with pytest.raises(AssertionError):
        _ = bucket.flat

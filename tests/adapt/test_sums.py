"""Whether a GPU has room for another way to sum gradients."""

from types import SimpleNamespace

import pytest
import torch

from holmes_ext.adapt.reductions import SumChange
from holmes_ext.adapt.sums import SumWindow, fits
from holmes_ext.plan.traffic import Reduction
from holmes_ext.runtime.session import DoneReduction

SMALL, LARGE, AWAY = Reduction(True, 10**6), Reduction(True, 10**8), Reduction(True, 10**6, apart=32)
GROWS, SHRINKS, LEAVES = ((SMALL,), (LARGE,)), ((LARGE,), (SMALL,)), ((SMALL,), (AWAY,))


@pytest.mark.parametrize("ways, free, pieces, room", [
    (GROWS, 10**9, False, True), (GROWS, 10**8, False, False), (GROWS, 10**9, True, False),
    (SHRINKS, 0, True, True), (LEAVES, 2 * 10**9, False, True), (LEAVES, 10**9, False, False),
])  # fmt: skip
def test_buckets_that_grow_need_memory_that_is_there(monkeypatch, ways, free, pieces, room):
    told = {"mem_get_info": (free, 10**10), "memory_reserved": 0, "max_memory_allocated": 0}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)

    def empty(size, **_):
        if pieces:
            raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", empty)
    recorder = SimpleNamespace(spans_on_device=True, device_index=0)
    assert fits(SumChange(*ways, 1e9, 1.0, 0.5), recorder, fragments=4) == room


@pytest.mark.parametrize("spans, reduction, exposed", [
    ([], {"exposed": 0.3}, 0.3),  # the reducer's own figures
    ([("reduce", 2.0, 2.5), ("backward", 0.0, 2.0)], {"bytes": 1}, 0.5),  # of a GPU: its compute stream's
    ([("last bucket", 1.0, 1.4)], None, 1.6),  # DistributedDataParallel's backward pass ended
])  # fmt: skip
def test_what_the_program_waited_for_sums(spans, reduction, exposed):
    done = DoneReduction(SMALL, 1e6, False, True, follows=True)
    group = SimpleNamespace(ranks=(0, 1), description="", transport=SimpleNamespace(fabric="ethernet"))
    op = SimpleNamespace(peer=None, group=group, name="all_reduce", payload=1e6, start=1.0, end=3.0,
                         waited=0.0)
    window = SumWindow(SimpleNamespace(reductions={(0, 1): done}), None)
    window.step([op], spans, reduction)
    report = window.report()
    assert report["exposed"] == pytest.approx(exposed) and report["busy"] == {"ethernet": 2.0}


@pytest.mark.parametrize("payload, counts", [(4, True), (5e5, False)])
def test_a_step_in_which_a_round_ended_does_not_count(payload, counts):
    done = DoneReduction(AWAY, 1e6, False, True, follows=True, round_s=0.7)
    whole, inside = (
        SimpleNamespace(ranks=ranks, description=text, transport=SimpleNamespace(fabric=fabric))
        for ranks, text, fabric in (((0, 1, 2, 3), "", "ethernet"), ((0, 1), "apart", "fast")))
    ops = [SimpleNamespace(peer=None, group=group, name="all_reduce", payload=size, start=1.0, end=end,
                           waited=0.0) for group, size, end in ((inside, 1e6, 2.0), (whole, payload, 9.0))]
    window = SumWindow(SimpleNamespace(reductions={(0, 1, 2, 3): done}), None)
    assert window.step(ops, [], {"exposed": 0.5}) == counts
    if counts:
        report = window.report()
        assert report["busy"] == {"fast": 1.0} and report["round_s"] == 0.7

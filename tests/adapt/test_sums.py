"""Whether a GPU has room for another way to sum gradients."""

from types import SimpleNamespace

import pytest
import torch

from holmes_ext import adapt
from holmes_ext.adapt.reductions import ReductionChange
from holmes_ext.adapt.sums import ReductionWindow, fits
from holmes_ext.plan.traffic import ReductionSpec
from holmes_ext.runtime.session import DoneReduction

SMALL, LARGE = ReductionSpec(True, 10**6), ReductionSpec(True, 10**8)
GROWS, SHRINKS = ((SMALL,), (LARGE,)), ((LARGE,), (SMALL,))


@pytest.mark.parametrize(
    "ways, free, pieces, room",
    [
        (GROWS, 10**9, False, True),
        (GROWS, 10**8, False, False),
        (GROWS, 10**9, True, False),
        (SHRINKS, 0, True, True),
    ],
)
def test_buckets_that_grow_need_memory_that_is_there(monkeypatch, ways, free, pieces, room):
    told = {"mem_get_info": (free, 10**10), "memory_reserved": 0, "max_memory_allocated": 0}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)

    def empty(size, **_):
        if pieces:
            raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", empty)
    recorder = SimpleNamespace(spans_on_device=True, device_index=0)
    assert fits(ReductionChange(*ways, 1e9, 1.0, 0.5), recorder) == room


@pytest.mark.parametrize(
    "spans, reduction, exposed",
    [
        ([], {"exposed": 0.3}, 0.3),  # the reducer's own figures
        (
            [("reduce", 2.0, 2.5), ("backward", 0.0, 2.0)],
            {"bytes": 1},
            0.5,
        ),  # of a GPU: its compute stream's
        ([("last bucket", 1.0, 1.4)], None, 1.6),  # DistributedDataParallel's backward pass ended
    ],
)
def test_what_the_program_waited_for_sums(spans, reduction, exposed):
    done = DoneReduction(SMALL, 1e6, False, True, follows_plan=True)
    group = SimpleNamespace(
        ranks=(0, 1), description="", transport=SimpleNamespace(fabric="ethernet")
    )
    op = SimpleNamespace(
        peer=None, group=group, name="all_reduce", payload=1e6, start=1.0, end=3.0, waited=0.0
    )
    window = ReductionWindow(SimpleNamespace(reductions={(0, 1): done}), None)
    window.step([op], spans, reduction)
    report = window.report()
    assert report["exposed"] == pytest.approx(exposed) and report["busy"] == {"ethernet": 2.0}


@pytest.mark.parametrize(
    "clusters, in_flight, applies",
    [
        (("a",), False, False),  # gradients are summed in one way only
        (("a", "b"), False, True),
        (("a",), True, True),
    ],
)
def test_a_plan_in_which_nothing_can_change_needs_no_adapting(clusters, in_flight, applies):
    abilities = {"hierarchical", "in-flight"} if in_flight else {"hierarchical"}
    current = SimpleNamespace(
        plan=SimpleNamespace(clusters=dict.fromkeys(clusters, ("node",))),
        engine=SimpleNamespace(can=lambda ability, off: ability in abilities),
        options=SimpleNamespace(inflight="auto", off=frozenset()),
        store=object(),
    )
    assert adapt.applies_to(current) == applies

"""A hierarchical all-reduce with NCCL's collectives.

The tests check the launches and their streams, and how long they take where every communicator and
every stream does one thing after the other.
"""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from prices import sums_on_site

from holmes_ext.cluster.fabric import Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.plan.buckets import NCCL_CHUNK_BYTES, chunk_bytes
from holmes_ext.runtime.reduce import hierarchical_nccl
from holmes_ext.runtime.reduce.hierarchical_nccl import HierarchicalCollectives


class Recorder:
    """In place of CUDA's streams and torch's collectives: what was launched, in order."""

    def __init__(self):
        self.log, self.streams, self.current = [], 0, Stream(self, "compute")

    def launch(self, operation, group):
        self.log.append(("run", self.current.name, group, operation))

    def events(self):
        return [entry for entry in self.log if entry[0] == "run"]


class Stream:
    def __init__(self, recorder, name):
        self.recorder, self.name = recorder, name

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self):
        event = len(self.recorder.log)
        self.recorder.log.append(("record", self.name, event))
        return event

    def wait_event(self, event):
        self.recorder.log.append(("wait", self.name, event))


@pytest.fixture
def recorded(monkeypatch):
    recorder = Recorder()

    def new():
        recorder.streams += 1
        return Stream(recorder, f"stream {recorder.streams}")

    @contextmanager
    def on(stream):
        before, recorder.current = recorder.current, stream
        yield
        recorder.current = before

    for name, fake in {
        "is_available": lambda: True,
        "Stream": new,
        "stream": on,
        "current_stream": lambda: recorder.current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(
        hierarchical_nccl, "members_group", lambda ranks, purpose: (purpose, tuple(ranks))
    )
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        monkeypatch.setattr(
            dist, name, lambda into, of, group, name=name: recorder.launch(name, group)
        )
    monkeypatch.setattr(
        dist, "all_reduce", lambda tensor, group: recorder.launch("all_reduce", group)
    )
    return recorder


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True
    used_on: list = []

    def record_stream(self, stream):
        self.used_on.append(stream.name)


def flat(numel):
    return torch.zeros(numel).as_subclass(OnGpu)


def seconds(log, cost):
    """Return the seconds after which all operations are over.

    A stream does one entry after the other, and so does a communicator. An event is over when its
    stream has come by. cost: operation -> seconds.
    """
    free, over = {}, {}
    for kind, stream, *rest in log:
        if kind == "record":
            over[rest[0]] = free.get(stream, 0.0)
        elif kind == "wait":
            free[stream] = max(free.get(stream, 0.0), over[rest[0]])
        else:
            group, operation = rest
            start = max(free.get(stream, 0.0), free.get(group, 0.0))
            free[stream] = free[group] = start + cost[operation]
    return max(free.values())


CLUSTERS = [[0, 1], [2, 3]]
INSIDE_S, ACROSS_S = 1.0, 2.0  # of a chunk: both steps inside, the one across
COST = {
    "reduce_scatter_tensor": INSIDE_S / 2,
    "all_gather_into_tensor": INSIDE_S / 2,
    "all_reduce": ACROSS_S,
}


@pytest.mark.parametrize("as_buckets", [False, True], ids=["one tensor", "a bucket a chunk"])
def test_the_slower_level_is_always_busy(recorded, as_buckets):
    """The reducer's buckets are one chunk each; DeepSpeed's are many."""
    count, reduction = 20, HierarchicalCollectives(CLUSTERS, chunk_bytes=4096)
    for tensor in [flat(1024) for _ in range(count)] if as_buckets else [flat(1024 * count)]:
        reduction.all_reduce(tensor).wait()
        if as_buckets:  # finish() waits later
            recorded.log.pop()
    assert len(recorded.events()) == 3 * count
    took = seconds(recorded.log, COST)
    assert took == pytest.approx(count * max(INSIDE_S, ACROSS_S) + INSIDE_S)
    # what the plan says: the slower level, and one chunk on the faster
    inside, across = 8 * 4096 / INSIDE_S, 8 * 4096 / ACROSS_S / 2
    both = planned(["a", "b"], 2, inside, across, bucket_bytes=4096)
    assert both.seconds(4096 * count) == pytest.approx(took)


def test_the_same_communicators_in_the_same_order_whatever_the_rank(recorded, monkeypatch):
    launched = {}
    for rank in range(4):
        recorded.log.clear()
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        HierarchicalCollectives(CLUSTERS, chunk_bytes=4096).all_reduce(flat(5000))
        launched[rank] = [(group, operation) for _, _, group, operation in recorded.events()]
    for group in {group for found in launched.values() for group, _ in found}:
        of_group = [[op for at, op in launched[rank] if at == group] for rank in group[1]]
        assert all(ops == of_group[0] for ops in of_group) and len(of_group[0]) == 4


def test_the_result_is_waited_for(recorded):
    work = HierarchicalCollectives(CLUSTERS, chunk_bytes=4096).all_reduce(flat(1000))
    last = [entry for entry in recorded.log if entry[0] == "record"][-1]
    work.wait()
    assert last[1] == "stream 3" and recorded.log[-1] == ("wait", "compute", last[2])


def test_what_is_left_over_is_padded_not_summed_by_everyone(recorded):
    reduction = HierarchicalCollectives(CLUSTERS, chunk_bytes=4096)
    OnGpu.used_on.clear()
    reduction.all_reduce(flat(1025)).wait()
    # its memory waits for all of them
    assert OnGpu.used_on == ["stream 1", "stream 2", "stream 3", "compute"]
    groups = {group for _, _, group, _ in recorded.events()}
    assert max(len(ranks) for _, ranks in groups) == 2 and len(recorded.events()) == 3


def planned(names, nodes, inside_bps, across_bps, **rules):
    """Plan a hierarchical all-reduce of one group over all nodes, without latency."""
    fabrics = [Fabric(name, "ib", round(inside_bps), 0.0) for name in names]
    fabrics.append(Fabric("ethernet", "ethernet", round(across_bps), 0.0))
    every = [
        Node(f"{name}{number}", name, 1, (Port(name), Port("ethernet")))
        for name in names
        for number in range(nodes)
    ]
    return sums_on_site(Site(tuple(every), tuple(fabrics)), direct=False, **rules).hierarchical


def test_chunks_are_of_some_mebibytes():
    assert [chunk_bytes(ranks, direct=False) for ranks in (1, 8, 16, 64)] == [
        NCCL_CHUNK_BYTES[0],
        NCCL_CHUNK_BYTES[0],
        8 * 2**20,
        NCCL_CHUNK_BYTES[1],
    ]
    assert chunk_bytes(2, direct=True) == 2**20


def test_compressed_shards_of_three_clusters_cost_more_than_a_ring():
    """All-gathered whole: (C - 1) shards, a ring's all-reduce sends 2 (C - 1) / C."""
    plain, half = (
        planned(["a", "b", "c"], 4, 1e10, 1e9, compress=how).across.byte_s
        for how in ("off", "bf16")
    )
    assert half == pytest.approx(plain * 0.5 * 3 / 2)

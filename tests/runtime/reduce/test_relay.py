"""Rings and trees of clusters, also in real processes.

Every owner ends with the same sum, whatever the order.
"""

import random

import pytest
import torch
import torch.distributed as dist
from carriers import gloo_only
from ranks import run_ranks, seeded

from holmes_ext.cluster.wan import Between, Uplink, Wan
from holmes_ext.plan.across import ways_across
from holmes_ext.plan.traffic import CrossClusterAlgorithm, neighbours
from holmes_ext.runtime.reduce.direct import relay_rounds
from holmes_ext.runtime.reduce.hierarchical import HierarchicalAllReduce


def some_across(rng, names):
    order = rng.sample(names, len(names))
    if rng.random() < 0.4:
        return CrossClusterAlgorithm("ring", tuple(order))
    parents = ("", *(rng.choice(order[:place]) for place in range(1, len(order))))
    return CrossClusterAlgorithm("tree", tuple(order), parents)


def passed_on(across, names):
    """Return what every cluster has at the end, by part.

    It is the multiset of the clusters whose values were added. Messages in flight are matched by
    sender, receiver and tag, first in, first out.
    """
    count = 1 if across.algorithm == "tree" else len(names)
    held = {name: [[name] for _ in range(count)] for name in names}
    queues, place = {}, dict.fromkeys(names, 0)
    program = {name: relay_rounds(across, names, name) for name in names}
    moved = True
    while moved:
        moved = False
        for name in names:
            if place[name] == len(program[name]):
                continue
            one = program[name][place[name]]
            keys = [(names[cluster], name, tag) for cluster, _, tag, _ in one.receives]
            if not all(queues.get(key) for key in keys):
                continue
            for key, (_, part, _, added) in zip(keys, one.receives):
                sent, value = queues[key].pop(0)
                assert sent == part
                held[name][part] = held[name][part] + value if added else value
            for cluster, part, tag in one.sends:
                queues.setdefault((name, names[cluster], tag), []).append(
                    (part, list(held[name][part]))
                )
            place[name] += 1
            moved = True
    assert all(place[name] == len(program[name]) for name in names) and not any(queues.values())
    return held


@pytest.mark.parametrize("seed", range(60))
def test_all_have_the_same_whole_sum(seed):
    rng = random.Random(seed)
    names = [f"c{index}" for index in range(rng.randint(2, 7))]
    held = passed_on(some_across(rng, names), names)
    first = held[names[0]]
    assert all(own == first for own in held.values())  # in the same order: the same bits
    assert all(sorted(part) == sorted(names) for part in first)


def wan(*links, uplinks=()):
    between = tuple(Between((a, b), rate, latency) for a, b, rate, latency in links)
    return Wan(tuple(Uplink(*u) for u in uplinks), between)


SLOW_AC = wan(("a", "b", 400, 0.02), ("b", "c", 400, 0.02), ("a", "c", 100, 0.02))


def test_ways_leave_the_slow_link_alone():
    trees = [way for way in ways_across(SLOW_AC, ("a", "b", "c")) if way.algorithm == "tree"]
    assert any(
        set(zip(way.order, way.parents)) == {("b", ""), ("a", "b"), ("c", "b")} for way in trees
    )
    square = {frozenset(pair) for pair in (("a", "c"), ("c", "b"), ("b", "d"), ("d", "a"))}
    links = [
        (a, b, 400 if {a, b} in square else 100, 0.01)
        for a, b in (("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d"))
    ]
    (ring,) = [way for way in ways_across(wan(*links), tuple("abcd")) if way.algorithm == "ring"]
    assert {frozenset(pair) for pair in neighbours(ring.order)} == square
    assert [way.algorithm for way in ways_across(Wan(), ("a", "b", "c"))] == ["direct"]


def relayed(rank, clusters, ways, numels, streams=1):
    names, worst, same = list("abcdefg")[: len(clusters)], 0.0, True
    for across in ways:
        small = dict(chunk_bytes=256) if streams == 1 else {}
        reduction = HierarchicalAllReduce(
            clusters, across=across, names=names, streams=streams, **small
        )
        works = []
        for number, numel in enumerate(numels):  # all under way at once
            x = torch.randn(numel, generator=seeded(100 * rank + number))
            works.append((x, x.clone(), reduction.all_reduce(x)))
        for x, wanted, work in works:
            work.wait()
            dist.all_reduce(wanted)
            worst = max(worst, float((x - wanted).abs().max()))
            copies = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, x)
            same = same and all(torch.equal(copies[0], copy) for copy in copies)
        reduction.close()
    return worst, same


@gloo_only
def test_same_bits_in_processes():
    ways = [
        CrossClusterAlgorithm("ring", ("a", "c", "b")),
        CrossClusterAlgorithm("tree", ("b", "a", "c"), ("", "b", "b")),
        CrossClusterAlgorithm("tree", ("a", "b", "c"), ("", "a", "b")),
    ]
    for clusters in ([[0, 1], [2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5]]):
        for worst, same in run_ranks(relayed, 6, clusters, ways, [1, 2, 7, 1000, 4097]):
            assert same and worst < 1e-5


@gloo_only
def test_large_parts_share_streams():
    ways = [
        CrossClusterAlgorithm("ring", ("a", "b")),
        CrossClusterAlgorithm("tree", ("b", "a"), ("", "b")),
        None,
    ]
    assert all(
        same and worst < 1e-5
        for worst, same in run_ranks(relayed, 3, [[0, 2], [1]], ways, [5, 200_003], 3)
    )


@gloo_only
def test_two_clusters_as_ring_and_tree():
    ways = [
        CrossClusterAlgorithm("ring", ("b", "a")),
        CrossClusterAlgorithm("tree", ("b", "a"), ("", "b")),
    ]
    assert all(
        same and worst < 1e-5
        for worst, same in run_ranks(relayed, 3, [[0, 2], [1]], ways, [5, 999])
    )

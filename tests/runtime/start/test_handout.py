"""The verdict's way to the ranks of a node: fetched once, read from memory by the others, fetched where that fails."""

import os
import threading
from collections import Counter

import pytest
import torch.distributed as dist

from holmes_ext.runtime.start import handout


class Counting:
    """A store that counts what is fetched."""

    def __init__(self):
        self.inner, self.fetched = dist.HashStore(), Counter()

    def get(self, key):
        self.fetched[key] += 1
        return self.inner.get(key)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def take_all(store, expected, ranks=8):
    found = {}

    def one(rank):
        found[rank] = handout.take(store, "r", f"node{rank // 4}", rank % 4, expected)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in reversed(range(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_node_fetches_it_once():
    store = Counting()
    expected = handout.give(store, "r", b"plan" * 1000)
    assert take_all(store, expected) == dict.fromkeys(range(8), b"plan" * 1000)
    assert store.fetched["r/document"] == 2


@pytest.mark.parametrize("told", ["1 999999", f"{os.getpid()} 999999", "999999999 3"])
def test_what_cannot_be_read_is_fetched(told):
    """A process of another container, or another process under that number there."""
    store = Counting()
    expected = handout.give(store, "r", b"plan")
    store.set("r/node/n", told)
    assert handout.take(store, "r", "n", 1, expected) == b"plan" and store.fetched["r/document"] == 1


def test_something_else_under_that_name_is_not_taken(tmp_path):
    store = Counting()
    expected = handout.give(store, "r", b"plan")
    with open(tmp_path / "other", "wb+") as other:
        other.write(b"nalp")
        other.flush()
        store.set("r/node/n", f"{os.getpid()} {other.fileno()}")
        assert handout.take(store, "r", "n", 1, expected) == b"plan"


def test_a_neighbour_that_says_nothing_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(handout, "NEIGHBOUR_SECONDS", 0.05)
    store = Counting()
    assert handout.take(store, "r", "n", 1, handout.give(store, "r", b"plan")) == b"plan"

"""Tests holmes's wrappers of torch.distributed.send and recv, for the backend nccl-lazy.

The wrappers send a message over a process group of the two ranks that exchange it, if these ranks have a
faster network than the group that the program has named.
"""

from types import SimpleNamespace

import pytest

from holmes_ext.patches.torch import messages
from holmes_ext.runtime import session


class Group:
    """Stand-in for a process group with ranks 0 to 3."""


@pytest.fixture(autouse=True)
def two_clusters(monkeypatch):
    """Let this process be rank 0 of 4. Ranks 0 and 1 share InfiniBand, all ranks share Ethernet."""

    def fabric_of(ranks, backend):
        return "ib" if set(ranks) <= {0, 1} else "ethernet"

    monkeypatch.setattr(session, "_active", SimpleNamespace(rank=0, fabric_of=fabric_of))
    monkeypatch.setattr(messages, "backend_of", lambda group: "nccl-lazy")
    monkeypatch.setattr(messages, "group_ranks", lambda group: [0, 1, 2, 3])
    made = []

    def pair_group(pair, purpose, group):
        made.append(tuple(sorted(pair)))
        return f"group {made[-1]}"

    monkeypatch.setattr(messages, "pair_group", pair_group)
    return made


def arguments_of(wrapper, *args, **kwargs):
    """Call a wrapper, and return the peer and the group with which it calls torch's send or recv.

    Args:
        wrapper: holmes's wrapper of send, or the one of recv.
        args: Positional arguments with which a program calls send or recv.
        kwargs: Its named arguments.
    """
    received = {}

    def send(tensor, dst=None, group=None, tag=0, group_dst=None):
        received.update(peer=group_dst if dst is None else dst, group=group)

    def recv(tensor, src=None, group=None, tag=0, group_src=None):
        received.update(peer=group_src if src is None else src, group=group)

    original = send if wrapper is messages._send_over_pair_group else recv
    # A wrapper gets the original function, no instance, and the program's arguments.
    wrapper(original, None, args, kwargs)
    return received


BOTH = pytest.mark.parametrize(
    "wrapper", [messages._send_over_pair_group, messages._receive_over_pair_group]
)


@BOTH
def test_a_pair_inside_a_cluster_has_a_group_of_its_own(wrapper, two_clusters):
    group = Group()
    for _ in range(2):
        assert arguments_of(wrapper, "tensor", 1, group) == {"peer": 1, "group": "group (0, 1)"}
    assert two_clusters == [(0, 1)]  # it is made once
    arguments_of(wrapper, "tensor", 1, Group())
    assert len(two_clusters) == 2  # another group has other settings


@BOTH
def test_the_peer_by_its_rank_in_the_group(wrapper):
    name = "group_dst" if wrapper is messages._send_over_pair_group else "group_src"
    received = arguments_of(wrapper, "tensor", group=Group(), **{name: 1})
    assert received == {"peer": 1, "group": "group (0, 1)"}


@BOTH
def test_a_pair_on_the_network_of_the_group_keeps_it(wrapper, two_clusters):
    group = Group()
    assert arguments_of(wrapper, "tensor", 2, group) == {"peer": 2, "group": group}
    assert two_clusters == []


@BOTH
def test_other_backends_are_not_changed(wrapper, two_clusters, monkeypatch):
    monkeypatch.setattr(messages, "backend_of", lambda group: "nccl2")
    group = Group()
    assert arguments_of(wrapper, "tensor", 1, group) == {"peer": 1, "group": group}
    assert two_clusters == []


@BOTH
def test_the_group_is_chosen_once_for_each_peer(wrapper, monkeypatch):
    """A job may send many messages in each step, so the backend is not read for every one."""
    reads = []

    def backend_of(group):
        reads.append(group)
        return "nccl2"

    monkeypatch.setattr(messages, "backend_of", backend_of)
    group = Group()
    for _ in range(3):
        assert arguments_of(wrapper, "tensor", 1, group) == {"peer": 1, "group": group}
    assert len(reads) == 1


def test_a_message_from_any_rank_stays_on_the_group(two_clusters):
    group = Group()
    received = arguments_of(messages._receive_over_pair_group, "tensor", None, group)
    assert received == {"peer": None, "group": group}

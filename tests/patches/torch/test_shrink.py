"""Tests process groups whose members change while the job runs, without NCCL."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from holmes_ext.errors import HolmesError
from holmes_ext.patches.torch import shrink
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.transport import Transport
from holmes_ext.runtime.watch import nccl_errors

IB, ETHERNET = Transport("ib", "ib", "ib0", "IB"), Transport("ethernet", "ethernet", "eth0", "Socket")


class Group:
    """Stand-in for a process group of torch."""

    def __init__(self, ranks, group_desc="pipeline"):
        self.ranks = ranks
        self.group_desc = group_desc
        self.group_name = "7"


@pytest.fixture
def job(monkeypatch):
    """A job of four ranks under holmes, whose default group has all ranks. This process is rank 0.

    Ranks 0 and 1 are in one cluster, with InfiniBand. The value is a stand-in for the session of holmes; its
    list `calls` has the arguments with which torch's own functions are called.
    """

    def transport(ranks, backend):
        return IB if set(ranks) <= {0, 1} else ETHERNET

    plan = SimpleNamespace(sizes=None, world_size=4, by_cluster=lambda ranks: ["a"])
    current = SimpleNamespace(
        rank=0,
        round="holmes/1",
        plan=plan,
        transport=transport,
        node=None,
        site=SimpleNamespace(fabric_by_name={}),
        options=SimpleNamespace(verbose="off"),
        groups=[],
        forced_nets={},
        store=None,
        calls=[],
    )
    monkeypatch.setattr(session, "_active", current)
    world = SimpleNamespace(default_pg=Group([0, 1, 2, 3], "default_pg"))  # dist.group.WORLD reads this
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    monkeypatch.setattr(shrink, "group_ranks", lambda group: group.ranks)
    monkeypatch.setattr(shrink, "backend_of", lambda group: "gloo")
    monkeypatch.setattr(shrink, "options_of", lambda group: None)
    monkeypatch.setattr(shrink, "_renumbered_rounds", set())
    yield current


def run(wrapper, current, function, *arguments, **keywords):
    """Call a wrapper of holmes as the patched function of torch does."""

    def original(*args, **kwargs):
        current.calls.append((args, kwargs))
        return function(*args, **kwargs)

    original.__wrapped__ = function  # the wrapper reads the signature
    return wrapper(original, None, arguments, keywords)


def shrink_group(ranks_to_exclude, group=None, shrink_flags=0, pg_options=None):
    """Stand in for torch.distributed.shrink_group."""
    return "shrunk"


def reconfigure(uuid, handles, group=None, timeout=None, hints=None):
    """Stand in for torch.distributed._reconfigure."""
    return "work"


def new_process_group_helper(group_size, group_rank, global_ranks_in_group, backend, store):
    """Stand in for torch's _new_process_group_helper."""
    return "new group"


def split_group(parent_pg=None, split_ranks=None):
    """Stand in for torch.distributed.split_group."""
    return "part"


def recorded(current):
    """Return name, ranks and network of each group in the session."""
    return [(record.name, record.ranks, record.transport.fabric) for record in current.groups]


def shrink_with(current, *arguments, **keywords):
    return run(shrink._keep_network_of_shrunk_group, current, shrink_group, *arguments, **keywords)


def reconfigure_with(current, uuid, handles):
    return run(shrink._record_reconfigured_group, current, reconfigure, uuid, handles)


def make_group(current):
    wrapper = shrink._refuse_group_after_renumbering
    return run(wrapper, current, new_process_group_helper, 2, 0, [0, 1], "gloo", None)


def test_a_shrunk_group_is_recorded_with_the_network_of_its_ranks(job):
    """Excluded ranks are counted within the group."""
    assert shrink_with(job, [2], group=Group([0, 1, 3])) == "shrunk"
    assert recorded(job) == [("pipeline:shrunk", (0, 1), "ib")]
    assert make_group(job) == "new group"


def test_a_group_without_a_description_is_recorded_with_its_name(job):
    shrink_with(job, [1], group=Group([0, 1], group_desc="undefined"))
    assert recorded(job) == [("7:shrunk", (0,), "ib")]


def test_nccl_gets_the_network_of_the_remaining_ranks(job, monkeypatch):
    """The program's own options are the base; without them those of the former group."""
    made_of = []

    def nccl_options(current, ranks, backend, program_options, timeout, name, parent_options):
        made_of.append((ranks, program_options, parent_options, name))
        return "options with IB"

    monkeypatch.setattr(shrink, "backend_of", lambda group: "nccl-legacy")
    monkeypatch.setattr(shrink, "options_of", lambda group: "former options")
    monkeypatch.setattr(shrink, "_nccl_options", nccl_options)
    monkeypatch.setattr(shrink, "_record", lambda *arguments: None)
    shrink_with(job, [2], group=Group([0, 1, 3]), pg_options="program's options")
    assert made_of == [((0, 1), "program's options", "former options", made_of[0][3])]
    ((_positional, keywords),) = job.calls
    assert keywords["pg_options"] == "options with IB"


def test_torch_refuses_the_call_of_a_rank_that_leaves(job):
    shrink_with(job, [0], group=Group([0, 1, 3]))
    assert job.calls and recorded(job) == []


@pytest.mark.parametrize("excluded, makes_groups", [([3], True), ([1], False)])
def test_new_groups_are_refused_if_ranks_have_new_numbers(job, excluded, makes_groups):
    """Without rank 3 the others keep their numbers. Without rank 1 torch counts ranks 2 and 3 as 1 and 2."""
    shrink_with(job, excluded)
    remaining = tuple(rank for rank in range(4) if rank not in excluded)
    assert recorded(job) == [("default_pg:shrunk", remaining, "ethernet")]
    if makes_groups:
        assert make_group(job) == "new group"
        return
    with pytest.raises(HolmesError, match="torch has numbered the others anew"):
        make_group(job)
    with pytest.raises(HolmesError, match="start the job again"):
        run(shrink._refuse_split_after_renumbering, job, split_group)
    # The program may make the default group anew.
    wrapper = shrink._refuse_group_after_renumbering
    assert run(wrapper, job, new_process_group_helper, 4, 0, [], "gloo", None) == "new group"


def handle(rank, uuid):
    return f"nccl2:{rank}:{uuid}:17:10.0.0.1:29500"


def test_a_reconfigured_group_is_recorded_if_its_members_change(job):
    all_ranks = [handle(rank, -1) for rank in range(4)]
    reconfigure_with(job, 1, all_ranks)
    assert recorded(job) == []  # torch made the group with these ranks

    # Rank 1 is lost. Its successors have new numbers in the next handles.
    reconfigure_with(job, 2, [handle(0, 1), handle(2, 1), handle(3, 1)])
    assert recorded(job) == [("default_pg:reconfigured", (0, 2, 3), "ethernet")]
    with pytest.raises(HolmesError):
        make_group(job)

    # A new process takes the place of rank 1: all ranks have their first numbers again.
    reconfigure_with(job, 3, [handle(0, 2), handle(1, -1), handle(1, 2), handle(2, 2)])
    assert recorded(job)[1:] == [("default_pg:reconfigured", (0, 1, 2, 3), "ethernet")]
    assert make_group(job) == "new group"


def test_torch_sorts_a_set_of_handles(job):
    reconfigure_with(job, 1, {handle(2, -1), handle(0, -1), handle(1, -1)})
    assert recorded(job) == [("default_pg:reconfigured", (0, 1, 2), "ethernet")]


def test_members_that_this_rank_does_not_know_are_not_recorded(job):
    """A process that has just started does not know the numbers of the others."""
    assert reconfigure_with(job, 7, [handle(0, 6), handle(1, 6), handle(0, -1)]) == "work"
    assert recorded(job) == [] and make_group(job) == "new group"


def test_failures_of_the_new_communicator_are_reported(job, monkeypatch):
    """The program has aborted the former communicator by itself."""
    reconfigured = []
    monkeypatch.setattr(nccl_errors, "note_reconfiguration", reconfigured.append)
    reconfigure_with(job, 1, [handle(rank, -1) for rank in range(4)])
    assert reconfigured == [dist.group.WORLD]

"""Tests the patches for process groups whose members change in a running job (patches/torch/shrink.py).

The tests run without NCCL: stand-ins replace torch's process groups and the patched functions of torch.
"""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from holmes_ext.errors import HolmesError
from holmes_ext.patches.torch import shrink
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.transport import Transport
from holmes_ext.runtime.watch import nccl_errors

INFINIBAND = Transport("ib", "ib", "ib0", "IB")
ETHERNET = Transport("ethernet", "ethernet", "eth0", "Socket")


class Group:
    """Stand-in for a process group of torch."""

    def __init__(self, ranks, group_desc="pipeline"):
        self.ranks = ranks
        self.group_desc = group_desc
        self.group_name = "7"


@pytest.fixture
def current(monkeypatch):
    """Return a stand-in for holmes's session on rank 0 of a job of four ranks.

    Ranks 0 and 1 are in one cluster, with InfiniBand. Groups with other ranks use Ethernet. The default group
    has all four ranks. The list `current.calls` collects the arguments (positional, keywords) with which the
    patches call the stand-ins for torch's functions.
    """

    def planned_transport(ranks, backend):
        return INFINIBAND if set(ranks) <= {0, 1} else ETHERNET

    plan = SimpleNamespace(sizes=None, world_size=4, by_cluster=lambda ranks: ["a"])
    current = SimpleNamespace(
        rank=0,
        key_prefix="holmes/1",
        plan=plan,
        transport=planned_transport,
        node=None,
        site=SimpleNamespace(fabric_by_name={}),
        options=SimpleNamespace(verbose="off"),
        groups=[],
        forced_nets={},
        store=None,
        calls=[],
    )
    monkeypatch.setattr(session, "_active", current)
    world = SimpleNamespace(
        default_pg=Group([0, 1, 2, 3], "default_pg")
    )  # dist.group.WORLD reads this
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    monkeypatch.setattr(shrink, "group_ranks", lambda group: group.ranks)
    monkeypatch.setattr(shrink, "backend_of", lambda group: "gloo")
    monkeypatch.setattr(shrink, "options_of", lambda group: None)
    monkeypatch.setattr(shrink, "_renumbered_rounds", set())
    return current


def call_patched(wrapper, current, torch_function, *arguments, **keywords):
    """Call a function of torch as a program does when the patch with this wrapper is applied.

    Args:
        wrapper: The function of shrink.py that runs instead of torch's function.
        current: The fixture `current`. Its list `calls` gets the arguments that torch's function receives.
        torch_function: The stand-in for torch's function.
        arguments: The program's positional arguments.
        keywords: The program's keyword arguments.
    """

    def original(*args, **kwargs):
        current.calls.append((args, kwargs))
        return torch_function(*args, **kwargs)

    original.__wrapped__ = (
        torch_function  # so that inspect.signature() finds torch_function's parameters
    )
    return wrapper(original, None, arguments, keywords)


def torch_shrink_group(ranks_to_exclude, group=None, shrink_flags=0, pg_options=None):
    """Stand in for torch.distributed.shrink_group."""
    return "shrunk group"


def torch_reconfigure(uuid, handles, group=None, timeout=None, hints=None):
    """Stand in for torch.distributed._reconfigure."""
    return "work"


def torch_new_process_group_helper(group_size, group_rank, global_ranks_in_group, backend, store):
    """Stand in for torch's _new_process_group_helper."""
    return "new group"


def torch_split_group(parent_pg=None, split_ranks=None):
    """Stand in for torch.distributed.split_group."""
    return "part"


def shrink_group(current, ranks_to_exclude, **keywords):
    """Call torch's shrink_group, patched by holmes."""
    wrapper = shrink._shrink_group_with_planned_network
    return call_patched(wrapper, current, torch_shrink_group, ranks_to_exclude, **keywords)


def reconfigure_default_group(current, uuid, handles):
    """Call torch's _reconfigure, patched by holmes, for the default group."""
    wrapper = shrink._reconfigure_and_record_group
    return call_patched(wrapper, current, torch_reconfigure, uuid, handles)


def make_group(current, ranks=(0, 1)):
    """Call torch's _new_process_group_helper, patched by holmes. No ranks: make a default group."""
    return call_patched(
        shrink._make_group_unless_renumbered,
        current,
        torch_new_process_group_helper,
        group_size=len(ranks) or 4,
        group_rank=0,
        global_ranks_in_group=list(ranks),
        backend="gloo",
        store=None,
    )


def split_default_group(current):
    """Call torch's split_group, patched by holmes."""
    return call_patched(shrink._split_group_unless_renumbered, current, torch_split_group)


def handle(rank, uuid):
    """Return the handle by which torch's _reconfigure identifies a member.

    Args:
        rank: Rank of the member in the communicator with this uuid.
        uuid: UUID of the member's communicator. -1: its process has just started, and `rank` is its rank in
            the original group.
    """
    return f"nccl2:{rank}:{uuid}:17:10.0.0.1:29500"


def recorded_groups(current):
    """Return (name, ranks, network) of each group that holmes has recorded."""
    return [(record.name, record.ranks, record.transport.fabric) for record in current.groups]


def test_a_shrunk_group_is_recorded_with_the_network_of_its_ranks(current):
    # The member with global rank 3 has rank 2 in the group.
    assert shrink_group(current, ranks_to_exclude=[2], group=Group([0, 1, 3])) == "shrunk group"
    assert recorded_groups(current) == [("pipeline:shrunk", (0, 1), "ib")]
    # The global ranks have not changed, so the program may still make groups.
    assert make_group(current) == "new group"


def test_a_shrunk_group_without_a_description_is_recorded_by_its_name(current):
    shrink_group(current, ranks_to_exclude=[1], group=Group([0, 1], group_desc="undefined"))
    assert recorded_groups(current) == [("7:shrunk", (0,), "ib")]


def test_a_shrunk_nccl_group_gets_options_for_its_ranks(current, monkeypatch):
    """The options come from the program's options and those of the former group."""
    arguments_of_nccl_options = []

    def nccl_options(current, ranks, backend, program_options, timeout, name, parent_options):
        arguments_of_nccl_options.append((ranks, program_options, parent_options))
        return "options with IB"

    monkeypatch.setattr(shrink, "backend_of", lambda group: "nccl-legacy")
    monkeypatch.setattr(shrink, "options_of", lambda group: "former options")
    monkeypatch.setattr(shrink, "planned_nccl_options", nccl_options)
    monkeypatch.setattr(shrink, "record_group", lambda *arguments: None)
    shrink_group(
        current, ranks_to_exclude=[2], group=Group([0, 1, 3]), pg_options="program's options"
    )
    assert arguments_of_nccl_options == [((0, 1), "program's options", "former options")]
    ((_positional, keywords),) = current.calls
    assert keywords["pg_options"] == "options with IB"


def test_a_call_of_shrink_group_by_an_excluded_rank_only_calls_torch(current):
    """An excluded rank gets an error of torch. This process has rank 0 in the group."""
    shrink_group(current, ranks_to_exclude=[0], group=Group([0, 1, 3]))
    assert len(current.calls) == 1 and recorded_groups(current) == []


def test_groups_can_be_made_after_the_last_rank_is_excluded(current):
    """The remaining ranks 0, 1 and 2 keep their numbers, so the plan still applies to them."""
    shrink_group(current, ranks_to_exclude=[3])
    assert recorded_groups(current) == [("default_pg:shrunk", (0, 1, 2), "ethernet")]
    assert make_group(current) == "new group"


def test_groups_cannot_be_made_after_torch_has_renumbered_the_ranks(current):
    """Without rank 1, torch renumbers ranks 2 and 3 to 1 and 2. The plan has the old numbers."""
    shrink_group(current, ranks_to_exclude=[1])
    assert recorded_groups(current) == [("default_pg:shrunk", (0, 2, 3), "ethernet")]
    with pytest.raises(HolmesError, match="torch has numbered the others anew"):
        make_group(current)
    with pytest.raises(HolmesError, match="start the job again"):
        split_default_group(current)
    # A default group is allowed: the program may end torch.distributed and initialize it again.
    assert make_group(current, ranks=()) == "new group"


def test_a_reconfigured_group_is_recorded_if_its_members_change(current):
    # The first communicator (UUID 1) has the original members.
    reconfigure_default_group(current, uuid=1, handles=[handle(rank, -1) for rank in range(4)])
    assert recorded_groups(current) == []

    # Rank 1 is lost. UUID 2 has the members with ranks 0, 2 and 3 of UUID 1.
    reconfigure_default_group(current, uuid=2, handles=[handle(0, 1), handle(2, 1), handle(3, 1)])
    assert recorded_groups(current) == [("default_pg:reconfigured", (0, 2, 3), "ethernet")]
    # torch has renumbered ranks 2 and 3 to 1 and 2, so holmes cannot find the network of a new group.
    with pytest.raises(HolmesError):
        make_group(current)

    # A new process replaces rank 1, in the second position. The others have ranks 0, 1 and 2 of UUID 2.
    handles = [handle(0, 2), handle(1, -1), handle(1, 2), handle(2, 2)]
    reconfigure_default_group(current, uuid=3, handles=handles)
    assert recorded_groups(current)[1:] == [("default_pg:reconfigured", (0, 1, 2, 3), "ethernet")]
    # All members have their original ranks again.
    assert make_group(current) == "new group"


def test_a_set_of_handles_is_sorted(current):
    """If the program passes a set, torch assigns the new ranks in sorted order."""
    reconfigure_default_group(
        current, uuid=1, handles={handle(2, -1), handle(0, -1), handle(1, -1)}
    )
    assert recorded_groups(current) == [("default_pg:reconfigured", (0, 1, 2), "ethernet")]


def test_a_group_is_not_recorded_by_a_process_that_has_just_started(current):
    """It has not seen the communicator with UUID 6, so it cannot translate ranks of that communicator."""
    handles = [handle(0, 6), handle(1, 6), handle(0, -1)]
    assert reconfigure_default_group(current, uuid=7, handles=handles) == "work"
    assert recorded_groups(current) == []
    assert make_group(current) == "new group"


def test_failures_of_a_reconfigured_group_are_reported_again(current, monkeypatch):
    """The program may have aborted the former communicator itself, which marks the group as not failed."""
    unmarked_groups = []
    monkeypatch.setattr(nccl_errors, "unmark_aborted_by_program", unmarked_groups.append)
    reconfigure_default_group(current, uuid=1, handles=[handle(rank, -1) for rank in range(4)])
    assert unmarked_groups == [dist.group.WORLD]

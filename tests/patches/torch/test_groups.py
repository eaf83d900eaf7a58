"""Tests what holmes changes when torch makes a store or a process group, without any NCCL."""

import inspect
import itertools
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.rendezvous import _create_c10d_store

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.patches import registry
from holmes_ext.patches.torch import groups as torch_distributed
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.transport import Transport


@pytest.fixture
def process(monkeypatch):
    """An active session of the launcher's rank `process.rank`."""
    current = session_of(3)
    monkeypatch.setattr(session, "_active", current)
    return current.process


def session_of(rank, world=2, plan="same"):
    return SimpleNamespace(
        process=SimpleNamespace(rank=rank, agent_store=False), node=SimpleNamespace(name="a0"), rank=rank,
        round="holmes/1",
        plan=SimpleNamespace(digest=plan, world_size=world), site=SimpleNamespace(nodes=(), digest="d"),
        options=SimpleNamespace(timeout_s=20.0, timeout="20"),
    )  # fmt: skip


# torch's functions whose arguments holmes reads and changes by name. Only their signatures matter.


def new_process_group_helper(
    group_size, group_rank, global_ranks_in_group, backend, store, group_name,
    backend_options=None, timeout=None, pg_tag=None, device_id=None, group_desc=None,
):  # fmt: skip
    """Stand in for torch's _new_process_group_helper, with its signature since torch 2.6."""


def split_group(parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None):
    """Stand in for torch.distributed.split_group, with its signature since torch 2.5."""


def recorder(calls, function, result=None):
    """Return a function with the signature of `function` that records its calls.

    Each call appends a dict to `calls`, from the names of the parameters to the arguments, whether
    they were passed by position or by name.
    """
    signature = inspect.signature(function)

    def record(*args, **kwargs):
        calls.append(dict(signature.bind(*args, **kwargs).arguments))
        return result

    record.__signature__ = signature
    return record


@pytest.mark.parametrize("launched_rank, renumbered_rank, hosts_store",
                         [(0, 3, True), (2, 0, False), (1, 1, False)])
def test_the_store_stays_where_the_launcher_put_it(process, launched_rank, renumbered_rank, hosts_store):
    """The process that the launcher started as rank 0 hosts the store, whatever its rank is now.

    MASTER_ADDR names that process's node. torch lets rank 0 host the store, so that the rank passed
    to torch tells which process does.
    """
    process.rank = launched_rank
    calls = []
    create = recorder(calls, _create_c10d_store)
    by_position = ("host", 1, renumbered_rank, 4, None)
    torch_distributed._host_store_where_launched(create, None, by_position, {})
    by_name = dict(hostname="host", port=1, rank=renumbered_rank, world_size=4, timeout=None)
    torch_distributed._host_store_where_launched(create, None, (), by_name)

    assert len(calls) == 2
    for arguments in calls:
        assert (arguments["rank"] == 0) is hosts_store
        assert arguments["hostname"] == "host"
        assert arguments["port"] == 1
        assert arguments["world_size"] == 4


def agree(store, sessions, monkeypatch):
    """agree_on_patches() of every session in a thread each, as if each were a process; what each raised."""
    monkeypatch.setattr(torch_distributed, "_default_group_numbers", itertools.repeat(0))
    outcome = {}

    def one(current):
        try:
            outcome[current.rank] = torch_distributed.agree_on_patches(store, current)
        except HolmesError as error:
            outcome[current.rank] = error

    threads = [threading.Thread(target=one, args=(current,)) for current in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def test_ranks_that_are_patched_differently_are_told(monkeypatch):
    store, states = dist.HashStore(), registry().states()
    target = sorted(states)[0]
    monkeypatch.setattr(torch_distributed, "_default_group_numbers", itertools.repeat(0))
    torch_distributed.agree_on_patches(store, session_of(0), waits=False)
    torch_distributed.agree_on_patches(store, session_of(1), waits=False)
    monkeypatch.setattr(type(registry()), "states", lambda self: {**states, target: "on 9.9"})
    with pytest.raises(HolmesError, match=f"{target}: it is 'on 9.9' on rank 3 on a0 and 'off' on rank 0 on "
                                          f"a0"):
        torch_distributed.agree_on_patches(store, session_of(3))


def test_one_rank_tells_of_another_plan_and_all_end(monkeypatch):
    assert agree(dist.HashStore(), [session_of(rank, 3) for rank in range(3)], monkeypatch) == {
        0: None,
        1: None,
        2: None,
    }
    outcome = agree(dist.HashStore(), [session_of(0, 3), session_of(1, 3, "other"), session_of(2, 3)],
                    monkeypatch)
    assert all("differ in plan's digest" in str(error) and "'other'" in str(error)
               for error in outcome.values()), (
        outcome
    )
    assert sum(not isinstance(error, RemoteError) for error in outcome.values()) == 1


def test_a_rank_that_does_not_come_to_its_group_is_named(monkeypatch):
    lonely = session_of(0, 3)
    lonely.options.timeout_s = 0.2
    outcome = agree(dist.HashStore(), [lonely], monkeypatch)
    assert "rank 1, 2 did not come to init_process_group" in str(outcome[0])


# ------------------------------------------------------------------- NCCL's options, without NCCL


class Options:
    """Stand-in for ProcessGroupNCCL.Options, with the attributes that holmes copies or changes."""

    def __init__(self):
        self.config = SimpleNamespace(net_name=None, max_ctas=0)
        self.is_high_priority_stream = False
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def on_nccl(monkeypatch):
    """Return an active session that plans every group over NCCL's network "Socket".

    torch has a stand-in for ProcessGroupNCCL, as if it were built with NCCL.
    """
    current = session_of(0)
    current.forced_nets, current.groups, current.backends, current.store = {}, [], set(), None
    current.transport = lambda ranks, backend: Transport("ethernet", "ethernet", "", "Socket")
    current.options.verbose = "off"
    current.site, current.node.ports = SimpleNamespace(fabric_by_name={}), ()
    monkeypatch.setattr(session, "_active", current)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(torch_distributed, "agree_on_patches", lambda *given, **more: None)
    return current


@pytest.mark.parametrize("by_position", [True, False])
def test_a_groups_options_have_torchs_timeout_and_the_planned_network(on_nccl, by_position):
    """The group gets a copy of the user's options, with the planned network and the timeout.

    torch passes the timeout of a group as an argument and writes it into the options itself; a copy
    that lacks it would have the default. All other arguments reach torch unchanged.
    """
    user_options = Options()
    user_options.config.max_ctas = 7
    first_arguments = (2, 0, [], "nccl", "store", "name")
    timeout = timedelta(minutes=3)
    if by_position:
        args = (*first_arguments, user_options, timeout)
        kwargs = {}
    else:
        args = first_arguments
        kwargs = {"backend_options": user_options, "timeout": timeout}

    calls = []
    helper = recorder(calls, new_process_group_helper)
    torch_distributed._give_group_its_nic(helper, None, args, kwargs)

    (arguments,) = calls
    options = arguments["backend_options"]
    assert options.config.net_name == "Socket"
    assert options.config.max_ctas == 7
    assert options._timeout == timeout
    assert options is not user_options
    assert user_options.config.net_name is None
    assert tuple(arguments.values())[:6] == first_arguments
    assert arguments["timeout"] == timeout


def test_options_by_the_name_that_torch_2_4_and_2_5_have_for_them(on_nccl):
    """torch before 2.6 calls the options `pg_options`; they are replaced in the same way."""

    def older_helper(
        group_size, group_rank, global_ranks_in_group, backend, store, group_name,
        pg_options=None, timeout=None, pg_tag=None, device_id=None, group_desc=None,
    ):  # fmt: skip
        pass

    user_options = Options()
    user_options.config.max_ctas = 7
    kwargs = dict(group_size=2, group_rank=0, global_ranks_in_group=[], backend="nccl", store="store",
                  group_name="name", pg_options=user_options, group_desc="d")
    calls = []
    torch_distributed._give_group_its_nic(recorder(calls, older_helper), None, (), kwargs)

    (arguments,) = calls
    assert arguments.keys() == kwargs.keys()
    options = arguments.pop("pg_options")
    assert options.config.net_name == "Socket"
    assert options.config.max_ctas == 7
    assert all(kwargs[name] == value for name, value in arguments.items())


def test_the_options_of_a_split_are_its_parents_but_for_the_network(on_nccl, monkeypatch):
    """A group split from another one gets a copy of its parent's options, with the planned network.

    torch copies them, too. With default options the group would lose its priority, for example.
    """
    parent_options = Options()
    parent_options.config.net_name = "IB"
    parent_options.config.max_ctas = 7
    parent_options.is_high_priority_stream = True
    parent = SimpleNamespace()
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(torch_distributed, "backend_of", lambda group: "nccl")
    monkeypatch.setattr(torch_distributed, "options_of", lambda group: parent_options)
    calls = []
    split = recorder(calls, split_group)
    torch_distributed._give_split_group_its_nic(split, None, (parent, [[0, 1]]), {})

    options = calls[0]["pg_options"]
    assert options.config.net_name == "Socket"
    assert options.config.max_ctas == 7
    assert options.is_high_priority_stream is True
    assert parent_options.config.net_name == "IB"


def test_a_network_forced_by_a_file_ends_the_job_before_the_group_is_made(on_nccl):
    """A group planned over "Socket" is an error on a node whose nccl.conf forces another network."""
    calls = []
    on_nccl.forced_nets = {"IB": "/etc/nccl.conf of node a0"}
    helper = recorder(calls, new_process_group_helper)
    with pytest.raises(HolmesError, match="NCCL_NET=IB in /etc/nccl.conf of node a0 overrides"):
        torch_distributed._give_group_its_nic(helper, None, (2, 0, [], "nccl", "store", "name"), {})
    assert not calls


@pytest.mark.parametrize("backend, expected", [
    ("gloo", ["waited", "ended"]), ("nccl", ["ended"]), ("cpu:gloo,cuda:nccl", ["waited", "ended"])])
def test_threads_of_gloo_forget_before_the_groups_end(on_nccl, monkeypatch, backend, expected):
    """Before process groups are destroyed, holmes waits a moment for the threads of gloo.

    A thread of gloo that waits for the interpreter's lock holds another lock, for which the destructor
    of its group waits: a deadlock. NCCL has no such threads, so that holmes does not wait.
    """
    events = []
    monkeypatch.setattr(torch_distributed, "let_threads_forget", lambda: events.append("waited"))
    helper = recorder([], new_process_group_helper)
    torch_distributed._give_group_its_nic(helper, None, (2, 0, [0, 1], backend, "store", "name"), {})
    torch_distributed._destroy_after_gloo_threads(lambda: events.append("ended"), None, (), {})
    assert events == expected

"""Tests what holmes changes when torch makes a store or a process group, without any NCCL."""

import inspect
import itertools
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _create_c10d_store
from torch_releases import look_like_torch

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.patches import registry
from holmes_ext.patches.torch import groups as torch_distributed
from holmes_ext.runtime import session
from holmes_ext.runtime.groups import communicators
from holmes_ext.runtime.groups.transport import Transport


@pytest.fixture
def process(monkeypatch):
    """Switch holmes on, and return its description of this process. A test may set `rank` of it."""
    current = session_of(3)
    monkeypatch.setattr(session, "_active", current)
    return current.process


def session_of(rank, world=2, plan_digest="same"):
    """Return a stand-in for the session of holmes (this process's job and its plan) on one rank."""
    return SimpleNamespace(
        process=SimpleNamespace(rank=rank, agent_store=False),
        node=SimpleNamespace(name="a0"),
        rank=rank,
        key_prefix="holmes/1",
        plan=SimpleNamespace(
            digest=plan_digest,
            world_size=world,
            sizes=None,
            by_cluster=lambda ranks: {"a": list(ranks)},  # all ranks are in cluster a
            spans_networks=lambda ranks: False,  # the fastest network reaches all ranks
        ),
        site=SimpleNamespace(nodes=(), digest="d"),
        options=SimpleNamespace(timeout_s=20.0, timeout="20"),
    )


# torch's functions whose arguments holmes reads and changes by name. Only their signatures matter.


def new_process_group_helper(
    group_size,
    group_rank,
    global_ranks_in_group,
    backend,
    store,
    group_name,
    backend_options=None,
    timeout=None,
    pg_tag=None,
    device_id=None,
    group_desc=None,
):
    """Stand in for torch's _new_process_group_helper, with its signature since torch 2.6."""


def split_group(parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None):
    """Stand in for torch.distributed.split_group, with its signature since torch 2.5."""


def recorder(calls, function, result=None):
    """Return a function with the signature of `function`, which only records its calls.

    Each call appends a dict to the list `calls`: parameter name -> argument. It does not show whether the
    argument was passed by position or by name.
    """
    signature = inspect.signature(function)

    def record(*args, **kwargs):
        calls.append(dict(signature.bind(*args, **kwargs).arguments))
        return result

    record.__signature__ = signature
    return record


@pytest.mark.parametrize(
    "launched_rank, renumbered_rank, hosts_store", [(0, 3, True), (2, 0, False), (1, 1, False)]
)
def test_the_store_stays_where_the_launcher_put_it(
    process, launched_rank, renumbered_rank, hosts_store
):
    """The process that the launcher started as rank 0 hosts the store, also if holmes renumbers the ranks.

    MASTER_ADDR is the address of this process. torch hosts the store in the process for which
    _create_c10d_store is called with rank 0.
    """
    process.rank = launched_rank
    calls = []  # of torch's function: parameter name -> argument
    create = recorder(calls, _create_c10d_store)
    # The program may pass the arguments by position or by name. A wrapper gets the wrapped function, no
    # instance, and the arguments.
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
    """Call agree_on_patches(), which compares the plans of all ranks, once for each session.

    Each call runs in a thread of its own, as if it were another process.

    Returns:
        Rank -> the error that the call raised, or None.
    """
    # Each call takes the next number for its default group. In separate processes, all would take 0.
    monkeypatch.setattr(torch_distributed, "_default_group_numbers", itertools.repeat(0))
    errors = {}

    def run(current):
        try:
            torch_distributed.agree_on_patches(store, current)
            errors[current.rank] = None
        except HolmesError as error:
            errors[current.rank] = error

    threads = [threading.Thread(target=run, args=(current,)) for current in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_ranks_that_are_patched_differently_are_told(monkeypatch):
    """A rank whose patches differ from those of rank 0 raises an error with the first difference."""
    store = dist.HashStore()
    states = registry().states()  # patch -> "off" or "on VERSION"
    first_patch = sorted(states)[0]
    # Each call takes the next number for its default group. In separate processes, all would take 0.
    monkeypatch.setattr(torch_distributed, "_default_group_numbers", itertools.repeat(0))
    # Ranks 0 and 1 have the same patches. They do not wait for the other ranks.
    torch_distributed.agree_on_patches(store, session_of(0), waits=False)
    torch_distributed.agree_on_patches(store, session_of(1), waits=False)

    # Rank 3 has another version of the first patch.
    monkeypatch.setattr(type(registry()), "states", lambda self: {**states, first_patch: "on 9.9"})
    message = f"{first_patch}: it is 'on 9.9' on rank 3 on a0 and 'off' on rank 0 on a0"
    with pytest.raises(HolmesError, match=message):
        torch_distributed.agree_on_patches(store, session_of(3))


def test_ranks_with_the_same_plan_agree(monkeypatch):
    sessions = [session_of(rank, world=3) for rank in range(3)]
    assert agree(dist.HashStore(), sessions, monkeypatch) == {0: None, 1: None, 2: None}


def test_one_rank_tells_of_another_plan_and_all_end(monkeypatch):
    """If the plan of rank 1 differs, all ranks raise an error; only one of the errors is to be printed."""
    sessions = [
        session_of(0, world=3),
        session_of(1, world=3, plan_digest="other"),
        session_of(2, world=3),
    ]
    errors = agree(dist.HashStore(), sessions, monkeypatch)
    for error in errors.values():
        assert "differ in plan's digest" in str(error)
        assert "'other'" in str(error)
    printed = [error for error in errors.values() if not isinstance(error, RemoteError)]
    assert len(printed) == 1


def test_a_rank_that_does_not_come_to_its_group_is_named(monkeypatch):
    """If only rank 0 of three ranks comes, its error names ranks 1 and 2."""
    current = session_of(0, world=3)
    current.options.timeout_s = 0.2
    errors = agree(dist.HashStore(), [current], monkeypatch)
    assert "rank 1, 2 did not come to init_process_group" in str(errors[0])


# ------------------------------------------------------------------- NCCL's options, without NCCL


class Options:
    """Stand-in for ProcessGroupNCCL.Options, with the attributes that holmes copies or changes."""

    def __init__(self):
        self.config = SimpleNamespace(net_name=None, max_ctas=0)
        self.is_high_priority_stream = False
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def on_nccl(monkeypatch):
    """Switch holmes on, with a plan that assigns NCCL's network "Socket" to every process group.

    torch gets a stand-in for ProcessGroupNCCL, as if it were built with NCCL. Returns the session of holmes.
    """
    current = session_of(0)  # of rank 0
    # What holmes's wrappers of torch's functions for process groups read.
    current.forced_nets = {}  # network -> file of NCCL that forces it
    current.groups = []
    current.backends = set()
    current.store = None
    current.transport = lambda ranks, backend: Transport(
        fabric="ethernet", kind="ethernet", interface="", net_name="Socket"
    )
    current.options.verbose = "off"
    current.site = SimpleNamespace(fabric_by_name={})
    current.node.ports = ()
    monkeypatch.setattr(session, "_active", current)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    # There are no other ranks that could compare their plans with this one's.
    monkeypatch.setattr(torch_distributed, "agree_on_patches", lambda *args, **kwargs: None)
    return current


@pytest.mark.parametrize("by_position", [True, False])
def test_a_groups_options_have_torchs_timeout_and_the_planned_network(on_nccl, by_position):
    """A new group gets a copy of the user's NCCL options, with the planned network and the group's timeout.

    Without the timeout, which torch passes separately, the copy would have the default one. All other
    arguments reach torch's function unchanged.
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

    calls = []  # of torch's function: parameter name -> argument
    helper = recorder(calls, new_process_group_helper)
    # A wrapper gets the wrapped function, no instance, and the positional and keyword arguments.
    torch_distributed._give_group_its_nic(helper, None, args, kwargs)

    (arguments,) = calls  # one call
    options = arguments["backend_options"]
    assert options.config.net_name == "Socket"  # planned
    assert options.config.max_ctas == 7  # the user's
    assert options._timeout == timeout
    assert options is not user_options
    assert user_options.config.net_name is None  # the user's own object is not changed
    assert tuple(arguments.values())[:6] == first_arguments  # unchanged
    assert arguments["timeout"] == timeout


def test_options_by_the_name_that_torch_2_4_and_2_5_have_for_them(on_nccl):
    """The NCCL options get the planned network also in torch before 2.6, which calls them `pg_options`."""

    def older_helper(
        group_size,
        group_rank,
        global_ranks_in_group,
        backend,
        store,
        group_name,
        pg_options=None,
        timeout=None,
        pg_tag=None,
        device_id=None,
        group_desc=None,
    ):
        pass

    user_options = Options()
    user_options.config.max_ctas = 7
    kwargs = dict(
        group_size=2,
        group_rank=0,
        global_ranks_in_group=[],
        backend="nccl",
        store="store",
        group_name="name",
        pg_options=user_options,
        group_desc="d",
    )
    calls = []  # of torch's function: parameter name -> argument
    helper = recorder(calls, older_helper)
    # A wrapper gets the wrapped function, no instance, and the positional and keyword arguments.
    torch_distributed._give_group_its_nic(helper, None, (), kwargs)

    (arguments,) = calls  # one call
    assert arguments.keys() == kwargs.keys()
    options = arguments.pop("pg_options")
    assert options.config.net_name == "Socket"  # planned
    assert options.config.max_ctas == 7  # the user's
    # All other arguments are unchanged.
    assert all(kwargs[name] == value for name, value in arguments.items())


def test_the_options_of_a_split_are_its_parents_but_for_the_network(on_nccl, monkeypatch):
    """A group split from a parent group gets a copy of the parent's options, with the planned network.

    torch without holmes copies the parent's options, too, e.g. the priority of the stream.
    """
    parent_options = Options()
    parent_options.config.net_name = "IB"
    parent_options.config.max_ctas = 7
    parent_options.is_high_priority_stream = True
    parent = SimpleNamespace()  # stands in for a process group with these options
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(torch_distributed, "backend_of", lambda group: "nccl")
    monkeypatch.setattr(torch_distributed, "options_of", lambda group: parent_options)
    calls = []  # of torch's function: parameter name -> argument
    split = recorder(calls, split_group)
    # A wrapper gets the wrapped function, no instance, and the positional and keyword arguments.
    torch_distributed._give_split_group_its_nic(split, None, (parent, [[0, 1]]), {})

    options = calls[0]["pg_options"]
    assert options.config.net_name == "Socket"  # planned
    assert options.config.max_ctas == 7  # the parent's
    assert options.is_high_priority_stream is True  # the parent's
    assert parent_options.config.net_name == "IB"  # the parent's own options are not changed


def test_a_network_forced_by_a_file_ends_the_job_before_the_group_is_made(on_nccl):
    """If nccl.conf of a node forces another network than the planned one, an error is raised.

    The plan assigns the network "Socket" to the group; the file forces "IB".
    """
    calls = []
    on_nccl.forced_nets = {"IB": "/etc/nccl.conf of node a0"}
    helper = recorder(calls, new_process_group_helper)
    with pytest.raises(HolmesError, match="NCCL_NET=IB in /etc/nccl.conf of node a0 overrides"):
        torch_distributed._give_group_its_nic(helper, None, (2, 0, [], "nccl", "store", "name"), {})
    assert not calls


@pytest.mark.parametrize(
    "backend, expected",
    [
        ("gloo", ["waited", "ended"]),
        ("nccl", ["ended"]),
        ("cpu:gloo,cuda:nccl", ["waited", "ended"]),
    ],
)
def test_threads_of_gloo_forget_before_the_groups_end(on_nccl, monkeypatch, backend, expected):
    """Before process groups are destroyed, holmes waits a moment for the threads of gloo.

    Without the wait, a deadlock is possible: a thread holds a lock of its group and waits for the GIL, while
    the group's destructor holds the GIL and waits for the lock. NCCL has no such threads.
    """
    events = []

    def destroy_groups():
        events.append("ended")

    # let_threads_free_tensors() is the function that waits.
    monkeypatch.setattr(
        torch_distributed, "let_threads_free_tensors", lambda: events.append("waited")
    )
    # Wrappers get the wrapped function, no instance, and the positional and keyword arguments.
    make_group = recorder([], new_process_group_helper)  # a stand-in that makes no group
    torch_distributed._give_group_its_nic(
        make_group, None, (2, 0, [0, 1], backend, "store", "name"), {}
    )
    torch_distributed._destroy_after_gloo_threads(destroy_groups, None, (), {})
    assert events == expected


# ------------------------------------------------------------------- names of backends


class OptionsOf215(Options):
    """Stand-in for ProcessGroupNCCL.Options of torch 2.15."""

    def __init__(self):
        super().__init__()
        self.config.comm_name = None
        self.lazy_init = False


@pytest.fixture
def torch_2_15(on_nccl, monkeypatch):
    """Let torch look like torch 2.15, with the backends nccl2, nccl-lazy and nccl-legacy."""
    capability = distributed_c10d.Backend.backend_capability
    for name in ("nccl2", "nccl-lazy", "nccl-legacy", "mooncake", "ucc"):
        monkeypatch.setitem(capability, name, ["cuda"])
    look_like_torch(monkeypatch, "2.15")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=OptionsOf215))
    return on_nccl


def options_of_new_group(backend, ranks=(0, 1), options=None):
    """Make a group, and return the options with which holmes calls torch's _new_process_group_helper."""
    calls = []
    helper = recorder(calls, new_process_group_helper)
    args = (2, 0, list(ranks), backend, "store", "name", options)
    torch_distributed._give_group_its_nic(helper, None, args, {})
    (arguments,) = calls
    return arguments["backend_options"]


@pytest.mark.parametrize(
    "backend", ["nccl", "nccl2", "nccl-lazy", "nccl-legacy", "cpu:gloo,cuda:nccl2"]
)
def test_each_name_of_nccl_gets_the_planned_network(torch_2_15, backend):
    options = options_of_new_group(backend)
    assert options.config.net_name == "Socket"  # planned
    assert options.config.comm_name == "world:a:rank0"  # kind of group, cluster, first rank
    assert not options.lazy_init


@pytest.mark.parametrize("ranks", [(0, 1), (1, 2)], ids=["member", "no member"])
def test_members_and_other_ranks_agree_that_a_communicator_is_postponed(torch_2_15, ranks):
    """All ranks must read lazy_init: without it, torch splits the communicator of all ranks together."""
    program_options = OptionsOf215()
    with communicators.postponed():
        options = options_of_new_group("nccl", ranks, program_options)
    assert options.lazy_init
    assert not program_options.lazy_init  # the program may use them for other groups


def test_an_unknown_backend_gets_no_network_and_a_warning(torch_2_15, capsys):
    torch_2_15.transport = lambda ranks, backend: Transport(f"chosen by {backend}", "", "", "")
    assert options_of_new_group("mooncake") is None
    options_of_new_group("mooncake")
    warnings = capsys.readouterr().err
    assert warnings.count("backend 'mooncake' is not known to holmes") == 1


def test_a_backend_with_one_network_for_all_groups_is_refused_if_the_plan_has_several(torch_2_15):
    torch_2_15.transport = lambda ranks, backend: Transport(f"chosen by {backend}", "", "", "")
    options_of_new_group("ucc")  # the plan has one network
    torch_2_15.plan.spans_networks = lambda ranks: True
    with pytest.raises(HolmesError, match="backend 'ucc' uses one network for all groups"):
        options_of_new_group("ucc")

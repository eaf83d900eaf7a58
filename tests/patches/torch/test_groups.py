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


def new_process_group_helper(
    group_size, group_rank, global_ranks_in_group, backend, store, group_name,
    backend_options=None, timeout=None, pg_tag=None, device_id=None, group_desc=None,
):  # fmt: skip
    """The signature of torch 2.6 and newer."""


def split_group(parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None):
    """The signature of torch 2.5 and newer."""


def recording(got, function, result=None):
    """Return a function like torch's, which adds the arguments of its calls to `got`, by name."""
    signature = inspect.signature(function)

    def target(*args, **kwargs):
        got.append(dict(signature.bind(*args, **kwargs).arguments))
        return result

    target.__signature__ = signature
    return target


@pytest.mark.parametrize("launched, asked, hosting", [(0, 3, True), (2, 0, False), (1, 1, False)])
def test_the_store_stays_where_the_launcher_put_it(process, launched, asked, hosting):
    process.rank = launched
    got = []
    create = recording(got, _create_c10d_store)
    torch_distributed._host_store_where_launched(create, None, ("host", 1, asked, 4, None), {})
    named = dict(hostname="host", port=1, rank=asked, world_size=4, timeout=None)
    torch_distributed._host_store_where_launched(create, None, (), named)
    assert [(given["rank"] == 0) for given in got] == [hosting, hosting]
    assert all((given["hostname"], given["port"], given["world_size"]) == ("host", 1, 4) for given in got)


def agree(store, sessions, monkeypatch):
    """agree_on_patches() of every session in a thread each, as if each were a process; what each raised."""
    monkeypatch.setattr(torch_distributed, "_agreed", itertools.repeat(0))
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
    monkeypatch.setattr(torch_distributed, "_agreed", itertools.repeat(0))
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
    """The shape of ProcessGroupNCCL.Options."""

    def __init__(self):
        self.config, self.is_high_priority_stream = SimpleNamespace(net_name=None, max_ctas=0), False
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def on_nccl(monkeypatch):
    """An active session whose groups are all planned over "Socket", and torch as if it were built with
    NCCL."""
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
    got, given = [], Options()
    given.config.max_ctas = 7
    head, three = (2, 0, [], "nccl", "store", "name"), timedelta(minutes=3)
    args, more = head, dict(backend_options=given, timeout=three)
    if by_position:
        args, more = (*head, given, three), {}
    helper = recording(got, new_process_group_helper)
    torch_distributed._give_group_its_nic(helper, None, args, more)
    (arguments,) = got
    made = arguments["backend_options"]
    assert (made.config.net_name, made.config.max_ctas, made._timeout) == ("Socket", 7, three)
    assert made is not given and given.config.net_name is None
    assert tuple(arguments.values())[:6] == head and arguments["timeout"] == three


def test_options_by_the_name_that_torch_2_4_and_2_5_have_for_them(on_nccl):
    def older_helper(
        group_size, group_rank, global_ranks_in_group, backend, store, group_name,
        pg_options=None, timeout=None, pg_tag=None, device_id=None, group_desc=None,
    ):  # fmt: skip
        pass

    got, given = [], Options()
    given.config.max_ctas = 7
    named = dict(group_size=2, group_rank=0, global_ranks_in_group=[], backend="nccl", store="store",
                 group_name="name", pg_options=given, group_desc="d")
    torch_distributed._give_group_its_nic(recording(got, older_helper), None, (), named)
    (arguments,) = got
    assert arguments.keys() == named.keys()
    made = arguments.pop("pg_options")
    assert all(named[name] == value for name, value in arguments.items())
    assert (made.config.net_name, made.config.max_ctas) == ("Socket", 7)


def test_the_options_of_a_split_are_its_parents_but_for_the_network(on_nccl, monkeypatch):
    """Stock copies the parent's: fresh defaults would lose priority, CTAs and the rest."""
    own = Options()
    own.config.net_name, own.config.max_ctas, own.is_high_priority_stream = "IB", 7, True
    parent = SimpleNamespace()
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(torch_distributed, "backend_of", lambda group: "nccl")
    monkeypatch.setattr(torch_distributed, "options_of", lambda group: own)
    got = []
    split = recording(got, split_group)
    torch_distributed._give_split_group_its_nic(split, None, (parent, [[0, 1]]), {})
    made = got[0]["pg_options"]
    assert (made.config.net_name, made.config.max_ctas, made.is_high_priority_stream) == ("Socket", 7, True)
    assert own.config.net_name == "IB"


def test_a_network_forced_by_a_file_ends_the_job_before_the_group_is_made(on_nccl):
    got = []
    on_nccl.forced_nets = {"IB": "/etc/nccl.conf of node a0"}
    with pytest.raises(HolmesError, match="NCCL_NET=IB in /etc/nccl.conf of node a0 overrides"):
        helper = recording(got, new_process_group_helper)
        torch_distributed._give_group_its_nic(helper, None, (2, 0, [], "nccl", "store", "name"), {})
    assert not got


@pytest.mark.parametrize("backend, expected", [
    ("gloo", ["waited", "ended"]), ("nccl", ["ended"]), ("cpu:gloo,cuda:nccl", ["waited", "ended"])])
def test_threads_of_gloo_forget_before_the_groups_end(on_nccl, monkeypatch, backend, expected):
    """One that waits for Python meanwhile holds the lock that the end of a group waits for."""
    seen = []
    monkeypatch.setattr(torch_distributed, "let_threads_forget", lambda: seen.append("waited"))
    helper = recording([], new_process_group_helper)
    torch_distributed._give_group_its_nic(helper, None, (2, 0, [0, 1], backend, "store", "name"), {})
    torch_distributed._let_threads_forget(lambda: seen.append("ended"), None, (), {})
    assert seen == expected

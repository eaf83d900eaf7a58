import itertools
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.patches import registry
from holmes_ext.patches.torch import groups as torch_distributed
from holmes_ext.runtime import session


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


@pytest.mark.parametrize("launched, asked, hosting", [(0, 3, True), (2, 0, False), (1, 1, False)])
def test_the_store_stays_where_the_launcher_put_it(process, launched, asked, hosting):
    process.rank = launched
    got = []
    torch_distributed._host_store_where_launched(
        lambda *a, **k: got.append((a, k)), None, ("host", 1, asked, 4, None), {}
    )
    ((arguments, _),) = got
    assert (arguments[2] == 0) is hosting and arguments[:2] == ("host", 1)
    torch_distributed._host_store_where_launched(
        lambda *a, **k: got.append((a, k)), None, (), dict(hostname="host", port=1, rank=asked, world_size=4)
    )
    assert (got[1][0][2] == 0) is hosting


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
    with pytest.raises(HolmesError, match=f"{target}: it is 'on 9.9' on rank 3 on a0 and 'off' on rank 0 on a0"):
        torch_distributed.agree_on_patches(store, session_of(3))


def test_one_rank_tells_of_another_plan_and_all_end(monkeypatch):
    assert agree(dist.HashStore(), [session_of(rank, 3) for rank in range(3)], monkeypatch) == {
        0: None,
        1: None,
        2: None,
    }
    outcome = agree(dist.HashStore(), [session_of(0, 3), session_of(1, 3, "other"), session_of(2, 3)], monkeypatch)
    assert all("differ in plan's digest" in str(error) and "'other'" in str(error) for error in outcome.values()), (
        outcome
    )
    assert sum(not isinstance(error, RemoteError) for error in outcome.values()) == 1


def test_a_rank_that_does_not_come_to_its_group_is_named(monkeypatch):
    lonely = session_of(0, 3)
    lonely.options.timeout_s = 0.2
    outcome = agree(dist.HashStore(), [lonely], monkeypatch)
    assert "rank 1, 2 did not come to init_process_group" in str(outcome[0])

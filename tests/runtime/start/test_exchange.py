import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.runtime.start.exchange import exchange
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.start.store import open_store


def reports(world=4, per_node=2):
    made = []
    for rank in range(world):
        name = f"n{rank // per_node}"
        node = {"name": name, "identity": "x", "ethernet": "eth0", "nics": []}
        report = {"node": name, "identity": "x", "local_rank": rank % per_node, "agreed": {"plan": "p"}}
        made.append({**report, "nics_of_node": node} if rank % per_node == 0 else report)
    return made


def run(made, decide=lambda reports, nodes: {"nodes": [[n.name, n.processes] for n in nodes]}, timeout=5.0, absent=()):
    """exchange() of every rank in a thread each; what each returned or raised."""
    store = dist.HashStore()
    base = Process(0, len(made), 0, 0, "host", 1, "test")
    outcome = {}

    def one(rank):
        try:
            outcome[rank] = exchange(store, replace(base, rank=rank), made[rank], decide, timeout)
        except HolmesError as error:
            outcome[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(made)) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def test_every_rank_gets_the_same_verdict():
    outcome = run(reports())
    assert [(one.round, one.content()) for one in outcome.values()] == [
        ("holmes/1", {"nodes": [["n0", 2], ["n1", 2]]})] * 4


def assert_all_end_with(outcome, *parts):
    assert not isinstance(outcome[0], RemoteError)
    for rank, error in outcome.items():
        assert isinstance(error, HolmesError if rank == 0 else RemoteError)
        assert all(part in str(error) for part in parts), str(error)


def test_a_rank_that_was_given_something_else_is_named_with_both_values():
    made = reports()
    made[3]["agreed"] = {"plan": "q"}
    assert_all_end_with(run(made), "disagree on plan", "rank 0 on n0 has 'p'", "rank 3 on n1 has 'q'")


def test_an_error_of_one_rank_ends_all():
    made = reports()
    made[2] = {"node": "n1", "error": "c.toml: cannot be read"}
    assert_all_end_with(run(made), "rank 2 on n1: c.toml: cannot be read")


def test_an_error_of_the_decision_ends_all():
    def decide(reports, nodes):
        raise HolmesError("no")

    assert_all_end_with(run(reports(), decide), "no")


def test_local_ranks_with_a_gap():
    made = reports()
    made[1]["local_rank"] = 2
    assert_all_end_with(run(made), "node 'n0'", "[0, 2]")


def test_a_rank_that_never_comes_is_named():
    outcome = run(reports(), timeout=0.5, absent={1, 3})
    assert_all_end_with(outcome, "2 of 4 ranks did not report within 0.5 s: rank 1, 3")


def test_nobody_hosts_the_store():
    process = Process(1, 2, 0, 0, "127.0.0.1", 9, "test")
    with pytest.raises(HolmesError, match="rank 1 on .* cannot reach the job's store at 127.0.0.1:9 within 0.3 s"):
        open_store(process, 0.3)


def test_a_job_that_starts_again_does_not_take_the_last_verdict(monkeypatch):
    """torchrun's agents keep the store: what the last start left there must not be believed, whoever comes first."""
    store, base, outcome, made = dist.HashStore(), Process(0, 2, 0, 0, "host", 1, "test"), {}, reports(2)

    def one(rank, start):
        outcome[rank] = exchange(
            store, replace(base, rank=rank), made[rank], lambda reports, nodes: {"start": start}, 30.0
        )

    for start in (1, 2):
        threads = [threading.Thread(target=one, args=(rank, start)) for rank in (1, 0)]
        threads[0].start()
        time.sleep(0.2)  # the second time it finds a verdict: the first start's
        threads[1].start()
        for thread in threads:
            thread.join()
        assert {rank: (one.round, one.content()) for rank, one in outcome.items()} == {
            rank: (f"holmes/{start}", {"start": start}) for rank in (0, 1)}


def test_a_rank_that_was_given_up_learns_it(monkeypatch):
    monkeypatch.setattr("holmes_ext.runtime.start.exchange._LEFTOVER_SECONDS", 0.1)
    made, store = reports(2), dist.HashStore()
    base = Process(0, 2, 0, 0, "host", 1, "test")
    with pytest.raises(HolmesError, match="rank 1"):
        exchange(store, base, made[0], lambda *_: {}, 0.1)
    with pytest.raises(RemoteError, match="1 of 2 ranks did not report within 0.1 s: rank 1"):
        exchange(store, replace(base, rank=1), made[1], lambda *_: {}, 30.0)


def test_a_rank_that_waits_in_a_round_without_rank_0_goes_on_to_the_next():
    """Rank 0 counted its start and died; the ranks that reported to it must not wait for its verdict."""
    store, base, outcome, made = dist.HashStore(), Process(0, 2, 0, 0, "host", 1, "test"), {}, reports(2)
    store.add("holmes/round", 1)

    def one(rank):
        outcome[rank] = exchange(store, replace(base, rank=rank), made[rank], lambda *_: {"start": 2}, 30.0)

    waiting = threading.Thread(target=one, args=(1,))
    waiting.start()
    store.wait(["holmes/1/report/1"])
    one(0)
    waiting.join()
    assert {rank: (one.round, one.content()) for rank, one in outcome.items()} == dict.fromkeys(
        (0, 1), ("holmes/2", {"start": 2}))

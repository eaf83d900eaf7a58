import threading
import time
import uuid
from collections import Counter
from dataclasses import replace

import pytest
import torch.distributed as dist
from stores import Client

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.runtime.start.exchange import exchange
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.start.store import open_store


def reports(world=4, per_node=2):
    made = []
    for rank in range(world):
        name = f"n{rank // per_node}"
        node = {"name": name, "identity": "x", "ethernet": "eth0", "nics": []}
        report = {
            "node": name,
            "identity": "x",
            "local_rank": rank % per_node,
            "agreed": {"plan": "p"},
        }
        made.append({**report, "nics_of_node": node} if rank % per_node == 0 else report)
    return made


def names(reports, nodes):
    return {"nodes": [[node.name, node.processes] for node in nodes]}


def run(made, decide=names, timeout=5.0, absent=(), per_node=2, store=None):
    """Run exchange() of every rank in a thread each, and return the results or errors.

    per_node 0: the number is unknown, as under srun.
    """
    store = store or dist.HashStore()
    base = Process(0, len(made), 0, per_node, f"host of {uuid.uuid4()}", 1, "test")
    outcome = {}

    def one(rank):
        process = replace(base, rank=rank, local_rank=made[rank].get("local_rank", rank % 2))
        try:
            outcome[rank] = exchange(Client(store), process, made[rank], decide, timeout)
        except HolmesError as error:
            outcome[rank] = error

    threads = [
        threading.Thread(target=one, args=(rank,))
        for rank in range(len(made))
        if rank not in absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


@pytest.mark.parametrize("per_node", [0, 2])
def test_every_rank_gets_the_same_verdict(per_node):
    outcome = run(reports(), per_node=per_node)
    assert [(one.key_prefix, one.content()) for one in outcome.values()] == [
        ("holmes/1", {"nodes": [["n0", 2], ["n1", 2]]})
    ] * 4


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self):
        self.inner, self.asked = dist.HashStore(), Counter()

    def __getattr__(self, name):
        self.asked[name] += 1
        return getattr(self.inner, name)


def test_one_rank_of_a_node_speaks_for_it():
    alone, together = Counting(), Counting()
    run(reports(8, 1), per_node=1, store=alone)
    assert len(run(reports(64, 8), per_node=8, store=together)) == 64
    assert together.asked == alone.asked


def test_a_rank_whose_neighbour_does_not_come_speaks_for_itself():
    """Local rank 0 of n1 was started without holmes."""
    outcome = run(reports(), timeout=1.0, absent={2})
    assert_all_end_with(outcome, "1 of 4 ranks did not report within 1 s: rank 2")


def test_two_processes_with_the_same_rank_are_named():
    made, store, outcome = reports(), dist.HashStore(), []
    base = Process(0, 4, 0, 0, "host", 1, "test")

    def one(rank, report):
        try:
            exchange(Client(store), replace(base, rank=rank), report, names, 5.0)
        except HolmesError as error:
            outcome.append(str(error))

    threads = [threading.Thread(target=one, args=(rank, made[rank])) for rank in (1, 2)]
    threads += [
        threading.Thread(target=one, args=(2, made[3])),
        threading.Thread(target=one, args=(0, made[0])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcome) == 4
    assert all("rank 2 reported twice, on n1 and n1" in error for error in outcome), outcome


def assert_all_end_with(outcome, *parts):
    assert not isinstance(outcome[0], RemoteError)
    for rank, error in outcome.items():
        assert isinstance(error, HolmesError if rank == 0 else RemoteError)
        assert all(part in str(error) for part in parts), str(error)


def test_a_rank_that_was_given_something_else_is_named_with_both_values():
    made = reports()
    made[3]["agreed"] = {"plan": "q"}
    assert_all_end_with(
        run(made), "disagree on plan", "rank 0 on n0 has 'p'", "rank 3 on n1 has 'q'"
    )


def test_an_error_of_one_rank_ends_all():
    made = reports()
    made[2] = {"node": "n1", "identity": "x", "local_rank": 0, "error": "c.toml: cannot be read"}
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
    with pytest.raises(
        HolmesError, match="rank 1 on .* cannot reach the job's store at 127.0.0.1:9 within 0.3 s"
    ):
        open_store(process, 0.3)


def test_a_job_that_starts_again_does_not_take_the_last_verdict(monkeypatch):
    """A job that starts again must not believe what its last start left in the store.

    The agents of torchrun keep the store. Any rank may come first.
    """
    store, base, outcome, made = (
        dist.HashStore(),
        Process(0, 2, 0, 0, "host", 1, "test"),
        {},
        reports(2),
    )

    def one(rank, start):
        outcome[rank] = exchange(
            Client(store),
            replace(base, rank=rank),
            made[rank],
            lambda reports, nodes: {"start": start},
            30.0,
        )

    for start in (1, 2):
        threads = [threading.Thread(target=one, args=(rank, start)) for rank in (1, 0)]
        threads[0].start()
        time.sleep(0.2)  # the second time it finds a verdict: the first start's
        threads[1].start()
        for thread in threads:
            thread.join()
        assert {rank: (one.key_prefix, one.content()) for rank, one in outcome.items()} == {
            rank: (f"holmes/{start}", {"start": start}) for rank in (0, 1)
        }


def test_a_rank_that_was_given_up_learns_it(monkeypatch):
    monkeypatch.setattr("holmes_ext.runtime.start.exchange._LEFTOVER_SECONDS", 0.1)
    made, store = reports(2), dist.HashStore()
    base = Process(0, 2, 0, 0, "host", 1, "test")
    with pytest.raises(HolmesError, match="rank 1"):
        exchange(Client(store), base, made[0], lambda *_: {}, 0.1)
    with pytest.raises(RemoteError, match="1 of 2 ranks did not report within 0.1 s: rank 1"):
        exchange(Client(store), replace(base, rank=1), made[1], lambda *_: {}, 30.0)


def test_a_rank_that_waits_in_a_round_without_rank_0_goes_on_to_the_next():
    """Rank 0 counted its start and died; the ranks that reported to it must not wait for its verdict."""
    store, base, outcome, made = (
        dist.HashStore(),
        Process(0, 2, 0, 0, "host", 1, "test"),
        {},
        reports(2),
    )
    store.add("holmes/round", 1)

    def one(rank):
        outcome[rank] = exchange(
            Client(store), replace(base, rank=rank), made[rank], lambda *_: {"start": 2}, 30.0
        )

    waiting = threading.Thread(target=one, args=(1,))
    waiting.start()
    while not store.check(["holmes/1/reports/count"]):  # a HashStore wakes nobody for what is added
        pass
    one(0)
    waiting.join()
    assert {
        rank: (one.key_prefix, one.content()) for rank, one in outcome.items()
    } == dict.fromkeys((0, 1), ("holmes/2", {"start": 2}))

import random
import threading
import time
from contextlib import suppress

import pytest
import torch.distributed as dist
from stores import Client

from holmes_ext.adapt.vote import ADOPT_CHANGE, KEEP_PLAN, StepBoundary, Stopped, Vote


class Rank:
    """One rank, which votes in a thread and takes its steps in step().

    faults: what goes wrong, in which round.
    """

    def __init__(self, store, rank, world, faults=(), patience_s=0.3):
        self.rank, self.faults, self.stopped = rank, dict(faults), threading.Event()
        own = Client(store)
        self.vote = Vote(own, "job/adapt", rank, world, self.stopped, patience_s)
        self.boundary = StepBoundary(lambda number: self.vote.set_verdict(store, number, KEEP_PLAN))
        self.plan, self.plans, self.verdicts = 0, [], []
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def step(self):
        change = self.boundary.begin()
        self.plan = self.plan if change is None else change
        self.plans.append(self.plan)

    def serve(self):
        with suppress(Stopped):
            for number in range(1000):
                fault = self.faults.get(number, "")
                if fault == "dies":
                    return
                if fault == "late":
                    self.stopped.wait(0.1)
                proposal, verdict = self.vote.run_ballot(
                    number, {"rank": self.rank}, self.propose, self.agree
                )
                if verdict:
                    self.boundary.settle(number, verdict)
                    self.verdicts.append(verdict)
                while self.boundary.step < proposal["next"] and not self.stopped.wait(0.002):
                    pass

    def propose(self, told):
        step = self.boundary.step
        whole = sorted(one["rank"] for one in told) == list(range(self.vote.world))
        at = step + random.randint(1, 6) if whole else 0
        return {"at": at, "next": (at or step) + 1, "change": step + 1000}

    def agree(self, number, proposal):
        fault = self.faults.get(number, "")
        if fault == "dies in the vote":
            raise Stopped
        if fault == "late in the vote":
            self.stopped.wait(random.uniform(0, 0.1))
        yes = fault != "no memory" and self.boundary.agree(
            number, proposal["at"], proposal["change"]
        )
        if fault == "dies bound":
            raise Stopped
        return yes


def train(ranks, steps, step_s=0.004):
    """All ranks, one of them a step ahead now and then; the time is the scheduler's, the outcome is not."""
    for _ in range(steps):
        for one in random.sample(ranks, len(ranks)):
            one.step()
        time.sleep(step_s)


def end(ranks):
    for one in ranks:
        one.stopped.set()
    for one in ranks:
        one.thread.join(5)
        assert not one.thread.is_alive()


def until(ranks, condition, steps=2000):
    for _ in range(steps):
        if condition():
            return
        train(ranks, 1)
    raise AssertionError("nothing came of it")


def test_all_ranks_take_a_change_at_the_same_step():
    store = dist.HashStore()
    ranks = [Rank(store, rank, 8, patience_s=20) for rank in range(8)]
    until(ranks, lambda: len(set(ranks[0].plans)) > 3)
    end(ranks)
    assert all(one.plans == ranks[0].plans for one in ranks)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_a_rank_does_no_two_plans_are_at_work_and_nobody_waits(seed):
    random.seed(seed)
    store, world, kinds = (
        dist.HashStore(),
        5,
        ("dies", "late", "dies in the vote", "late in the vote", "no memory", "dies bound"),
    )
    faults = {
        rank: {random.randrange(3): random.choice(kinds)} for rank in random.sample(range(world), 2)
    }
    ranks = [Rank(store, rank, world, faults.get(rank, {}), 0.1) for rank in range(world)]
    train(ranks, 60)
    end(ranks)
    assert all(one.plans == ranks[0].plans for one in ranks), faults


def test_a_rank_without_room_keeps_the_old_plan_for_all():
    store = dist.HashStore()
    ranks = [Rank(store, rank, 3, {0: "no memory"} if rank == 2 else {}, 20) for rank in range(3)]
    until(ranks, lambda: all(one.verdicts for one in ranks))
    first = [one.verdicts[0] for one in ranks]
    end(ranks)
    assert first == [KEEP_PLAN] * 3


def test_who_comes_to_the_step_first_decides_for_all():
    store = dist.HashStore()
    votes = [Vote(Client(store), "p", rank, 2, threading.Event()) for rank in range(2)]
    one, two = (
        StepBoundary(lambda number, vote=vote: vote.set_verdict(store, number, KEEP_PLAN))
        for vote in votes
    )
    assert one.agree(0, 2, "new") and two.agree(0, 2, "new")
    assert one.begin() is None and two.begin() is None
    assert one.begin() is None  # no verdict yet: it keeps the old plan, and so do the others
    assert votes[0].set_verdict(store, 0, ADOPT_CHANGE) == KEEP_PLAN
    assert two.begin() is None
    assert not two.agree(1, 2, "new")  # too late for that step


def test_the_store_does_not_fill():
    store, counts = dist.HashStore(), []
    (rank,) = ranks = [Rank(store, 0, 1)]
    for _ in range(3):
        train(ranks, 150)
        counts.append((len(rank.verdicts), store.num_keys()))
    end(ranks)
    assert counts[-1][0] > 3 and counts[-1][1] <= 2 * 65 + 16, counts

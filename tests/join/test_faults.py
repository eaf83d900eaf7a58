"""What becomes of the other jobs when a job is late, dies, is cut off or comes back.

The same for a restart of the coordinator.
"""

import threading
import time

import pytest
import torch
from joined_jobs import coordinator, in_threads, joined_of

from holmes_ext.errors import HolmesError
from holmes_ext.join.rounds import round_runner as rounds
from holmes_ext.join.rounds import taking
from holmes_ext.join.settings import parse_outer

SETTINGS = "every=2,fragments=1,delay=0,compress=off"


class Job:
    """A job of one rank, stepped by hand. Each step takes `speed` off its weights."""

    def __init__(self, name, port, text=SETTINGS, speed=1.0, state=None):
        self.model, self.records, self.speed = torch.nn.ParameterList([torch.zeros(600)]), [], speed
        self.joined = joined_of(
            self.model, name, port, parse_outer(f"timeout=3,{text}"), self.records
        )
        if state is not None:
            with torch.no_grad():
                self.model[0].copy_(state["weights"])
            self.joined.load_state_dict(state["outer"])
        self.begun = self.joined.begin()

    def step(self, count=2):
        for _ in range(count):
            with torch.no_grad():
                self.model[0] -= self.speed
            self.joined.after_step()
        return self

    def state(self):
        return {"weights": self.model[0].detach().clone(), "outer": self.joined.state_dict()}

    def kill(self):
        """As if the process were gone: every connection is closed, nobody says goodbye."""
        self.joined.rounds.links.close()
        self.joined.rounds.coordinator.client.close("")
        self.joined.rounds._inbox.put(None)

    @property
    def verdicts(self):
        return [record.outcome.verdict for record in self.records]

    @property
    def members(self):
        return [sorted(record.outcome.members) for record in self.records]


def both(east, west, count=2):
    in_threads({"east": lambda: east.step(count), "west": lambda: west.step(count)})


def test_a_killed_job_costs_one_timeout_at_most_and_comes_back_with_the_weights_of_the_other():
    with coordinator() as server:
        east, west = Job("east", server.port), Job("west", server.port, speed=3)
        both(east, west)
        west.kill()
        begin = time.monotonic()
        east.step(4)
        assert time.monotonic() - begin < 30
        assert east.members == [["east", "west"], ["east"], ["east"]]
        back = Job("west", server.port, speed=3)
        assert "of job east" in back.begun and torch.equal(back.model[0], east.model[0])
        both(east, back)
        assert east.members[-1] == back.members[-1] == ["east", "west"] and torch.equal(
            back.model[0], east.model[0]
        )
        for one in (east, back):
            one.joined.end()


def test_a_job_that_begins_does_not_end_with_a_giver_that_does_not_answer(monkeypatch):
    """It asks again: by then the giver is known to be gone, or answers."""
    monkeypatch.setattr(rounds, "_AGAIN_S", 0.01)
    taken, silent = taking.take_fragments, ["timed out"] * 2
    monkeypatch.setattr(
        taking, "take_fragments", lambda *args: silent.pop() if silent else taken(*args)
    )
    with coordinator() as server:
        east = Job("east", server.port).step(4)
        west = Job("west", server.port, speed=3)
        assert (
            not silent and "of job east" in west.begun and torch.equal(west.model[0], east.model[0])
        )
        both(east, west)
        assert east.members[-1] == west.members[-1] == ["east", "west"]
        silent += ["timed out"] * 99
        with pytest.raises(
            HolmesError, match="north cannot join: the weights of job east could not be taken: time"
        ):
            Job("north", server.port)
        for one in (east, west):
            one.joined.end()


def test_a_job_that_is_late_is_left_behind_and_takes_the_weights_when_it_comes():
    with coordinator() as server:
        east, west = Job("east", server.port), Job("west", server.port)
        both(east, west)
        east.step(4)  # west sleeps: the round goes on after its timeout
        assert east.members[1:] == [["east"], ["east"]]
        assert any("west" in line and "late" in line for line in server.told)
        west.step(2)
        assert west.verdicts[-1] == "taken" and torch.equal(west.model[0], east.model[0])
        both(east, west)
        assert east.members[-1] == ["east", "west"] and torch.equal(west.model[0], east.model[0])
        for one in (east, west):
            one.joined.end()


def test_the_coordinator_is_restarted():
    with coordinator() as server:
        port = server.port
        east, west = Job("east", port), Job("west", port)
        both(east, west)
    ended = []
    threads = [
        threading.Thread(target=lambda one=one: ended.append(one.step(2)), daemon=True)
        for one in (east, west)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)  # both ask a coordinator that is not there
    with coordinator(port):
        for thread in threads:
            thread.join(60)
        assert len(ended) == 2
        for _ in range(3):
            both(east, west)
        assert east.members[-1] == west.members[-1] == ["east", "west"] and torch.equal(
            east.model[0], west.model[0]
        )
        for one in (east, west):
            one.joined.end()


def test_without_a_coordinator_training_goes_on():
    with coordinator() as server:
        east = Job("east", server.port)
        east.step(2)
    begin = time.monotonic()
    east.step(4)
    assert (
        east.verdicts == ["commit", "void", "void"]
        and "did not answer" in east.records[-1].outcome.why
    )
    assert time.monotonic() - begin < 40
    east.joined.end()


def test_a_job_resumes_from_its_checkpoint_and_an_older_one_takes_what_the_others_have():
    with coordinator() as server:
        east, west = Job("east", server.port), Job("west", server.port, speed=2)
        both(east, west)
        older = west.state()
        both(east, west)
        newest = {name: one.state() for name, one in (("east", east), ("west", west))}
        for one in (east, west):
            one.joined.end()
    with coordinator() as server:  # all of them, at one step
        east, west = (Job(name, server.port, state=newest[name]) for name in ("east", "west"))
        assert east.begun == west.begun == "round 2"
        west.joined.end()
        west = Job("west", server.port, state=older)
        assert "of job east" in west.begun and torch.equal(west.model[0], newest["east"]["weights"])
        both(east, west)
        assert east.members[-1] == ["east", "west"]
        for one in (east, west):
            one.joined.end()


@pytest.mark.parametrize(
    "text",
    [
        "every=4,fragments=2,delay=1,compress=int8",
        "algorithm=co2,every=4,fragments=2,compress=bf16,momentum=0.5",
        "algorithm=muon,every=4,fragments=1,delay=1",
    ],
)
def test_a_checkpoint_with_a_sum_under_way_goes_on_as_if_there_had_been_none(text):
    def run(stop):
        with coordinator() as server:
            jobs = [
                Job(name, server.port, text, speed)
                for name, speed in (("east", 1.0), ("west", 3.0))
            ]
            both(*jobs, stop)
            saved = [job.state() for job in jobs]
            for job in jobs:
                job.joined.end()
        return saved

    def go_on(saved, steps):
        with coordinator() as server:
            jobs = [
                Job(name, server.port, text, speed, state)
                for (name, speed), state in zip((("east", 1.0), ("west", 3.0)), saved)
            ]
            both(*jobs, steps)
            weights = [job.model[0].detach().clone() for job in jobs]
            for job in jobs:
                job.joined.end()
        return weights

    straight = [one["weights"] for one in run(13)]
    assert all(map(torch.equal, go_on(run(7), 6), straight))


def test_a_fragment_that_was_stepped_since_its_round_began_is_told_without_a_checksum():
    """Its anchor may be changing while it is read; with a wrong checksum the job would seem to be behind."""
    with coordinator() as server:
        east = Job("east", server.port).step(4)
        rounds_, version = east.joined.rounds, east.joined.state.fragments[0].version
        assert version == 2 and rounds_.claims.renew([1]) == {"versions": [2], "checksums": [""]}
        assert len(rounds_.claims.renew([2])["checksums"][0]) == 16
        east.joined.end()


def test_names_are_taken_once_until_their_job_is_gone():
    with coordinator() as server:
        east = Job("east", server.port)
        with pytest.raises(HolmesError, match="there is a job named 'east' in this run already"):
            Job("east", server.port)
        east.joined.end()

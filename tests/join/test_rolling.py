"""rounds=async: jobs that wait for nobody. Of one rank each, as threads."""

import threading
import time

import pytest
import torch
from joined_jobs import coordinator, in_threads, joined_of

from holmes_ext.errors import HolmesError
from holmes_ext.join.settings import parse_outer

SETTINGS = "rounds=async,every=8,fragments=2,delay=1,compress=off,timeout=20"


class Job:
    """Of one rank. Each step moves its weights towards `wanted`, with noise of its own."""

    def __init__(self, name, port, text="", pace_s=0.02, shape=(3000,), settings=SETTINGS):
        self.name, self.pace_s, self.records = name, pace_s, []
        self.model = torch.nn.ParameterList([torch.zeros(shape)])
        self.wanted = torch.linspace(-1, 1, 3000).view(shape)
        self.generator = torch.Generator().manual_seed(ord(name[0]))
        self.loop = joined_of(self.model, name, port, parse_outer(settings + text), self.records)

    def begin(self):
        self.loop.begin()
        return self

    def train(self, until):
        """Take steps until `until` is set, and return their number."""
        steps = 0
        while not until.is_set():
            with torch.no_grad():
                noise = torch.randn(self.wanted.shape, generator=self.generator)
                self.model[0] += 0.02 * (self.wanted - self.model[0]) + 0.005 * noise
            self.loop.after_step(10)
            steps += 1
            time.sleep(self.pace_s)
        return steps

    def kill(self):
        """Close all connections without a goodbye, and open none any more, as if the process were gone."""

        def end_of_process(*_):
            raise SystemExit("killed")

        rounds = self.loop.rounds
        rounds.coordinator.client.connect = end_of_process
        while rounds.running:
            rounds.links.close()
            rounds.coordinator.client.close("")
            time.sleep(0.01)

    @property
    def contributed(self):
        shares = [
            one.outcome.members.get(self.name, 0)
            for one in self.records
            if one.outcome.verdict == "commit"
        ]
        return sum(share > 0 for share in shares)

    @property
    def waited(self):
        return sum(one.exposed_s for one in self.records)


def train_all(jobs, rounds):
    """Until the first of them has seen so many rounds; steps by job."""
    until = threading.Event()

    def watch():
        end = time.monotonic() + 90
        while (
            sum(one.outcome.verdict == "commit" for one in jobs[0].records) < rounds
            and time.monotonic() < end
        ):
            time.sleep(0.01)
        until.set()

    calls = {job.name: (lambda job=job: job.train(until)) for job in jobs}
    return in_threads({**calls, "watch": watch}, 120)


def anchors(job):
    """Return the value of each fragment with all pending updates."""
    state = job.loop.state
    return [state.copy_of(f, f.start, f.stop)[:2] for f in state.fragments]


def end(*jobs):
    for job in jobs:
        job.loop.end()


def alike(*jobs):
    """All have the same bits of each version that several of them have."""
    compared = 0
    for fragment in zip(*map(anchors, jobs)):
        by_version = {}
        for version, anchor in fragment:
            if version in by_version:
                assert torch.equal(by_version[version], anchor), f"round {version}"
                compared += 1
            by_version[version] = anchor
    return compared


@pytest.mark.parametrize(
    "settings, shape",
    [
        (SETTINGS, (3000,)),
        (SETTINGS.replace("fragments=2", "fragments=1,algorithm=muon"), (60, 50)),
    ],
)
def test_jobs_learn_together_and_have_the_same_bits(settings, shape):
    with coordinator() as server:
        jobs = [
            Job(name, server.port, ",min=2", shape=shape, settings=settings)
            for name in ("east", "west")
        ]
        in_threads({job.name: job.begin for job in jobs})
        train_all(jobs, 12)
        end(*jobs)
    assert alike(*jobs) >= 1
    assert all(job.contributed >= 5 for job in jobs)
    error = [float((job.model[0].detach() - job.wanted).norm() / job.wanted.norm()) for job in jobs]
    assert max(error) < 0.8


def test_a_job_of_a_fifth_of_the_speed_costs_the_others_nothing_and_contributes():
    with coordinator() as server:
        jobs = [
            Job(name, server.port, ",grace=0", pace_s)
            for name, pace_s in (("east", 0.02), ("north", 0.02), ("west", 0.1))
        ]
        in_threads({job.name: job.begin for job in jobs})
        steps = train_all(jobs, 16)
        end(*jobs)
    east, _, west = jobs
    assert steps["east"] > 2 * steps["west"], "it waits for nobody"
    assert 1 <= west.contributed < east.contributed
    assert alike(*jobs) >= 2
    progress = (west.model[0].detach() - west.wanted).norm() / west.wanted.norm()
    assert progress < 0.8, "it has what the others learnt"


def test_a_job_that_is_killed_costs_the_others_nothing_and_comes_back():
    with coordinator() as server:
        jobs = [Job(name, server.port) for name in ("east", "north", "west")]
        in_threads({job.name: job.begin for job in jobs})
        train_all(jobs, 6)
        jobs[2].kill()
        train_all(jobs[:2], 14)
        back = Job("west", server.port)
        assert "the weights of job" in back.loop.begin()
        train_all([*jobs[:2], back], 22)
        end(*jobs[:2], back)
    assert back.contributed >= 1 and alike(jobs[0], jobs[1], back) >= 2


def test_without_a_coordinator_training_goes_on():
    with coordinator() as server:
        job = Job("east", server.port)
        job.begin()
        train_all([job], 4)
    until = threading.Event()
    threading.Timer(1.0, until.set).start()
    assert job.train(until) > 10
    job.loop.end()


def test_what_is_not_finite_is_left_out_and_its_job_brought_back():
    with coordinator() as server:
        jobs = [Job(name, server.port, ",min=2") for name in ("east", "west")]
        in_threads({job.name: job.begin for job in jobs})
        train_all(jobs, 4)
        with torch.no_grad():
            jobs[1].model[0][5] = float("nan")
        train_all(jobs, 14)
        end(*jobs)
    assert all(job.model[0].isfinite().all() for job in jobs)
    assert any("west" in one.outcome.left_out for one in jobs[1].records)


def test_a_checkpoint_holds_what_is_applied():
    with coordinator() as server:
        job = Job("east", server.port).begin()
        train_all([job], 5)
        saved, weights = job.loop.state_dict(), job.model[0].detach().clone()
        versions = [f.version for f in job.loop.state.fragments]
        job.loop.end()
    with coordinator() as server:
        again = Job("east", server.port)
        with torch.no_grad():
            again.model[0].copy_(weights)
        again.loop.load_state_dict(saved)
        again.begin()
        assert [f.version for f in again.loop.state.fragments] == versions
        train_all([again], 3)
        again.loop.end()
    assert again.contributed >= 2
    rounds = [one.number for one in again.records if one.outcome.verdict == "commit"]
    assert min(rounds) > max(versions), "the run goes on counting where the checkpoint was"


@pytest.mark.parametrize("text", ["every=60s", "mix=0.5", "algorithm=co2"])
def test_what_does_not_go_together_is_refused(text):
    allowed = "rounds=async needs every=STEPS, mix=keep and algorithm=diloco or average or muon"
    with pytest.raises(HolmesError, match=allowed):
        parse_outer(f"rounds=async,{text}")


def test_jobs_of_both_kinds_do_not_meet():
    with coordinator() as server:
        job = Job("east", server.port).begin()
        settings = parse_outer("every=8,fragments=2,delay=1,compress=off,timeout=20")
        other = joined_of(job.model, "west", server.port, settings)
        with pytest.raises(
            HolmesError,
            match=r"it differs from job 'east' in outer rounds .sync here, async "
            r"in east",
        ):
            other.begin()
        other.end()
        end(job)

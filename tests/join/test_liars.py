"""Tests joined jobs of which one sends false data; the other three must not be affected.

Joined jobs are separate training jobs that regularly combine their weight updates (DiLoCo). The tests check:

    the honest jobs learn as they would without the liar
    all honest jobs end with bitwise equal weights
    a message names the liar

An exhaustive test combines each way to lie with each robust aggregate (median, trimmed mean, ...).
"""

import threading

import pytest
import torch
from joined_jobs import coordinator, in_threads, joined_of

from holmes_ext.errors import HolmesError
from holmes_ext.join.settings import parse_outer
from holmes_ext.runtime.compress import Codec
from holmes_ext.runtime.deadline import Deadline
from integration_tests.jobs import some

HONEST = ("east", "north", "west")
LIAR = "zero"  # it is called by all others
ROUNDS = 4
SETTINGS = "every=2,fragments=1,delay=0,compress=off,min=2"


class Job:
    """Of one rank. Each step moves its weights towards what all jobs want, with noise of its own."""

    def __init__(self, name, port, text=""):
        self.name, self.records = name, []
        self.model = torch.nn.ParameterList([torch.zeros(4000)])
        self.wanted = torch.linspace(-1, 1, 4000)
        self.generator = torch.Generator().manual_seed(len(name) * 100 + ord(name[0]))
        self.loop = joined_of(
            self.model, name, port, parse_outer(f"{SETTINGS}{text}"), self.records
        )
        self.lie = None

    def train(self, begun):
        self.loop.begin()
        begun.wait()
        for _ in range(2 * ROUNDS):
            with torch.no_grad():
                noise = torch.randn(4000, generator=self.generator)
                self.model[0] += 0.1 * (self.wanted - self.model[0]) + 0.02 * noise
            self.loop.after_step(100)
        self.loop.end()
        return self.model[0].detach().clone()


def run(*names, lie=None, text="", timeout=20):
    """Run the jobs, and return what each has at the end and what the coordinator reported."""
    text = f",timeout={timeout}{text}"
    begun = threading.Barrier(len(names), timeout=60)
    with coordinator() as server:
        jobs = {name: Job(name, server.port, text) for name in names}
        if lie is not None:
            lie(jobs[LIAR])
        found = in_threads(
            {name: lambda job=job: job.train(begun) for name, job in jobs.items()}, 120
        )
    return found, server.told, jobs


def same(one, other):
    """But for the order in which the jobs came, in which their parts are added up."""
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Lying(Codec):
    """What a job sends, changed by `change`."""

    def __init__(self, change):
        self.change = change

    def encode(self, x, residual):
        return self.change(x.clone())


def sends(change):
    def lie(job):
        job.loop.rounds.codec = Lying(change)

    return lie


def says(op, change):
    """Make a lie that changes the job's message to the coordinator."""

    def lie(job):
        link = job.loop.rounds.coordinator
        ask = link.ask
        link.ask = lambda asked, told: ask(asked, change(dict(told)) if asked == op else told)

    return lie


def is_dropped_for(op, change):
    """Make a lie that changes the message, for which the coordinator drops the job.

    The job does not wait for another answer then.
    """

    def lie(job):
        link = job.loop.rounds.coordinator
        ask = link.ask

        def lying(asked, told):
            if asked != op:
                return ask(asked, told)
            try:
                return link.client.ask(asked, change(dict(told)), Deadline(0.5, "a lie"))
            except (TimeoutError, HolmesError):
                return {"verdict": "void", "round": told["round"], "why": "it lies"}

        link.ask = lying

    return lie


def both(*lies):
    return lambda job: [lie(job) for lie in lies]


def repeated():
    """Return a change that sends the first message again, for ever."""
    first = []

    def change(x):
        first.append(x)
        return first[0].clone()

    return change


def of_another(job):
    """Let a job send the data of another job in the round before."""
    exchange, last = job.loop.rounds._exchange, []

    def remember(*args):
        came = exchange(*args)
        last[:] = [one.clone() for name, one in zip(came.names, came.gradients) if name == "east"]
        return came

    job.loop.rounds._exchange = remember
    job.loop.rounds.codec = Lying(lambda x: last[0].clone() if last else x)


def never_sends(job):
    job.loop.rounds._exchange = lambda *args: threading.Event().wait(100)
    job.train = lambda begun: silent(job, begun)


def silent(job, begun):
    """Train a job that is ready, and never exchanges anything."""
    job.loop.begin()
    begun.wait()
    job.model[0].data += 1
    job.loop.in_period = 1
    job.loop.in_period += 1
    job.loop.submit(job.loop.capture())


def sends_less(job):
    swap = job.loop.rounds.links.swap

    def less(number, attempt, outgoing, incoming, patience_s):
        return swap(
            number,
            attempt,
            {peer: [parts[0][:-8]] for peer, parts in outgoing.items()},
            incoming,
            patience_s,
        )

    job.loop.rounds.links.swap = less


def random_like(x):
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    return noise * (x.norm() / noise.norm())


def scaled_claims(factor):
    return lambda told: {**told, "norm": told["norm"] * factor} if "norm" in told else told


WAYS = {
    "NaN": (sends(lambda x: x.fill_(float("nan"))), "what it sent is not finite"),
    "1e30": (sends(lambda x: x.fill_(1e30)), "what it sent has length"),
    "sign flipped": (sends(lambda x: -x), "it points another way"),
    "scaled": (
        both(sends(lambda x: 100 * x), says("ready", scaled_claims(100))),
        "times as long as usual",
    ),
    "stale": (sends(repeated()), "it sent again"),
    "random": (sends(random_like), "it points another way"),
    "wrong length": (sends_less, "cannot exchange data"),
    "false norm": (
        both(sends(lambda x: 9 * x), says("ready", scaled_claims(0.5))),
        "what it sent has length",
    ),
    "false version": (
        is_dropped_for("ready", lambda told: {**told, "versions": [10**9]}),
        "cannot be of round 1000000000",
    ),
    "false tokens": (
        says("ready", lambda told: {**told, "tokens": 1e12}),
        "times the others' tokens",
    ),
    "replay": (of_another, "it sent again"),
    "silent": (never_sends, "is lost on the way"),
}


@pytest.fixture(scope="module")
def honest():
    """Return what the three jobs have without a fourth one."""
    return run(*HONEST)[0]


@pytest.fixture(scope="module")
def four():
    """Return what the jobs have with a fourth one that is honest."""
    return run(*HONEST, LIAR)[0]


@pytest.mark.parametrize("way", WAYS)
def test_the_mean_leaves_the_liar_out_and_names_it(way, honest):
    lie, words = WAYS[way]
    found, told, jobs = run(*HONEST, LIAR, lie=lie, timeout=3 if way == "silent" else 20)
    named = [line for line in told if words in line]
    assert named and all(LIAR in line for line in named), told
    first = found["east"]
    assert all(torch.equal(found[name], first) for name in HONEST), "they have the same bits"
    # The first rounds may have had it: before it lied, or before it was known what is usual.
    assert (first - honest["east"]).norm() < 0.1 * honest["east"].norm()
    if way not in ("stale", "replay", "scaled"):
        same(first, honest["east"])  # nothing of it is in the sum
    assert all(len(job.records) == ROUNDS for name, job in jobs.items() if name in HONEST)


ROBUST = [
    f"{aggregate}, {way}"
    for aggregate in ("median", "trimmed", "geometric", "clipping", "flag")
    for way in WAYS
    if way != "silent"
]


@pytest.mark.parametrize(
    "case",
    some(
        ROBUST,
        "median, 1e30",
        "trimmed, false version",
        "geometric, NaN",
        "geometric, scaled",
        "clipping, sign flipped",
        "flag, random",
    ),
)
def test_robust_aggregates_hold(case, honest):
    aggregate, way = case.split(", ")
    found, _, _ = run(*HONEST, LIAR, lie=WAYS[way][0], text=f",aggregate={aggregate}")
    first = found["east"]
    assert all(torch.equal(found[name], first) for name in HONEST) and first.isfinite().all()
    assert (first - honest["east"]).norm() < 0.2 * honest["east"].norm()


def test_who_sends_different_things_to_different_jobs_is_found_out(honest):
    """Each copy alone is believable."""

    def lie(job):
        exchange = job.loop.rounds._exchange

        def equivocate(in_flight, verdict):
            links = job.loop.rounds.links
            swap = links.swap

            def differently(number, attempt, outgoing, incoming, patience_s):
                for peer, parts in outgoing.items():
                    if peer.job == "west":
                        changed = (
                            torch.frombuffer(bytearray(parts[0]), dtype=torch.float32).clone()
                            * 1.01
                        )
                        outgoing[peer] = [changed.view(torch.uint8).numpy().data]
                return swap(number, attempt, outgoing, incoming, patience_s)

            links.swap = differently
            try:
                return exchange(in_flight, verdict)
            finally:
                links.swap = swap

        job.loop.rounds._exchange = equivocate

    found, told, _ = run(*HONEST, LIAR, lie=lie)
    assert all(torch.equal(found[name], found["east"]) for name in HONEST)
    assert any(
        "what it sent to one is not what it sent to others" in line and LIAR in line
        for line in told
    )
    assert (found["east"] - honest["east"]).norm() < 0.1 * honest["east"].norm()


def test_false_accusations_cost_the_accuser_as_much(honest):
    accuse = says("done", lambda told: {**told, "faults": {"east": "I say so"}})
    found, told, _ = run(*HONEST, LIAR, lie=accuse)
    assert all(torch.equal(found[name], found["east"]) for name in HONEST)
    assert any("contradict each other" in line for line in told)
    everybody = says("done", lambda told: {**told, "faults": dict.fromkeys(HONEST, "I say so")})
    found, told, _ = run(*HONEST, LIAR, lie=everybody)
    same(found["east"], honest["east"])  # of one who accuses all, nothing is believed


@pytest.mark.parametrize(
    "change",
    [
        lambda told: {**told, "factors": dict.fromkeys(told["factors"], 1e6), "gap": 1e20},
        lambda told: {**told, "factors": {}},
        lambda told: {**told, "factors": {"nobody": 1.0}},
        lambda told: {**told, "digests": dict.fromkeys(told["digests"], "f" * 16)},
    ],
)
def test_false_factors_and_sums_do_not_move_the_others(change, honest, four):
    """What it sent is right, so it counts, or it is left out for its sums."""
    found, _, _ = run(*HONEST, LIAR, lie=says("checked", change))
    assert all(torch.equal(found[name], found["east"]) for name in HONEST)
    assert (
        min((found["east"] - one["east"]).norm() for one in (honest, four))
        < 0.01 * honest["east"].norm()
    )


MALFORMED = {
    "norm": {"norm": "x"},
    "tokens": {"tokens": -1},
    "versions": {"versions": "x"},
    "no versions": {"versions": []},
    "fragment": {"fragment": 99},
    "round": {"round": "x"},
    "checksums": {"checksums": [1]},
    "a table": {"norm": {}},
    "a huge number": {"tokens": 1e300},
    "a bool": {"round": True},
}


@pytest.mark.parametrize("what", some(MALFORMED, "norm", "versions", "a table"))
def test_a_malformed_report_drops_its_sender_alone(what, honest):
    found, told, _ = run(
        *HONEST, LIAR, lie=is_dropped_for("ready", lambda report: {**report, **MALFORMED[what]})
    )
    same(found["east"], honest["east"])
    assert any(f"job {LIAR} is gone: dropped: " in line for line in told)


OF_WHAT_CAME = {
    "attempt": {"attempt": "x"},
    "round": {"round": -1},
    "a list, a number": {"faults": [1], "digests": 5},
    "a text, nothing": {"unreached": "east", "factors": None},
}


@pytest.mark.parametrize("op", ["done", "checked"])
@pytest.mark.parametrize("what", some(OF_WHAT_CAME, "a text, nothing"))
def test_malformed_reports_of_what_came_drop_their_sender_alone(op, what, honest):
    change = OF_WHAT_CAME[what]
    found, _, _ = run(*HONEST, LIAR, lie=is_dropped_for(op, lambda report: {**report, **change}))
    assert all(torch.equal(found[name], found["east"]) for name in HONEST)
    assert (found["east"] - honest["east"]).norm() < 0.1 * honest["east"].norm()

"""Rounds in which two jobs cannot exchange data, or in which one job says so falsely."""

import itertools
import random

import pytest
from coordinator_rules import TIMEOUT, Run
from joined_model import Scene, World

from holmes_ext.join.coordinator.failed_pairs import FailedPairs, failures_of, fewest_to_drop
from holmes_ext.join.coordinator.reports import DoneReport

ROUNDS = 30


def pairs(*texts):
    """Return pairs of jobs with names of one letter, such as "ab"."""
    return [frozenset(text) for text in texts]


def is_cover(dropped, edges):
    return all(dropped & edge for edge in edges)


def test_the_job_that_all_failed_pairs_share_is_dropped():
    assert fewest_to_drop(pairs("ab", "ac", "ad"), "abcd") == {"a"}
    assert fewest_to_drop(pairs("ab", "bc", "cd"), "abcd") in ({"b", "c"}, {"a", "c"}, {"b", "d"})
    assert fewest_to_drop([], "ab") == set()


def test_of_several_smallest_sets_the_preferred_one_is_dropped():
    assert fewest_to_drop(pairs("ab"), "ab") == {"a"}
    assert fewest_to_drop(pairs("ab"), "ba") == {"b"}
    assert fewest_to_drop(pairs("ab", "cd"), "bdac") == {"b", "d"}


def test_no_smaller_set_exists():
    """Compare with all subsets, for random graphs of up to seven jobs."""
    chance = random.Random(5)
    for _ in range(60):
        names = "abcdefg"[: chance.randint(2, 7)]
        edges = [
            frozenset(pair) for pair in itertools.combinations(names, 2) if chance.random() < 0.4
        ]
        dropped = fewest_to_drop(edges, names)
        sizes = [
            size
            for size in range(len(names) + 1)
            if any(is_cover(set(some), edges) for some in itertools.combinations(names, size))
        ]
        assert is_cover(dropped, edges) and len(dropped) == sizes[0], (edges, dropped)


@pytest.mark.parametrize("shape", ["halves", "all", "random", "star"])
def test_the_search_is_bounded_for_64_jobs(shape):
    names = [f"job{number}" for number in range(64)]
    chance = random.Random(1)
    everything = list(map(frozenset, itertools.combinations(names, 2)))
    edges = {
        "halves": [frozenset(pair) for pair in itertools.product(names[:32], names[32:])],
        "all": everything,
        "random": [pair for pair in everything if chance.random() < 0.1],
        "star": [frozenset((names[0], name)) for name in names[1:]],
    }[shape]
    dropped = fewest_to_drop(edges, names)
    assert is_cover(dropped, edges)
    sizes = {"halves": 32, "all": 63, "star": 1}
    assert len(dropped) == sizes.get(shape, len(dropped)) < 64


def test_reports_about_jobs_that_are_no_members_are_ignored():
    reports = {"a": DoneReport(1, 1, ("b", "a", "ghost")), "b": DoneReport(1, 1, ("a",))}
    assert failures_of(reports, {"a", "b"}) == {frozenset("ab"): frozenset("ab")}


def test_a_pair_that_failed_over_the_relay_is_kept_apart_for_ten_times_as_long_as_it_took():
    failed = FailedPairs()
    pair = frozenset("ab")
    failed.relay([pair], now=100.0)
    assert failed.relayed("abc", 101.0) == {pair} and failed.relayed("bc", 101.0) == set()
    failed.separate({pair: frozenset("a")}, lost_s=5.0, now=110.0)
    assert failed.relayed("abc", 111.0) == set(), "the next attempt is direct again"
    assert failed.apart("abc", 159.0) == {pair: frozenset("a")}
    assert failed.apart("abc", 161.0) == {}


def test_a_pair_uses_the_relay_for_longer_each_time_that_its_direct_connection_fails():
    """A connection that was reset once is direct again after a minute; a cut one is tried once an hour."""
    failed, pair, now = FailedPairs(), frozenset("ab"), 100.0
    for seconds in (60, 240, 960, 3600, 3600):
        failed.relay([pair], now)
        assert failed.relayed("ab", now + seconds - 1) and not failed.relayed("ab", now + seconds)
        now += seconds + 1
    now += 3600  # the direct connection has worked for an hour
    failed.relay([pair], now)
    assert not failed.relayed("ab", now + 60)


@pytest.mark.parametrize("policy", ["ready", "next"])
@pytest.mark.parametrize("jobs", [3, 4, 8])
def test_a_cut_pair_uses_the_relay_and_all_keep_all_rounds(jobs, policy):
    """F1: of four jobs with one cut pair, 0 of 30 rounds were committed."""
    world = World(Scene(jobs, cut=("east", "north"), policy=policy))
    world.play(ROUNDS)
    assert len(world.committed_together(world.jobs)) >= ROUNDS - 1


@pytest.mark.parametrize("policy", ["ready", "next"])
@pytest.mark.parametrize("jobs", [3, 4, 8])
def test_without_a_relay_the_two_of_a_cut_pair_take_part_in_turns(jobs, policy):
    world = World(Scene(jobs, cut=("east", "north"), relay=False, policy=policy))
    world.play(ROUNDS)
    others = [name for name in world.jobs if name not in ("east", "north")]
    assert len(world.committed_together(others)) >= 0.9 * ROUNDS
    for name in ("east", "north"):
        assert 0.3 * ROUNDS <= len(world.jobs[name].commits) <= 0.7 * ROUNDS


@pytest.mark.parametrize("lie", ["accuses one", "accuses all"])
@pytest.mark.parametrize("jobs", [3, 4, 8])
def test_a_job_that_accuses_others_falsely_is_dropped_itself(jobs, lie):
    """F1: one member that said so voided every round."""
    world = World(Scene(jobs, liar="zero" if jobs > 4 else NAMES_OF[jobs], lie=lie))
    world.play(ROUNDS)
    assert len(world.committed_together(job.name for job in world.honest)) == ROUNDS


NAMES_OF = {3: "south", 4: "west"}


def test_a_job_that_fails_with_several_is_dropped_though_they_alone_report_it():
    world = World(Scene(4, liar="west", lie="fails with all"))
    world.play(ROUNDS)
    assert len(world.committed_together(["east", "north", "south"])) == ROUNDS


def test_a_pair_that_is_apart_costs_no_attempt():
    """The failed attempts took 20 s; for 200 s, one of the two is left out from the begin of a round."""
    run = Run("east", "north", "west")
    for job in ("east", "north", "west"):
        run.ready(job, 1)
    cut = {"east": ["north"], "north": ["east"], "west": []}
    for attempt in (1, 2):
        run.now += 10.0
        for job, unreached in cut.items():
            reply = run.done(job, 1, attempt, unreached)
    assert (reply["attempt"], len(reply["members"])) == (3, 2)
    (absent,) = {"east", "north"} - set(reply["members"])
    (present,) = {"east", "north"} & set(reply["members"])
    assert [reply["verdict"] for reply in run.end(1, present, "west", attempt=3)] == ["commit"] * 2
    run.fragments[absent] = [list(one) for one in run.fragments["west"]]
    run.ready(present, 2), run.ready(absent, 2)
    go = run.ready("west", 2)
    assert set(go["members"]) == {absent, "west"} and go["attempt"] == 1, "it is the other's turn"
    assert run.ready(present, 2) == {"verdict": "skip", "round": 2}


def test_two_jobs_that_are_apart_go_on_without_each_other_at_once():
    run = Run("east", "west")
    run.ready("east", 1), run.ready("west", 1)
    for attempt in (1, 2):
        run.now += 10.0
        run.done("east", 1, attempt, ["west"])
        reply = run.done("west", 1, attempt, ["east"])
    assert reply["verdict"] == "void"
    run.ready("east", 2)
    assert "cannot exchange data" in run.ready("west", 2)["why"]
    run.now += 201.0
    run.ready("east", 3)
    assert run.ready("west", 3)["verdict"] == "go", "they try again"


def test_weights_are_not_taken_from_a_job_that_cannot_be_reached():
    run = Run("east", "north", "west")
    run.coordinator.state.failed_pairs.separate(
        {frozenset(("east", "west")): frozenset()}, lost_s=10.0, now=run.now
    )
    run.fragments["west"] = [[0, 9], [0, 9]]
    run.coordinator._versions.accept_claims(run.coordinator.state.members["west"], claims(run))
    reply = run.coordinator._versions.behind_reply(run.coordinator.state.members["west"])
    assert reply["from"] == "north"


def claims(run):
    from coordinator_rules import claims_of

    return claims_of(run.fragments["west"])


# Unfinished rounds


@pytest.mark.parametrize("lost", ["is silent", "leaves"])
def test_of_two_jobs_one_that_is_ready_and_vanishes_sits_out_soon(lost):
    """F5: it cost the other job a timeout in every round."""
    run, delayed = Run("east", "zero"), []
    for number in range(1, 41):
        if run.coordinator.state.members["zero"].state == "gone":
            run.hello("zero")
            run.enter("zero")
        run.fragments["zero"] = [list(one) for one in run.fragments["east"]]
        run.ready("zero", number)
        reply = run.ready("east", number)
        assert reply["verdict"] == "go"
        attempt = 1
        if "zero" in reply["members"]:
            delayed.append(number)
            if lost == "leaves":
                run.coordinator.gone("zero", "1", "closed")
            run.now += TIMEOUT  # for which the exchange waits for data of zero
            run.done("east", number, unreached=["zero"])
            run.now += TIMEOUT / 4 + 1
            assert run.done("east", number)["attempt"] == 2
            attempt = 2
        assert run.end(number, "east", attempt=attempt)[0]["verdict"] == "commit"
    assert len(delayed) <= 5, delayed


@pytest.mark.parametrize("others", [["north"], ["north", "west"], ["north", "south", "west"]])
def test_a_job_without_connections_does_not_drop_jobs_that_still_wait_for_its_data(others):
    """It reports at once that it reached nobody; the others report this after a whole timeout."""
    run = Run("zero", *others)
    for job in ("zero", *others):
        reply = run.ready(job, 1)
    assert set(reply["members"]) == {"zero", *others}
    assert run.done("zero", 1, unreached=others) is None
    run.now += TIMEOUT
    assert run.done("zero", 1) is None, "the others are not given up yet"
    for job in others:
        reply = run.done(job, 1, unreached=["zero"])
    assert reply["verdict"] == "go" and set(reply["members"]) == {"zero", *others}
    assert run.coordinator.state.failed_pairs.relayed(["zero", *others], run.now)


def test_of_two_jobs_the_smaller_timeout_counts():
    """F5: one job that asked for a timeout of a day made the other one wait for a day."""
    run = Run("east")
    run.hello("zero", timeout=86400.0)
    assert run.enter("zero")["verdict"] == "in"
    assert run.ready("east", 1) is None
    run.now += TIMEOUT + 1
    assert run.ready("east", 1)["members"] == {"east": 1.0}
    run.coordinator.heartbeat("east", "1", {}, run.now)
    run.coordinator.look(run.now)
    assert run.coordinator.state.members["zero"].state == "gone", "silence ends as early, too"


def test_of_two_jobs_the_smaller_min_counts():
    """F3: `min=64` of one job voided every round."""
    run = Run("east")
    run.hello("zero", entered=True, least=64)
    run.ready("east", 1)
    assert run.ready("zero", 1)["verdict"] == "go"


def test_silent_names_do_not_count_in_the_quorum():
    """F3: half of the names had to take part, also if nobody was behind them."""
    names = [f"name{number}" for number in range(5)]
    run = Run("east", "north", *names)
    run.ready("east", 1), run.ready("north", 1)
    run.now += 2 * TIMEOUT + 1
    assert set(run.ready("east", 1)["members"]) == {"east", "north"}
    assert [reply["verdict"] for reply in run.end(1, "east", "north")] == ["commit"] * 2
    run.ready("east", 2)
    assert run.ready("north", 2)["verdict"] == "go", "they are not waited for again"


def test_a_job_that_sits_out_is_not_waited_for():
    run = Run("east", "north", "zero")
    run.coordinator.state.members["zero"].sits_out_until = 9
    run.ready("east", 1)
    assert run.ready("north", 1)["verdict"] == "go"


def test_jobs_that_all_sit_out_take_part():
    """Otherwise no round would begin, and none of them could come back."""
    run = Run("east", "north")
    for member in run.coordinator.state.members.values():
        member.sits_out_until = 9
    run.ready("east", 1)
    assert run.ready("north", 1)["verdict"] == "go"

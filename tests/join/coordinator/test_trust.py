"""What the coordinator believes: no single job (consensus.py, reports.py, and the rules that ask them)."""

import pytest
from coordinator_rules import TIMEOUT, Run, claims_of

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.consensus import (
    accusations_from_digests,
    agreed_claim,
    is_compatible,
    medians_by_key,
    voted_out,
)
from holmes_ext.join.coordinator.reports import MOST, Claim, ReadyReport, hello_from, ready_from

OTHER = 16 * "1"
THREE = ("east", "north", "west")


def test_a_version_that_no_round_made_is_not_believed():
    for committed in (5, None):
        assert agreed_claim([Claim(5, "a"), Claim(10**9, "b")], committed, 5) == Claim(5, "a")
        assert agreed_claim([Claim(10**9)], committed, 5) is None


def test_after_a_restart_most_decide():
    """Nobody knows which rounds were committed."""
    lie, far = Claim(10**9, "z"), 10**9
    assert agreed_claim([lie, Claim(5, "a"), Claim(5, "a")], None, far) == Claim(5, "a")
    assert agreed_claim([Claim(4, "z"), Claim(5, "a")], None, far) == Claim(5, "a"), (
        "of two, the newer"
    )
    assert agreed_claim([lie, Claim(4, "b"), Claim(5, "a")], None, far) == Claim(5, "a"), (
        "nor the oldest"
    )
    assert agreed_claim([Claim(0, "z"), Claim(4, "b"), Claim(5, "a")], None, far) == Claim(4, "b")
    assert agreed_claim([lie, Claim(4), Claim(4), Claim(6), Claim(6)], None, far) == Claim(6)


def test_the_checksum_that_most_tell():
    claims = [Claim(5, "z"), Claim(5, "a"), Claim(5, "a"), Claim(5)]
    assert agreed_claim(claims, 5, 5) == Claim(5, "a")
    assert (
        is_compatible(Claim(5), Claim(5, "a"))
        and not is_compatible(Claim(5, "z"), Claim(5, "a"))
        and not is_compatible(Claim(4), Claim(5))
    )


def test_whoever_most_accuse_is_out():
    votes = {name: {"zero": "NaN"} for name in THREE}
    out = {"zero": f"jobs {', '.join(THREE)} accuse it: NaN"}
    assert voted_out({**votes, "zero": {}}) == out
    assert voted_out({**votes, "zero": {"east": "a lie"}}) == out


def test_one_accuser_takes_nobody_out_alone():
    """One of the two lies, and which one cannot be known."""
    found = voted_out({"east": {}, "north": {}, "west": {}, "zero": {"east": "a lie"}})
    assert set(found) == {"east", "zero"} and "contradict each other" in found["east"]
    assert voted_out(
        {"east": {}, "north": {}, "west": {}, "zero": dict.fromkeys(THREE, "a lie")}
    ).keys() == {"zero"}
    assert voted_out({"east": {"gone": "x", "east": "y"}}) == {}, (
        "neither who is not here, nor oneself"
    )


def test_who_sends_different_things_is_accused():
    honest = dict.fromkeys((*THREE, "zero"), "same")
    digests = {name: dict(honest) for name in honest}
    assert voted_out(accusations_from_digests(digests)) == {}
    digests["west"]["zero"] = "other"  # what zero sent to west
    assert set(voted_out(accusations_from_digests(digests))) == {"west", "zero"}, (
        "west may say so falsely"
    )
    digests["north"]["zero"] = "a third one"
    assert set(voted_out(accusations_from_digests(digests))) == {"zero"}


def test_one_document_cannot_move_the_middle():
    assert medians_by_key([{"a": 1.0}, {"a": 1.1}, {"a": 1e9}]) == {"a": 1.1}
    assert medians_by_key([{"a": 1.0}, {"a": 1e9}]) == {"a": 1.0}


def whole(run, number, names):
    for name in names:
        run.ready(name, number)
    for name in names:
        run.done(name, number)


def test_a_job_that_contradicts_all_for_ever_does_not_hold_a_round_up():
    """Once it is left out, its sums are not looked at."""
    names = (*THREE, "zero")
    run = Run(*names)
    whole(run, 1, names)
    lie = dict.fromkeys(names, OTHER)
    for name in THREE:
        run.checked(name, 1)
    again = run.checked("zero", 1, digests=lie)
    assert (again["verdict"], again["check"], set(again["excluded"])) == ("check", 2, {"zero"})
    for name in THREE:
        run.checked(name, 1, check=2)
    assert run.checked("zero", 1, check=2, digests=lie)["verdict"] == "commit"
    assert set(run.checked("east", 1, check=2)["factors"]) == set(THREE)


def test_what_came_otherwise_to_one_is_not_applied():
    names = (*THREE, "zero")
    run = Run(*names)
    whole(run, 1, names)
    for name in names:
        digests = {"zero": OTHER} if name in ("east", "west") else {}
        reply = run.checked(name, 1, digests=digests)
    assert reply["verdict"] == "check" and reply["excluded"]


def test_whoever_most_find_unusable_is_left_out():
    names = (*THREE, "zero")
    run = Run(*names)
    for name in names:
        run.ready(name, 1)
    for name in names:
        reply = run.done(name, 1, faults={"zero": "it is not finite"} if name != "zero" else {})
    assert reply["verdict"] == "check" and reply["excluded"] == {
        "zero": "jobs east, north, west accuse it: it is not finite"
    }


def test_a_version_above_the_last_commit_ends_its_job():
    run = Run("east", "west")
    run.whole_round(1, "east", "west")
    run.fragments["west"][0] = [9, 7]
    with pytest.raises(
        HolmesError, match="fragment 0 cannot be of round 9: it was last stepped in round 1"
    ):
        run.ready("west", 2)


def restarted(*jobs, versions, rounds=None, least=2):
    """Return a coordinator that was restarted, and jobs in the run with a version of both fragments."""
    run = Run(least=least)
    for job in jobs:
        run.fragments[job] = [[versions[job], versions[job]] for _ in range(2)]
        others = [other for other in jobs if other != job]
        run.hello(job, entered=True, round=(rounds or versions)[job], peers=others)
    return run


def told(run, number, *jobs, times=2):
    """Return the last answer to each job, of a round at which all of them ask several times."""
    for _ in range(times):
        replies = {job: run.ready(job, number) for job in jobs}
    return replies


@pytest.mark.parametrize("lies_at_hello", [False, True])
@pytest.mark.parametrize("order", [("zero", "east", "west"), ("east", "west", "zero")])
def test_after_a_restart_a_version_of_one_liar_does_not_stop_two_jobs_of_different_versions(
    order, lies_at_hello
):
    """Two honest jobs agree after a restart, though a liar claims a higher version.

    Of three versions that one job each claims, the highest used to count: the two honest jobs tried
    to take it from the liar for as long as the liar lived.
    """
    versions, lie = {"east": 8, "west": 6, "zero": 8}, 10**9
    if lies_at_hello:
        versions["zero"] = lie
    run = restarted(*order, versions=versions, rounds={"east": 8, "west": 8, "zero": 8})
    run.fragments["zero"] = [[lie, 7], [lie, 7]]
    replies = told(run, 9, *order)
    run.now += TIMEOUT + 1  # at most a round's patience
    replies = told(run, 9, *order)
    assert replies["west"]["verdict"] == "behind" and replies["west"]["from"] == "east"
    run.fragments["west"] = [list(one) for one in run.fragments["east"]]
    replies = told(run, 10, "zero", "east", "west")
    assert {"east", "west"} == set(replies["west"]["members"])
    run.end(10, "east", "west")
    with pytest.raises(HolmesError, match="cannot be of round 1000000000: it was last stepped in"):
        told(run, 11, "zero", times=3)
    run.coordinator.gone("zero", "1", "dropped")
    run.whole_round(11, "east", "west")


def test_after_a_restart_nobody_takes_from_a_liar_before_those_are_back_that_the_others_know():
    """East alone beside a liar could not know which of the two has what most have."""
    run = Run(least=2)
    run.fragments = {"zero": [[10**9, 7]] * 2, "east": [[8, 5]] * 2, "west": [[8, 5]] * 2}
    run.hello("zero", entered=True, round=10**9)
    run.hello("east", entered=True, round=8, peers=["west", "zero"])
    number = run.coordinator.state.number + 1
    assert [run.ready(job, number) for job in ("zero", "east") * 2] == [None] * 4
    run.hello("west", entered=True, round=8, peers=["east", "zero"])
    replies = told(run, number, "zero", "east", "west")
    assert {"east", "west"} == set(replies["east"]["members"]) == set(replies["west"]["members"])


@pytest.mark.parametrize("order", [("zero", "east", "west"), ("east", "west", "zero")])
def test_a_round_that_one_liar_tells_leaves_numbers_for_the_next_restarts(order):
    """Rounds are counted on from the greatest number that jobs report.

    No job may report a round above reports.MOST, so a liar that reported MOST used to end all
    rounds.
    """
    last = 8
    for _ in range(100):
        rounds = {"zero": MOST, "east": last, "west": last}
        run = restarted(*order, versions=dict.fromkeys(order, last), rounds=rounds)
        last = run.coordinator.state.number + 1
        assert last < MOST / 2
        run.fragments["zero"] = [[MOST, 7], [MOST, 7]]
        assert {"east", "west"} == set(told(run, last, *order)["west"]["members"])
        run.end(last, "east", "west")


def began_alone(*with_it, seconds=1.0):
    """North began a run at a coordinator that was restarted, before east was back, which is in round 2317."""
    run = Run(*with_it, "north")
    run.whole_round(1, *with_it, "north")
    for job in (*with_it, "north"):
        run.ready(job, 2)
    run.now += seconds
    run.fragments["east"] = [[2317, 5], [2316, 5]]
    run.hello("east", entered=True, round=2317, peers=["west", "north"])
    return run


def test_a_new_job_that_came_first_after_a_restart_takes_what_the_run_has():
    run = began_alone()
    assert run.done("north", 2)["verdict"] == "void"
    run.now += TIMEOUT + 1  # west does not come back
    reply = run.ready("north", 3)
    assert (reply["verdict"], reply["from"], reply["versions"]) == ("behind", "east", [2317, 2316])
    run.fragments["north"] = [list(one) for one in run.fragments["east"]]
    run.whole_round(2318, "east", "north")


@pytest.mark.parametrize("with_it, seconds", [(["south"], 1.0), ([], TIMEOUT + 1)])
def test_later_or_where_several_agreed_a_job_of_another_run_takes_what_they_have(with_it, seconds):
    """It is not refused for ever, for its versions that were never made here."""
    run = began_alone(*with_it, seconds=seconds)
    run.end(2, *with_it, "north")
    assert run.ready("east", 3) is None
    run.now += TIMEOUT + 1  # west does not come back
    run.whole_round(3, *with_it, "north")
    reply = run.ready("east", 3)
    assert (reply["verdict"], reply["fragments"]) == ("behind", [0, 1])
    run.fragments["east"] = [list(one) for one in run.fragments["north"]]
    run.whole_round(4, *with_it, "north", "east")


def test_after_a_restart_one_honest_job_beside_one_liar_goes_on_alone_where_min_lets_it():
    versions = {"zero": 8, "east": 8}
    for least, verdict in ((1, "go"), (2, "void")):
        run = restarted("zero", "east", versions=versions, least=least)
        run.fragments["zero"] = [[10**9, 7], [10**9, 7]]
        told(run, 9, "zero", "east")
        run.now += TIMEOUT + 1
        reply = run.ready("east", 9)
        assert reply["verdict"] == verdict, reply


def test_tokens_and_lengths_out_of_proportion():
    run = Run(*THREE)
    run.ready("east", 1, tokens=10**12)
    run.ready("north", 1, norm=1e6)
    go = run.ready("west", 1)
    assert "times the others' tokens" in go["left_out"].get("east", "") or go["members"]["east"] < 1
    assert "times as long as usual" in go["left_out"]["north"]


def test_sums_are_told_with_a_salt_that_was_not_known():
    """What west tells without this round's salt may be what it was told by others."""
    run = Run(*THREE)
    run.ready("east", 1, salted=OTHER)
    run.ready("north", 1, salted=OTHER)
    go = run.ready("west", 1, salted=16 * "2")
    assert "west" not in (go or {}).get("members", {}), "it has other weights"
    second = Run(*THREE)
    second.ready("east", 1, salted=OTHER)
    second.ready("north", 1, salted=OTHER)
    report = ReadyReport(0, claims_of(second.fragments["west"]), 1, 100, 1.0, "", 16 * "2", 7)
    go = second.coordinator.next_round("ready", "west", report, second.now)
    assert set(go["members"]) == set(THREE), "a sum with another round's salt says nothing"


def test_other_sizes_are_refused():
    run = Run("east")
    with pytest.raises(HolmesError, match="it has other numbers of elements than job 'east'"):
        run.hello("west", fragments=((0, 7), (0, 7), (0, 7)))


HELLO = {
    "agreed": {},
    "maps": {"all": [0, 8, 0]},
    "addresses": ["a:1"],
    "versions": [0],
    "checksums": [""],
    "min": 1,
    "timeout": 5.0,
}


def test_reports_are_read():
    assert hello_from(dict(HELLO)).totals == {"all": 8}
    ready = {
        "round": 1,
        "fragment": 0,
        "tokens": 5.0,
        "norm": 1.0,
        "versions": [0],
        "checksums": [""],
    }
    assert ready_from(dict(ready), 1).norm == 1.0
    for change in (
        {"versions": [-1]},
        {"versions": [2**61]},
        {"checksums": ["x"]},
        {"tokens": -1.0},
        {"norm": 1e31},
        {"fragment": 1},
        {"round": 0},
        {"versions": [0, 0]},
    ):
        with pytest.raises(HolmesError):
            ready_from({**ready, **change}, 1)


@pytest.mark.parametrize(
    "maps",
    [
        {},
        {"all": []},
        {"all": [0, 8]},
        {"all": [1, 8, 0]},
        {"all": [0, 4, 0, 5, 8, 0]},
        {"all": [0, 8, 1]},
        {"all": [0, 0, 0]},
        {"all": [0, 2**61, 0]},
        {"a\x1b[31m": [0, 8, 0]},
    ],
)
def test_maps_have_no_holes(maps):
    with pytest.raises(HolmesError):
        hello_from({**HELLO, "maps": maps})

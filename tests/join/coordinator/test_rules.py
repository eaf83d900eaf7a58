"""What the coordinator decides, with a clock of our own."""

import pytest
from coordinator_rules import TIMEOUT, Run

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.state import NotInRun


def test_a_round_goes_when_all_are_ready_and_is_committed_when_all_are_done():
    run = Run("east", "west")
    assert run.ready("east", 1, tokens=300) is None
    go = run.ready("west", 1, tokens=100)
    assert (go["verdict"], go["members"], go["attempt"]) == ("go", {"east": 0.75, "west": 0.25}, 1)
    assert run.ready("east", 1) == go
    assert run.done("west", 1) is None
    check = run.done("east", 1)
    assert (check["verdict"], check["check"], check["excluded"]) == ("check", 1, {})
    assert run.done("west", 1) == check and check["salt"]
    assert run.checked("west", 1, factors={"east": 0.75, "west": 0.25}, gap=1.5) is None
    commit = {
        "verdict": "commit",
        "round": 1,
        "factors": {"east": 0.75, "west": 0.25},
        "gap": 1.5,
        "left_out": {},
    }
    assert run.checked("east", 1, factors={"east": 0.75, "west": 0.25}, gap=1.5) == commit
    assert run.checked("west", 1) == commit


def test_weights_may_be_equal():
    run = Run("east", "west", weight="equal")
    run.ready("east", 1, tokens=300)
    assert run.ready("west", 1, tokens=100)["members"] == {"east": 0.5, "west": 0.5}


def test_a_late_job_is_waited_for_until_its_timeout_and_takes_the_weights_when_it_is_back():
    run = Run("east", "west")
    assert run.ready("east", 1) is None
    run.now += TIMEOUT - 1
    assert run.ready("east", 1) is None
    run.now += 2
    assert run.ready("east", 1)["members"] == {"east": 1.0}
    assert run.end(1, "east")[0]["verdict"] == "commit"
    assert run.ready("east", 2)["members"] == {"east": 1.0}  # not waited for a second time
    run.end(2, "east")
    found = {
        "verdict": "behind",
        "round": 2,
        "from": "east",
        "incarnation": "1",
        "fragments": [0, 1],
        "versions": [1, 2],
    }
    assert run.ready("west", 1) == found
    run.fragments["west"] = [list(one) for one in run.fragments["east"]]
    assert run.ready("east", 3) is None  # waited for again
    assert set(run.ready("west", 3)["members"]) == {"east", "west"}


def test_a_job_whose_connection_ends_is_not_waited_for():
    run = Run("east", "west")
    run.ready("east", 1)
    run.coordinator.gone("west", "1", "closed")
    assert run.ready("east", 1)["members"] == {"east": 1.0}
    with pytest.raises(NotInRun):
        run.ready("west", 1)


def test_silence_is_an_end_too():
    run = Run("east", "west")
    run.coordinator.heartbeat("east", "1", {}, run.now + 40)
    run.now += 41
    run.coordinator.look(run.now)
    assert [m.state for m in run.coordinator.state.members.values()] == ["in", "gone"]


def test_a_job_lost_on_the_way_is_left_and_the_others_go_again():
    run = Run("east", "west", "south")
    for job in ("east", "west", "south"):
        run.ready(job, 1)
    assert run.done("east", 1, unreached=["south"]) is None
    run.coordinator.gone("south", "1", "closed")
    again = run.done("west", 1, unreached=["south"])
    assert (again["verdict"], again["attempt"], set(again["members"])) == (
        "go",
        2,
        {"east", "west"},
    )
    assert sum(again["members"].values()) == pytest.approx(1)
    assert run.done("east", 1, attempt=1) == again  # who still speaks of the first attempt is told
    assert [reply["verdict"] for reply in run.end(1, "east", "west", attempt=2)] == ["commit"] * 2


def exchange_fails(run, number, *jobs, attempt, unreached):
    """All jobs report `done`; unreached: job -> members that it could not reach. Return the last reply."""
    for job in jobs:
        reply = run.done(job, number, attempt, unreached.get(job, ()))
    return reply


def test_a_cut_link_between_two_jobs_makes_the_round_void():
    run = Run("east", "west")
    for job in ("east", "west"):
        run.ready(job, 1)
    both = {"east": ["west"], "west": ["east"]}
    again = exchange_fails(run, 1, "east", "west", attempt=1, unreached=both)
    assert (again["verdict"], again["relayed"]) == ("go", [["east", "west"]])
    reply = exchange_fails(run, 1, "east", "west", attempt=2, unreached=both)
    assert reply["verdict"] == "void" and "could not exchange: east, west" in reply["why"]
    run.whole_round(2, "east", "west")  # nothing is lost: both go on from the same versions


def test_of_three_the_one_that_the_others_cannot_reach_is_left():
    run = Run("east", "west", "south")
    jobs = ("east", "west", "south")
    for job in jobs:
        run.ready(job, 1)
    cut = {"east": ["south"], "west": ["south"], "south": ["east", "west"]}
    assert exchange_fails(run, 1, *jobs, attempt=1, unreached=cut)["attempt"] == 2
    assert exchange_fails(run, 1, *jobs, attempt=2, unreached=cut) == {
        "verdict": "void",
        "round": 1,
        "why": "the round went on without this job",
        "left_out": {},
    }
    assert set(run.done("east", 1)["members"]) == {"east", "west"}


def test_a_member_that_is_silent_after_the_exchange_is_given_up():
    run = Run("east", "west")
    for job in ("east", "west"):
        run.ready(job, 1)
    assert run.done("east", 1) is None
    run.now += 1.25 * TIMEOUT + 1  # longer than an exchange waits for data
    again = run.done("east", 1)
    assert (again["verdict"], again["attempt"], again["members"]) == ("go", 2, {"east": 1.0})
    assert run.done("west", 1)["verdict"] == "void"


def test_fewer_than_min_makes_a_round_void_and_training_goes_on():
    run = Run("east", "west", least=2)
    run.ready("east", 1)
    run.coordinator.gone("west", "1", "closed")
    assert run.ready("east", 1)["why"] == "1 of min=2 jobs"
    assert run.ready("east", 2)["verdict"] == "void"


def test_jobs_that_begin_together_begin_with_the_same_round_though_one_hears_it_later():
    run = Run(least=2)
    run.hello("east")
    run.hello("west")
    assert run.enter("east")["round"] == 0
    assert run.ready("east", 1) is None  # it waits for west
    assert run.enter("west")["round"] == 0
    assert run.ready("west", 1)["verdict"] == "go"


def test_one_job_alone_that_waits_for_two_is_told():
    run = Run(least=2)
    run.hello("east")
    assert run.enter("east") is None
    run.now += TIMEOUT + 1
    with pytest.raises(
        HolmesError, match="'east' has waited 30 s for min=2 jobs, but there is only east"
    ):
        run.enter("east")


def test_what_is_not_finite_or_far_out_is_left_out_and_named():
    run = Run("east", "west", "south")
    run.ready("east", 1, norm=1.1)
    run.ready("west", 1, norm=None)
    go = run.ready("south", 1, norm=0.9)
    assert go["members"] == {"east": 0.5, "west": 0.0, "south": 0.5}
    assert go["left_out"] == {"west": "its pseudo-gradient is not finite"}
    run.end(1, "east", "west", "south")
    run.whole_round(2, "east", "west", "south")
    run.ready("east", 3, norm=50.0)
    run.ready("west", 3)
    assert "50 times as long as usual" in run.ready("south", 3)["left_out"]["east"]


def test_when_all_are_longer_than_usual_it_is_the_training():
    run = Run("east", "west")
    run.whole_round(1, "east", "west")
    run.whole_round(2, "east", "west")
    run.whole_round(3, "east", "west", norm=100.0)


def test_two_jobs_with_one_name():
    run = Run("east")
    assert run.hello("east", incarnation="2") is None
    run.now += 1
    run.coordinator.heartbeat("east", "1", {}, run.now)  # it lives
    with pytest.raises(HolmesError, match="a job named 'east' in this run already"):
        run.hello("east", incarnation="2")


def test_a_job_that_is_back_before_its_last_incarnation_is_missed_waits_until_that_is_gone():
    run = Run("east", "west")
    run.coordinator.heartbeat("east", "1", {}, run.now)
    run.now += 1  # its host has lost power: nothing closes the connection
    assert run.hello("east", incarnation="2") is None
    for _ in range(9):
        run.now += 1
        run.coordinator.heartbeat("west", "1", {}, run.now)
        run.coordinator.look(run.now)
        assert run.hello("east", incarnation="2") is None
    run.now += 60
    run.coordinator.look(run.now)
    assert run.hello("east", incarnation="2")["state"] == "waiting"
    (line,) = [event for event in run.coordinator.state.events if "asks for the name east" in event]
    assert line.endswith("heard 1 s ago: waiting")


def test_jobs_that_differ_are_told_in_what():
    run = Run("east")
    with pytest.raises(
        HolmesError,
        match="'west' cannot join: it differs from job 'east' in model .'xyz' here, 'abc' in east",
    ):
        run.hello("west", agreed={"outer": run.outer, "model": "xyz"})
    with pytest.raises(HolmesError, match=r"outer limit \(3 here, 10.0 in east\)"):
        run.hello("west", agreed={"outer": {**run.outer, "limit": 3}, "model": "abc"})


def test_other_initial_weights_are_taken_from_the_first_job():
    run = Run("east")
    run.hello("west", fragments=((0, 7), (0, 8)))
    found = {
        "verdict": "behind",
        "round": 0,
        "from": "east",
        "incarnation": "1",
        "fragments": [1],
        "versions": [0],
    }
    assert run.enter("west") == found


def test_a_job_that_could_not_take_weights_is_told_another_donor():
    """Its connection to the first one may be broken: it was named again and again."""
    run = Run("east", "north", "south")
    run.hello("west", fragments=((0, 7), (0, 8)))
    donors = [run.enter("west")["from"] for _ in range(5)]
    assert donors == ["east", "north", "south", "east", "north"]


def test_a_donor_with_a_failed_pair_is_told_after_the_others():
    """The pair may have failed only because the donor said so, long ago."""
    run = Run("east", "north")
    failed = {frozenset(("east", "west")): frozenset(("east",))}
    run.coordinator.state.failed_pairs.separate(failed, 1.0, run.now)
    run.hello("west", fragments=((0, 7), (0, 8)))
    assert [run.enter("west")["from"] for _ in range(3)] == ["north", "east", "north"]


def test_the_same_version_with_other_bits_is_taken_from_the_first_job():
    run = Run("east", "west")
    run.fragments["west"][0] = [0, 9]
    assert run.ready("east", 1) is None
    assert run.ready("west", 1) is None  # until the round has ended that is open
    assert run.ready("east", 1)["members"] == {"east": 1.0}
    run.end(1, "east")
    assert run.ready("west", 1)["fragments"] == [0]


def test_a_job_that_is_behind_takes_all_once_the_round_without_it_has_ended():
    """Taken before, that round's fragment would be old again when it is taken, and so for ever."""
    run = Run("east", "north", "west")
    run.whole_round(1, "east", "north", "west")
    run.fragments["west"][0] = [0, 7]  # as if it had not heard of it
    assert run.ready("east", 2) is None
    assert run.ready("west", 2) is None
    assert run.ready("north", 2)["verdict"] == "go" and run.ready("east", 2)["verdict"] == "go"
    assert run.ready("west", 2) is None
    run.end(2, "east", "north")
    found = run.ready("west", 2)
    assert (found["verdict"], found["round"], found["fragments"]) == ("behind", 2, [0, 1])
    run.fragments["west"] = [list(one) for one in run.fragments[found["from"]]]
    assert run.ready("north", 3) is None and run.ready("east", 3) is None  # it is waited for
    assert set(run.ready("west", 3)["members"]) == {"east", "north", "west"}


def test_a_job_that_is_behind_and_ahead_of_the_others_waits_for_the_round_that_begins_without_it():
    """As above: it would be behind again at every round, if it always came first."""
    run = Run("east", "west")
    run.whole_round(1, "east", "west")
    run.fragments["west"][0] = [0, 7]
    assert run.ready("west", 2) is None
    assert run.ready("east", 2)["members"] == {"east": 1.0}
    assert run.ready("west", 2) is None
    run.end(2, "east")
    found = run.ready("west", 2)
    assert (found["verdict"], found["round"], found["fragments"]) == ("behind", 2, [0, 1])
    run.fragments["west"] = [list(one) for one in run.fragments["east"]]
    assert run.ready("west", 3) is None and set(run.ready("east", 3)["members"]) == {"east", "west"}


@pytest.mark.parametrize(
    "what", ["the other begins none", "the other is gone", "the other waits too"]
)
def test_a_job_that_is_behind_does_not_wait_for_a_round_that_nobody_begins(what):
    run = Run("east", "west")
    for number in (1, 2):
        run.whole_round(number, "east", "west")
    run.fragments["west"][0] = [0, 7]
    assert run.ready("west", 3) is None
    if what == "the other begins none":
        run.now += 2 * TIMEOUT + 1
    elif what == "the other is gone":
        run.coordinator.gone("east", "1", "closed")
    else:
        run.fragments["east"][1] = [0, 7]
        assert run.ready("east", 3)["fragments"] == [1]
        return
    assert run.ready("west", 3)["verdict"] in ("behind", "skip")


def test_a_job_that_is_behind_does_not_wait_for_a_round_that_nobody_ends():
    run = Run("east", "west")
    run.fragments["west"][0] = [0, 9]
    assert run.ready("east", 1) is None and run.ready("west", 1) is None
    run.now += 2 * TIMEOUT + 1
    assert run.ready("west", 1)["verdict"] == "behind"
    run = Run("east", "west")
    run.fragments["west"][0] = [0, 9]
    assert run.ready("east", 1) is None and run.ready("west", 1) is None
    run.coordinator.gone("east", "1", "closed")
    assert run.ready("west", 1)["verdict"] == "skip"


def test_a_restarted_coordinator_learns_from_its_jobs():
    old = Run("east", "west")
    old.whole_round(1, "east", "west")
    new = Run()
    new.fragments = old.fragments
    new.hello("east", entered=True, round=1, peers=["west"])
    assert new.ready("east", 2) is None  # west is awaited
    new.hello("west", entered=True, round=1, peers=["east"])
    assert new.ready("east", 2) is None
    assert set(new.ready("west", 2)["members"]) == {"east", "west"}


def test_a_commit_that_one_job_did_not_hear_of_is_made_up_for():
    old = Run("east", "west")
    for job in ("east", "west"):
        old.ready(job, 1)
    old.done("east", 1)
    old.done("west", 1)
    old.checked("east", 1)
    old.checked("west", 1)  # west steps; then the coordinator is killed before east hears of it
    new = Run()
    new.fragments = old.fragments
    new.hello("east", entered=True, round=0, peers=["west"])
    new.hello("west", entered=True, round=1, peers=["east"])
    assert new.done("east", 1)["verdict"] == "void"
    assert new.ready("east", 2) is None  # until west's round has ended
    assert new.ready("west", 2)["members"] == {"west": 1.0}
    new.end(2, "west")
    found = {
        "verdict": "behind",
        "round": 2,
        "from": "west",
        "incarnation": "1",
        "fragments": [0, 1],
        "versions": [1, 2],
    }
    assert new.ready("east", 2) == found


def test_all_jobs_resumed_from_an_older_checkpoint_go_on_from_there():
    run = Run("east", "west")
    for number in (1, 2, 3, 4):
        run.whole_round(number, "east", "west")
    for job in ("east", "west"):
        run.coordinator.gone(job, "1", "closed")
    run.fragments = {job: [[1, 1001], [2, 1002]] for job in ("east", "west")}
    for job in ("east", "west"):
        run.hello(job, incarnation="2")
    assert [run.enter(job)["verdict"] for job in ("east", "west")] == ["in", "in"]
    assert run.ready("east", 5) is None and run.ready("west", 5)["verdict"] == "go"


def test_a_job_resumed_from_an_older_checkpoint_takes_what_the_others_have():
    run = Run("east", "west")
    for number in (1, 2, 3):
        run.whole_round(number, "east", "west")
    run.coordinator.gone("west", "1", "closed")
    run.fragments["west"] = [[1, 1001], [2, 1002]]
    run.hello("west", incarnation="2")
    found = {
        "verdict": "behind",
        "round": 3,
        "from": "east",
        "incarnation": "1",
        "fragments": [0],
        "versions": [3],
    }
    assert run.enter("west") == found


def test_a_job_behind_in_numbers_alone_skips_to_the_round_that_runs():
    run = Run("east", "west", least=2)
    run.coordinator.gone("west", "1", "closed")
    assert run.ready("east", 1)["verdict"] == "void" and run.ready("east", 2)["verdict"] == "void"
    run.hello("west", incarnation="2")
    run.enter("west")
    assert run.ready("west", 1) == {"verdict": "skip", "round": 2}
    assert run.ready("east", 3) is None and run.ready("west", 3)["verdict"] == "go"


def test_a_job_that_returns_with_a_later_round_voids_none_of_the_others():
    """A member that was dropped came back at once, and each return voided the open round."""
    run = Run("east", "west", "zero")
    assert run.ready("east", 1) is None
    run.coordinator.gone("zero", "1", "dropped")
    run.hello("zero", entered=True, round=5)
    state = run.coordinator.state
    assert state.number == 1 and not state.rounds[1].outcome


def test_a_round_whose_members_are_all_gone_keeps_no_newcomer_from_the_next():
    """The only job was revoked during its round; all that joined later skipped rounds for ever."""
    run = Run("east")
    run.whole_round(1, "east")
    assert run.ready("east", 2)["verdict"] == "go"
    run.coordinator.gone("east", "1", "it was revoked")
    run.hello("west")
    assert run.enter("west") == {"verdict": "in", "round": 2}
    assert run.ready("west", 3)["members"] == {"west": 1.0}
    assert [reply["verdict"] for reply in run.end(3, "west")] == ["commit"]

"""When rolling rounds begin, with a clock of our own."""

from coordinator_rules import claims_of

from holmes_ext.join.coordinator.coordinator import Coordinator
from holmes_ext.join.coordinator.lock_step import LockStepRounds
from holmes_ext.join.coordinator.reports import CheckedReport, DoneReport, Hello, NextReport, Offer
from holmes_ext.join.coordinator.rolling import RollingRounds

CLAIMS = claims_of([(0, 7), (0, 7)])


class Run:
    """A coordinator, and jobs that have begun."""

    def __init__(self, *jobs, grace=3.0):
        self.now = 100.0
        self.coordinator = Coordinator(self.now, policies=(LockStepRounds, RollingRounds))
        settings = {"outer": {"rounds": "async", "grace": grace}}
        for job in jobs:
            hello = Hello(settings, {"all": (0, 8, 0)}, ("a:1",), CLAIMS, min=1, timeout=30.0)
            self.coordinator.hello(job, "1", hello, self.now)
        for job in jobs:
            assert self.coordinator.enter(job, self.now)["verdict"] == "in"

    def next(self, job, *fragments):
        """Ask for the next round, with an offer of each of these fragments."""
        offers = {fragment: Offer(fragment, tokens=8, norm=1.0) for fragment in fragments}
        return self.coordinator.next_round("next", job, NextReport(CLAIMS, offers), self.now)

    def exchange(self, number, *jobs):
        """Report that the exchange and the check of a round succeeded, for each of its members."""
        digests = dict.fromkeys(jobs, "0" * 16)
        factors = dict.fromkeys(jobs, 1 / len(jobs))
        for job in jobs:
            self.coordinator.done(job, DoneReport(number, 1), self.now)
        report = CheckedReport(number, 1, 1, digests, factors)
        for _ in range(2):  # the first job has its answer once the last one has reported
            replies = [self.coordinator.checked(job, report, self.now) for job in jobs]
        assert [reply["verdict"] for reply in replies] == ["commit"] * len(jobs)


def test_a_round_begins_at_once_when_all_jobs_offer_the_fragment():
    run = Run("east", "west")
    assert run.next("west") is None  # it is there, and offers nothing yet
    assert run.next("east", 0) is None
    assert run.next("west", 0)["members"] == {"east": 0.5, "west": 0.5}
    assert run.next("east", 0)["fragment"] == 0


def test_a_job_that_is_not_ready_receives_after_the_grace():
    run = Run("east", "north", "west")
    assert run.next("west") is None and run.next("east", 1) is None
    assert run.next("north", 1) is None  # the quorum is reached
    run.now += 2.0
    assert run.next("west") is None and run.next("east", 1) is None
    run.now += 1.0
    assert run.next("north", 1)["members"] == {"east": 0.5, "north": 0.5, "west": 0.0}


def test_a_fragment_that_too_few_jobs_offer_waits():
    run = Run("east", "north", "west", grace=0)
    assert run.next("east", 0) is None and run.next("north", 1) is None
    assert run.next("west", 1)["fragment"] == 1


def test_an_offer_counts_in_one_round():
    """The job has no such pseudo-gradient any more until it offers the next one."""
    run = Run("east", "west")
    assert run.next("west", 0, 1) is None
    assert run.next("east", 0)["members"] == {"east": 0.5, "west": 0.5}
    run.exchange(1, "east", "west")
    claims = claims_of([(1, 7), (0, 7)])
    again = NextReport(claims, {0: Offer(0, tokens=8, norm=1.0)})
    assert run.coordinator.next_round("next", "east", again, run.now) is None
    run.now += 4.0  # the grace period is over
    reply = run.coordinator.next_round("next", "east", again, run.now)
    assert reply["members"] == {"east": 1.0, "west": 0.0}


def test_an_unusable_offer_is_forgotten():
    run = Run("east", "west", grace=0)
    unusable = NextReport(CLAIMS, {0: Offer(0, tokens=8, norm=None, why="it is not finite")})
    assert run.coordinator.next_round("next", "east", unusable, run.now)["verdict"] == "void"
    reply = run.next("west", 0)
    assert "east" not in reply["left_out"]


def behind(run, job, versions):
    """Ask for a round with these versions, which are not the others'; return the verdict."""
    claims = claims_of([(version, 7) for version in versions])
    reply = run.coordinator.next_round("next", job, NextReport(claims, {}), run.now)
    return reply and reply["verdict"]


def run_with_a_taker(times):
    """Return a run of three jobs in which west has been told to take weights so often."""
    run = Run("east", "north", "west", grace=0)
    run.next("west")
    for _ in range(times):
        run.coordinator.state.members["west"].is_up_to_date = False
        assert behind(run, "west", (0, -1)) == "behind"
    return run


def begins(run):
    """Return whether a round begins for which all jobs but west are ready."""
    run.next("east", 0)
    return run.next("north", 0) is not None


def test_a_round_waits_for_a_job_that_was_behind_again_and_takes_weights():
    """It takes longer to take a fragment than until the next round: it was behind for ever."""
    assert begins(run_with_a_taker(1)), "the first time, it may take all weights, which lasts long"
    run = run_with_a_taker(2)
    assert not begins(run)
    assert run.next("west")["members"].keys() == {"east", "north", "west"}


def test_a_round_does_not_wait_long_for_a_job_that_takes_weights():
    run = run_with_a_taker(2)
    run.now += 7.0
    assert not begins(run)
    run.now += 1.0
    assert begins(run)


def test_rounds_do_not_wait_again_and_again_for_a_job_that_takes_weights():
    assert not begins(run_with_a_taker(5))
    assert begins(run_with_a_taker(6))


def run_after_a_round():
    """Return a run of three jobs whose first round, of fragment 0, has just ended."""
    run = Run("east", "north", "west", grace=0)
    for job in ("east", "north", "west"):
        assert run.next(job) is None
    assert run.next("east", 0) is None and run.next("north", 0) is not None
    run.now += 10.0  # the jobs exchange, and send no requests
    run.exchange(1, "east", "north", "west")
    return run


def members_of_second_round(run, job, *fragments):
    """Ask for a round after the first one, with an offer of each of these fragments; return its members."""
    offers = {fragment: Offer(fragment, tokens=8, norm=1.0) for fragment in fragments}
    report = NextReport(claims_of([(1, 7), (0, 7)]), offers)
    reply = run.coordinator.next_round("next", job, report, run.now)
    return reply and set(reply["members"])


def test_the_first_jobs_after_a_round_do_not_begin_the_next_one_without_the_others():
    run = run_after_a_round()
    assert members_of_second_round(run, "east", 1) is None
    assert members_of_second_round(run, "north", 1) is None
    run.now += 0.5
    assert members_of_second_round(run, "west") == {"east", "north", "west"}


def test_a_round_does_not_wait_long_for_a_member_of_the_last_one():
    run = run_after_a_round()
    run.now += 1.9
    assert members_of_second_round(run, "east", 1) is None
    assert members_of_second_round(run, "north", 1) is None
    run.now += 0.1
    assert members_of_second_round(run, "east", 1) == {"east", "north"}


def test_a_round_does_not_wait_for_a_member_of_the_last_one_that_is_gone():
    run = run_after_a_round()
    run.coordinator.gone("west", "1", "closed")
    assert members_of_second_round(run, "east", 1) is None
    assert members_of_second_round(run, "north", 1) == {"east", "north"}

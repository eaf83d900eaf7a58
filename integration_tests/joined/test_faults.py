"""Tests joined jobs with one fault at a time; soak.py has random faults.

The other jobs must continue, a job that died must come back with their weights, nothing may hang, and all
jobs must have the same bits after the same round.
"""

import json
import signal
import threading
import time

import pytest
from joined_jobs import coordinator
from waiting import await_

from integration_tests.jobs import some
from integration_tests.joined.faulty import (
    LIES,
    OUTER,
    POINTS,
    TIMEOUT_S,
    Fault,
    Job,
    check,
    start_server,
)

#: Seconds that a test waits at most. A busy machine may need most of them.
PATIENCE_S = 120


@pytest.fixture(scope="module", autouse=True)
def server_of_processes():
    start_server()


@pytest.fixture
def jobs(tmp_path):
    """Return a function that starts a joined job; jobs that still run are killed after the test."""
    started = []

    def start(name, port, **more):
        more.setdefault("outer", f"min=1,{OUTER}")
        job = Job(tmp_path, name, port, **more)
        started.append(job)
        return job.start()

    yield start
    for job in started:
        job.kill()


def told(job, key):
    """Return the values of a key in the log of a job."""
    return [line[key] for line in job.lines if key in line]


def together(job):
    """Return the number of rounds that this job has committed with other jobs."""
    commits = [line for line in job.lines if line.get("verdict") == "commit"]
    return sum(len(line["jobs"]) > 1 for line in commits)


def run_on(job, count=2):
    """Wait until the job has committed `count` more rounds with other jobs, or has ended."""
    before = together(job)
    await_(
        lambda: together(job) >= before + count or job.ended,
        PATIENCE_S,
        f"rounds of job {job.name} with others",
    )


@pytest.mark.parametrize("point", POINTS)
def test_the_function_of_a_point_exists(point):
    owner, name, _, _ = POINTS[point]
    assert callable(getattr(owner, name))


@pytest.mark.parametrize(
    "version, later_s, agree",
    [(3, 5.0, False), (3, 5.0, True), (3, 600.0, False), (0, 5.0, False)],
)
def test_check_finds_different_bits_in_one_run(tmp_path, version, later_s, agree):
    """The version of another run (much later), and the weights before training, may differ."""
    for job, time_, checksum in (("east", 100.0, 7), ("west", 100.0 + later_s, 7 if agree else 8)):
        line = {"anchor": 1, "version": version, "how": "replace", "sum": checksum, "time": time_}
        (tmp_path / f"{job}.1.0.jsonl").write_text(json.dumps(line) + "\n")
    if version == 3 and later_s < 60 and not agree:
        with pytest.raises(AssertionError, match="fragment 1, version 3: different bits"):
            check(tmp_path, [])
    else:
        check(tmp_path, [])


DEATHS = {
    "at the start": Fault("enter", 1, "kill"),
    "just in": Fault("entered", 1, "kill"),
    "between rounds": Fault("step", 10, "kill"),
    "before it reports": Fault("ready", 3, "kill"),
    "when the round is open": Fault("go", 3, "kill"),
    "in the exchange": Fault("exchange", 3, "kill"),
    "after the exchange": Fault("exchanged", 3, "kill"),
    "before it tells": Fault("done", 3, "kill"),
    "when the round is committed": Fault("verdict", 3, "kill"),
    "when what came is compared": Fault("check", 3, "kill"),
    "before it tells what it compared": Fault("checked", 3, "kill"),
    "before the outer step": Fault("apply", 3, "kill"),
    "before weights are written": Fault("write", 4, "kill"),
    "rank 0 of two": Fault("exchanged", 3, "kill"),
    "rank 1 of two": Fault("exchanged", 3, "kill", 1),
}


@pytest.mark.parametrize("when", some(DEATHS, "in the exchange"))
def test_killed_and_back(when, jobs, tmp_path):
    ranks = 2 if "of two" in when else 1
    with coordinator() as server:
        east = jobs("east", server.port, steps=400)
        west = jobs("west", server.port, fault=DEATHS[when], ranks=ranks, seed=1)
        assert west.wait(PATIENCE_S) != 0  # status of the killed rank, or of a rank that lost it
        assert -signal.SIGKILL in [process.exitcode for process in west.processes]
        reached = east.made
        await_(lambda: east.made > reached + 8, PATIENCE_S, "east's going on alone")
        west.start()  # its second incarnation has no fault
        run_on(east)
        assert west.wait(PATIENCE_S) == 0
        east.kill()
    assert together(west) >= 2
    check(tmp_path, server.told)


@pytest.mark.parametrize("point", some(["take", "taken"]))
def test_killed_while_it_takes_weights(point, jobs, tmp_path):
    with coordinator() as server:
        east = jobs("east", server.port, steps=400)
        await_(lambda: east.made > 8, PATIENCE_S, "east's start")
        west = jobs("west", server.port, fault=Fault(point, 2, "kill"), seed=1)
        assert west.wait(PATIENCE_S) == -signal.SIGKILL
        west.start()
        run_on(east)
        assert west.wait(PATIENCE_S) == 0
        east.kill()
    check(tmp_path, server.told)


@pytest.mark.parametrize("lie", some(LIES))
def test_a_liar_over_tls(lie, jobs, tmp_path):
    """One of three jobs lies; the other two end with the same bits."""
    faults = {"east": None, "north": None, "west": Fault("step", 9, lie)}
    with coordinator() as server:
        east, north, west = (
            jobs(name, server.port, fault=fault, seed=seed, outer=f"min=2,{OUTER}")
            for seed, (name, fault) in enumerate(faults.items())
        )
        at_end(east, north)
        west.kill()
    words = {"flip": "points another way", "claim": "cannot be of round", "accuse": "a lie"}[lie]
    assert any(words in line and "west" in line for line in server.told), server.told
    assert together(east) >= 10
    check(tmp_path, server.told)


def at_end(*jobs):
    """Wait for the end of the jobs, and assert that their status is 0."""
    assert [job.wait(PATIENCE_S) for job in jobs] == [0] * len(jobs)


@pytest.mark.parametrize("point", some(["give"]))
def test_the_giver_is_killed(point, jobs, tmp_path):
    """The job that gives its weights to a new one is killed.

    The new job joins with the weights of the third job, or ends with a message; the third job continues.
    """
    patient = OUTER.replace(f"timeout={TIMEOUT_S}", "timeout=60")  # until north is there
    with coordinator() as server:
        east = jobs(
            "east", server.port, fault=Fault(point, 2, "kill"), outer=f"min=2,{patient}", steps=400
        )
        # The first job of a run gives its weights to jobs that join.
        await_(lambda: any("east is here" in event for event in server.told), PATIENCE_S, "east")
        north = jobs("north", server.port, steps=400, seed=2)
        run_on(north)
        west = jobs("west", server.port, seed=1)
        assert east.wait(PATIENCE_S) == -signal.SIGKILL
        if west.wait(PATIENCE_S):
            west.start()  # as its launcher would
            assert west.wait(PATIENCE_S) == 0
        assert together(west) and not north.ended
        north.kill()
    check(tmp_path, server.told)


STOPS = {
    "between rounds": Fault("step", 9, "stop"),
    "in the exchange": Fault("exchange", 3, "stop"),
    "before it tells": Fault("done", 3, "stop"),
    "when the round is committed": Fault("verdict", 3, "stop"),
}


@pytest.mark.parametrize("when", some(STOPS))
def test_stopped_for_longer_than_the_timeout(when, jobs, tmp_path):
    with coordinator() as server:
        east = jobs("east", server.port, steps=400)
        west = jobs("west", server.port, fault=STOPS[when], seed=1)
        await_(lambda: told(west, "fault"), PATIENCE_S, "the fault")
        reached = east.made
        await_(lambda: east.made > reached + 8, PATIENCE_S, "east's going on alone")
        west.signal(signal.SIGCONT)
        run_on(east)
        assert west.wait(PATIENCE_S) == 0
        east.kill()
    check(tmp_path, server.told)


LINKS = {
    "reset": Fault("exchange", 3, "reset"),
    "carries nothing for a while": Fault("exchange", 3, "hole"),
    "is slow for a while": Fault("exchange", 3, "slow"),
}


@pytest.mark.parametrize("what", some(LINKS, "reset"))
def test_the_link(what, jobs, tmp_path):
    with coordinator() as server:
        east, west = jobs("east", server.port), jobs("west", server.port, fault=LINKS[what], seed=1)
        at_end(east, west)
    assert together(east) >= 10
    check(tmp_path, server.told)


@pytest.mark.parametrize("what", some(["nan", "far"], "nan"))
def test_wrong_values_do_not_reach_the_others(what, jobs, tmp_path):
    with coordinator() as server:
        outer = f"min=1,limit=5,{OUTER}"
        east = jobs("east", server.port, outer=outer, steps=80)
        west = jobs(
            "west", server.port, fault=Fault("step", 41, what), outer=outer, steps=80, seed=1
        )
        at_end(east, west)
    assert any("west is left out" in event for event in server.told)
    assert all(loss == loss and loss < 10 for loss in told(east, "loss"))
    assert told(west, "loss")[-1] < 10, "it goes on with the others' weights"
    check(tmp_path, server.told)


@pytest.mark.parametrize("away_s", some([0.2, TIMEOUT_S + 2], 0.2))
@pytest.mark.parametrize("times", some([1, 2], 1))
def test_the_coordinator_is_killed_and_restarted(times, away_s, jobs, tmp_path):
    events = []
    with coordinator() as server:
        port = server.port
        east, west = jobs("east", port, steps=300), jobs("west", port, steps=300, seed=1)
        run_on(east)
    events += server.told
    for restart in range(times):
        time.sleep(away_s)
        with coordinator(port) as server:
            run_on(east, 3)
            if restart == times - 1:
                at_end(east, west)
        events += server.told
    check(tmp_path, events)


@pytest.mark.parametrize("point", some(["go", "exchanged", "verdict"]))
def test_the_coordinator_is_killed_in_a_round(point, jobs, tmp_path):
    """One job is stopped in a round, and continues with another coordinator."""
    with coordinator() as server:
        port = server.port
        events = server.told
        east = jobs("east", port, steps=200)
        west = jobs("west", port, steps=200, fault=Fault(point, 4, "stop"), seed=1)
        await_(lambda: told(west, "fault"), PATIENCE_S, "the fault")
    with coordinator(port) as server:
        west.signal(signal.SIGCONT)
        at_end(east, west)
    assert together(west) > 10
    check(tmp_path, [*events, *server.told])


@pytest.mark.parametrize("what", some(["for good"]))
def test_the_coordinator_is_gone(what, jobs, tmp_path):
    with coordinator() as server:
        east, west = jobs("east", server.port), jobs("west", server.port, seed=1)
        run_on(east)
    at_end(east, west)
    assert "void" in told(east, "verdict")
    check(tmp_path, server.told)


@pytest.mark.parametrize("what", some(["late", "older checkpoint"]))
def test_a_job_that_comes_later(what, jobs, tmp_path):
    with coordinator() as server:
        east = jobs("east", server.port, steps=400)
        west = jobs("west", server.port, steps=400, seed=1)
        has_checkpoint = what == "older checkpoint"
        if has_checkpoint:
            north = jobs("north", server.port, steps=14, save=7, seed=2)
            assert north.wait(PATIENCE_S) == 0
        run_on(east, 4)
        north = jobs("north", server.port, load=has_checkpoint, seed=2)
        assert north.wait(PATIENCE_S) == 0
        assert together(north) > 10
        east.kill()
        west.kill()
    check(tmp_path, server.told)


@pytest.mark.parametrize("what", some(["full disk"]))
def test_a_full_disk_while_it_saves(what, jobs, tmp_path):
    """The job dies while it saves, as without holmes; its former checkpoint can still be loaded."""
    with coordinator() as server:
        east = jobs("east", server.port, steps=400)
        west = jobs("west", server.port, save=10, disk_bytes=100_000, seed=1)
        assert west.wait(PATIENCE_S) not in (0, None)
        back = jobs("west", server.port, load=True, seed=1)
        assert back.wait(PATIENCE_S) == 0 and not east.ended
        # The first start trained 20 steps; the second one resumes from the checkpoint of step 10.
        assert told(back, "step")[20] == 11
        east.kill()
    check(tmp_path, server.told)


@pytest.mark.parametrize("ahead_s", some([-5e5, 5e5]))
def test_clocks_apart(ahead_s, jobs, tmp_path):
    with coordinator() as server:
        east, west = jobs("east", server.port), jobs("west", server.port, ahead_s=ahead_s, seed=1)
        at_end(east, west)
    assert together(east) > 10
    check(tmp_path, server.told)


def test_no_process_or_thread_is_left():
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith("holmes")}

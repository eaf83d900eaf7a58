"""Tests joined jobs that are revoked while they train, and a member who runs under several names."""

import pytest
from joined_jobs import coordinator
from waiting import await_

from integration_tests.jobs import some
from integration_tests.joined.accounting import account_of, members_of
from integration_tests.joined.faulty import LIES, OUTER, Job, check, start_server
from integration_tests.joined.members import CROWD, WAYS, Crowd, Members

#: Seconds that a test waits at most. A busy machine may need most of them.
PATIENCE_S = 120


@pytest.fixture(scope="module", autouse=True)
def server_of_processes():
    start_server()


@pytest.fixture
def run(tmp_path):
    """Start a coordinator and three invited jobs; check their logs after the test."""
    jobs = []
    with coordinator() as server:
        members = Members(tmp_path, server.port)
        for seed, name in enumerate(("east", "west", "north")):
            job = Job(tmp_path, name, server.port, steps=10**9, seed=seed, outer=f"min=1,{OUTER}")
            jobs.append(members.invite(job).start())
        try:
            rounds_of(server, {"east", "west", "north"})
            yield server, members, jobs
        finally:
            for job in jobs:
                job.kill()
    check(tmp_path, server.told)


def rounds_of(server, names, count=2):
    """Wait until these jobs have committed `count` more rounds together."""

    def rounds():
        return sum(names <= members_of(line) for line in server.told)

    before = rounds()
    await_(lambda: rounds() >= before + count, PATIENCE_S, f"rounds of {', '.join(sorted(names))}")


@pytest.mark.parametrize("name", some(["north", "north-2"], "north"))
def test_a_job_is_revoked_and_invited_again(name, run):
    server, members, jobs = run
    east, west, north = jobs
    members.revoke([north], server)
    rounds_of(server, {"east", "west"})
    assert not any(process.exitcode for process in north.processes), "it trains on alone"
    north.kill()
    assert north.start().wait(PATIENCE_S) != 0, "its old certificate is refused"
    north.name = name
    members.invite(north).start()
    rounds_of(server, {"east", "west", name})
    account = account_of([server.told], ["east", "west", "north", "north-2"])
    assert account.broken_promises == []
    assert account.jobs["north: revoked"] >= 2


@pytest.mark.parametrize("way", some(WAYS, "certificate of all names"))
@pytest.mark.parametrize("lie", some(sorted(set(LIES) - {"claim"}), "accuse"))
def test_a_member_of_several_names_has_one_vote(way, lie, run):
    server, members, jobs = run
    names = [f"crowd-{number}" for number in range(1, CROWD + 1)]
    crowd = Crowd(members, jobs[0], names, way, lie).start()
    try:
        refused = 0

        def is_refused_and_out():
            """Return whether one name was in the run and left out, and all others were refused."""
            nonlocal refused
            refused += sum(job.ended for job in crowd.jobs)
            crowd.restart_ended()
            is_left_out = any("job crowd-" in line and "left out" in line for line in server.told)
            return is_left_out and refused >= 2 * CROWD

        await_(is_refused_and_out, PATIENCE_S, "the crowd's lies")
        crowd.end(server)
    finally:
        crowd.kill()
    rounds_of(server, {"east", "west", "north"})
    account = account_of([server.told], ["east", "west", "north", *names])
    assert account.broken_promises == [] and account.unexplained == []

"""Memory of `holmes join serve`: what jobs describe of themselves, and messages that never end."""

import contextlib
import sys
from array import array

import pytest
from coordinator_rules import Run
from joined_jobs import coordinator, place_at
from waiting import await_, soon

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator import state as state_module
from holmes_ext.join.coordinator.client import new_incarnation
from holmes_ext.join.coordinator.reports import checked_from, done_from, hello_from
from holmes_ext.join.sockets import requests

RANGES = 10_000


def hello(ranges=RANGES, **more):
    numbers = [number for start in range(ranges) for number in (start, start + 1, 0)]
    return {
        "agreed": {"outer": {}},
        "maps": {"all": numbers},
        "addresses": ["10.0.0.1:5"],
        "versions": [0],
        "checksums": [""],
        "min": 1,
        "timeout": 30.0,
        **more,
    }


def called(server, job="zero"):
    purpose = {"purpose": "job", "job": job, "incarnation": new_incarnation()}
    return place_at(job, server.port).call(purpose, soon())


def test_shard_maps_are_kept_as_arrays():
    """A tuple of numbers takes 40 bytes for each: the longest hello kept 169 MB."""
    kept = hello_from(hello())
    assert isinstance(kept.maps["all"], array) and kept.totals == {"all": RANGES}
    assert sys.getsizeof(kept.maps["all"]) < 9 * 3 * RANGES
    assert kept.memory_bytes >= 8 * 3 * RANGES


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": ["10.0.0.1:5"] * (2**16 + 1)},
        {"versions": [0] * 5000, "checksums": [""] * 5000},
    ],
)
def test_a_job_describes_no_more_ranks_or_fragments_than_there_can_be(change):
    with pytest.raises(HolmesError, match="entries, more than"):
        hello_from(hello(1, **change))


def test_a_report_names_no_more_jobs_than_a_run_can_have():
    names = [f"job{number}" for number in range(65)]
    done = {"round": 1, "attempt": 1}
    checked = {**done, "check": 1}
    for read, report in (
        (done_from, {**done, "unreached": names}),
        (done_from, {**done, "faults": dict.fromkeys(names, "late")}),
        (checked_from, {**checked, "digests": dict.fromkeys(names, "")}),
        (checked_from, {**checked, "factors": dict.fromkeys(names, 1.0)}),
    ):
        with pytest.raises(HolmesError, match="has 65 entries, more than 64"):
            read(report)


def test_descriptions_of_all_jobs_have_a_limit(monkeypatch):
    """The job that would exceed it is refused; maps of jobs that are gone make room first."""
    monkeypatch.setattr(state_module, "_MOST_HELLO_BYTES", 1000)
    run = Run()
    run.hello("east", memory_bytes=600, agreed_bytes=300)
    with pytest.raises(HolmesError, match="job 'west' cannot join: the descriptions of all jobs"):
        run.hello("west", memory_bytes=200)
    run.hello("east", memory_bytes=400, agreed_bytes=300)  # in place of its earlier description
    run.hello("west", memory_bytes=200, agreed_bytes=300)  # equal settings are kept once
    members = run.coordinator.state.members
    assert members["west"].hello.agreed is members["east"].hello.agreed
    run.coordinator.gone("west", "1", "over")
    run.hello("north", memory_bytes=250)
    assert members["west"].hello.maps == {} and members["east"].hello.maps != {}


def test_unfinished_messages_have_a_limit_and_others_go_on(monkeypatch):
    """Twenty unfinished messages of 64 MiB kept 1.4 GB."""
    monkeypatch.setattr(requests, "_MOST_IN_ALL", 2**21)
    monkeypatch.setattr(requests, "_MOST_OF_JOB", 2**21)
    half = b"x" * (3 * 2**18)
    with coordinator() as server:
        channels = [called(server, f"zero{number}") for number in range(5)]
        for channel in channels:
            with contextlib.suppress(OSError):  # it may be turned away while it sends
                channel._write(memoryview(channel._sent.header(2**23) + half), soon())
        await_(lambda: any("turned away" in line for line in server.told), what="a refusal")
        assert server._memory.held <= 2**21
        east = called(server, "east")
        east.send({"op": "hello", **hello(1)}, soon())
        assert east.receive(soon())["verdict"] == "hello"
        for channel in (*channels, east):
            channel.close()
        await_(lambda: server._memory.held == 0, what="all memory is released")


def test_unfinished_messages_of_one_job_have_a_limit(monkeypatch):
    monkeypatch.setattr(requests, "_MOST_OF_JOB", 2**20)
    with coordinator() as server:
        channels = [called(server) for _ in range(3)]
        for channel in channels:
            part = b"x" * (2**19 + 1)
            with contextlib.suppress(OSError):  # it may be turned away while it sends
                channel._write(memoryview(channel._sent.header(2**23) + part), soon())
        await_(lambda: any("messages of job zero" in line for line in server.told))
        for channel in channels:
            channel.close()
        await_(lambda: server._memory.held == 0)


def test_replies_that_nobody_reads_count_as_memory(monkeypatch):
    monkeypatch.setattr(requests, "_MOST_OF_JOB", 2**20)
    with coordinator() as server:
        east = called(server, "east")
        east.send({"op": "hello", **hello(1)}, soon())
        assert east.receive(soon())["verdict"] == "hello"
        east.send({"op": "enter"}, soon())
        assert east.receive(soon())["verdict"] == "in"
        large = server._coordinator.state.members["east"].hello.maps
        large["all"] = array("q", [2**60]) * 100_000  # 2 MB as JSON
        east.send({"op": "maps", "of": "east"}, soon())
        await_(lambda: any("messages of job east" in line for line in server.told))
        east.close()

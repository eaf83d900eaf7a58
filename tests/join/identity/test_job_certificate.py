"""How a job gets its certificate: from an invitation, its kept file, or its coordinator's folder."""

import errno
import os
import socket
import threading

import pytest
from joined_jobs import HELLO, coordinator, credentials_of, place_at, run_at
from waiting import await_, soon

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinAddress
from holmes_ext.join.admission import admit
from holmes_ext.join.coordinator.client import CoordinatorClient
from holmes_ext.join.coordinator.gate import Gate, JobIdentity
from holmes_ext.join.coordinator.reports import hello_from
from holmes_ext.join.identity import job_certificate
from holmes_ext.join.identity.invitation import Invitation, read_invitation, redeem
from holmes_ext.join.identity.job_certificate import (
    kept_certificates,
    kept_file,
    obtain_certificate,
    run_on_this_host,
)
from holmes_ext.join.identity.private_files import write_private
from holmes_ext.join.identity.run_folder import RunFolder
from holmes_ext.join.settings import parse_outer
from holmes_ext.join.shards.job_ranks import JobRanks
from holmes_ext.join.sockets.certificates import make_key
from holmes_ext.join.sockets.handshake import BY_FINGERPRINT, BY_NAME, NotAuthentic, Refused
from holmes_ext.options import options_from


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Environment of a job on another host, which does not see the coordinator's state folder."""
    return {"XDG_STATE_HOME": str(tmp_path / "elsewhere")}


def address(port, job="east"):
    return JoinAddress(job, "127.0.0.1", port)


def invited(port, tmp_path, job="east"):
    """Write a file with an invitation of a job to the run on a port."""
    path = tmp_path / f"{job}.json"
    write_private(path, run_at(port).invite(job, f"127.0.0.1:{port}").text(), replaces=True)
    return str(path)


def test_an_invitation_is_redeemed_once_and_the_certificate_kept(elsewhere, tmp_path):
    with coordinator() as server:
        file = invited(server.port, tmp_path)
        first = obtain_certificate(address(server.port), file, elsewhere, soon())
        assert (
            read_invitation(file).secret
            not in kept_file(address(server.port), elsewhere).read_text()
        )
        place = place_at("east", server.port)
        client = CoordinatorClient(place, lambda: HELLO)
        assert client.ask("enter", {}, soon())["verdict"] == "in"
        client.close("over")
    # A restarted job needs neither the invitation nor the coordinator.
    assert obtain_certificate(address(server.port), file, elsewhere, soon()) == first
    assert obtain_certificate(address(server.port), "", elsewhere, soon()) == first
    assert kept_certificates("127.0.0.1", server.port, elsewhere) == [first]
    assert kept_certificates("127.0.0.1", server.port + 1, elsewhere) == []


def test_a_new_invitation_replaces_the_kept_certificate(elsewhere, tmp_path):
    with coordinator() as server:
        first = obtain_certificate(
            address(server.port), invited(server.port, tmp_path), elsewhere, soon()
        )
        again = obtain_certificate(
            address(server.port), invited(server.port, tmp_path), elsewhere, soon()
        )
    assert first.certificate != again.certificate and first.authority == again.authority


def test_who_comes_second_with_an_invitation_is_refused(elsewhere, tmp_path):
    with coordinator() as server:
        file = invited(server.port, tmp_path)
        obtain_certificate(address(server.port), file, elsewhere, soon())
        thief = {"XDG_STATE_HOME": str(tmp_path / "thief")}
        with pytest.raises(HolmesError, match="the invitation of job 'east' was used already"):
            obtain_certificate(address(server.port), file, thief, soon())


def test_the_secret_goes_to_the_coordinator_of_the_invitation_only(tmp_path):
    """Another process at its address, even a member of the run, never gets it."""
    with coordinator() as server:
        invitation = read_invitation(invited(server.port, tmp_path))
        false = Invitation(invitation.job, "", "00" * 32, invitation.secret)
        with pytest.raises(NotAuthentic, match="its certificate has another fingerprint"):
            redeem(false, "127.0.0.1", server.port, make_key(), soon())
        assert redeem(invitation, "127.0.0.1", server.port, make_key(), soon()).certificate


def test_an_invitation_of_another_job_is_named(elsewhere, tmp_path):
    file = invited(4, tmp_path, "west")
    with pytest.raises(HolmesError, match="is the invitation of job west, not of east"):
        obtain_certificate(address(4), file, elsewhere, soon())


def test_without_an_invitation_a_line_says_how_to_get_one(elsewhere):
    with pytest.raises(HolmesError, match="holmes join invite east --output FILE"):
        obtain_certificate(address(4), "", elsewhere, soon())


def test_a_full_disk_uses_no_invitation_up(elsewhere, tmp_path, monkeypatch):
    with coordinator() as server:
        file = invited(server.port, tmp_path)
        with monkeypatch.context() as full:

            def fails(*arguments, **more):
                raise OSError(errno.ENOSPC, "No space left on device")

            full.setattr(job_certificate, "write_private", fails)
            with pytest.raises(HolmesError, match="No space left on device"):
                obtain_certificate(address(server.port), file, elsewhere, soon())
        assert obtain_certificate(address(server.port), file, elsewhere, soon()).certificate


def test_a_job_on_the_coordinators_host_needs_no_invitation():
    port = run_at(5) and 5
    first = obtain_certificate(address(port), "", os.environ, soon())
    assert first.credentials() and first.authority == run_at(port).authority
    assert obtain_certificate(address(port), "", os.environ, soon()) == first
    run_at(port).revoke("east")
    with pytest.raises(
        HolmesError, match="job 'east' was revoked; `holmes join invite east` allows"
    ):
        obtain_certificate(address(port), "", os.environ, soon())
    run_at(port).invite("east", "")
    assert obtain_certificate(address(port), "", os.environ, soon()) != first


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_coordinator_on_another_host_is_not_taken_for_this_one(host):
    run_at(5)
    assert run_on_this_host(JoinAddress("east", host, 5), os.environ) is None
    assert run_on_this_host(JoinAddress("east", "127.0.0.1", 5), os.environ) is not None


def admitted(port, outer="", job="east", **more):
    return admit(
        address(port, job),
        options_from(join=f"{job}@127.0.0.1:{port}", outer=outer, **more),
        os.environ,
        JobRanks(None),
    )


def test_a_job_gets_the_settings_of_the_run():
    """The first job that came fixed them for all."""
    run = parse_outer("every=16,fragments=2,delay=3,min=2,momentum=0.5")
    with coordinator(settings=run) as server:
        assert admitted(server.port).settings == run
        assert admitted(server.port, "every=16,timeout=7").settings.timeout == 7
        with pytest.raises(HolmesError, match="every=32 contradicts this run"):
            admitted(server.port, "every=32")
    with coordinator() as server:  # without settings of its own
        assert admitted(server.port, "every=8").settings == parse_outer("every=8")


def test_a_job_that_claims_other_settings_is_refused_by_the_coordinator():
    with coordinator(settings=parse_outer("every=16")) as server:
        document = {**HELLO, "agreed": {"outer": parse_outer("every=32").agreed()}}
        with pytest.raises(Refused, match=r"outer every \(32 here, 16 in `holmes join serve`\)"):
            CoordinatorClient(place_at("east", server.port), lambda: document).ask(
                "enter", {}, soon()
            )


def test_min_is_that_of_the_run():
    """A job that said min=64 made all rounds void."""
    settings = parse_outer("min=1")
    with coordinator(settings=settings) as server:
        document = {**HELLO, "min": 64, "agreed": {"outer": settings.agreed()}}
        client = CoordinatorClient(place_at("east", server.port), lambda: document)
        assert client.ask("enter", {}, soon())["verdict"] == "in"
        client.close("over")


def test_a_coordinator_that_is_not_there_is_one_line(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run_at(port)
    monkeypatch.setattr("holmes_ext.join.admission._EXTRA_S", -1.9)
    with pytest.raises(
        HolmesError, match="no coordinator answers at 127.0.0.1:.*Connection refused"
    ):
        admitted(port, "timeout=1")


def test_a_revoked_job_leaves_the_run_and_is_refused():
    with coordinator() as server:
        client = CoordinatorClient(place_at("south", server.port), lambda: HELLO)
        assert client.ask("enter", {}, soon())["verdict"] == "in"
        other = CoordinatorClient(place_at("west", server.port), lambda: HELLO)
        assert other.ask("enter", {}, soon())["verdict"] == "in"
        run_at(server.port).revoke("south")
        await_(lambda: any("job south is gone: it was revoked" in line for line in server.told))
        with pytest.raises(Refused, match="the certificate of south was revoked"):
            client.ask("maps", {"of": "west"}, soon())
        assert other.ask("maps", {"of": "west"}, soon())["verdict"] == "maps"
        # The other job learns it with the reply, and refuses south's ranks from now on.
        assert credentials_of("west", server.port).revoked == run_at(server.port).revocations()
        for one in (client, other):
            one.close("over")


def test_a_certificate_is_one_job():
    """A member with three names had three votes. The certificate of a site may have several names."""
    gate = Gate(run_at(6).served(), None)
    hello = hello_from(HELLO)
    gate.record(JobIdentity("east", "1", "certificate one"), ["east"])
    again = JobIdentity("east", "2", "certificate one")
    assert gate.admit_hello(again, hello, ["east"]) is hello, "it was restarted"
    assert gate.admit_hello(JobIdentity("west", "1", "certificate two"), hello, ["east"]) is hello
    twin = JobIdentity("twin", "1", "certificate one")
    with pytest.raises(
        HolmesError, match="with the certificate of job 'east', which is in this run"
    ):
        gate.admit_hello(twin, hello, ["east"])
    assert gate.admit_hello(twin, hello, []) is hello, "east has left"


def test_a_hello_from_before_the_revocation_is_refused_after_it():
    """The job is connected already, so only its certificate in the hello shows that it was revoked."""
    run = run_at(7).served()
    gate = Gate(run, None)
    hello = hello_from(HELLO)
    east = JobIdentity("east", "1", "certificate one")
    assert gate.admit_hello(east, hello, []) is hello
    for entry in (BY_FINGERPRINT + "certificate one", BY_NAME + "east"):
        run.credentials.revoke([entry])
        with pytest.raises(HolmesError, match="of job 'east' was revoked"):
            gate.admit_hello(east, hello, [])
        other = JobIdentity("west", "1", "certificate two")
        assert gate.admit_hello(other, hello, []) is hello


def test_two_revocations_in_one_tick_of_the_clock_are_both_read(monkeypatch):
    """The second one does not change the time of the folder."""
    served = run_at(8).served()
    gate = Gate(served, None)
    folder = served.folder.path / "invitations"
    for job in ("east", "west"):
        credentials_of(job, 8)
    served.folder.revoke("east")
    tick = folder.stat().st_mtime_ns
    first = gate.revoked_since()
    served.credentials.revoke(first)
    served.folder.revoke("west")
    os.utime(folder, ns=(tick, tick))
    assert len(first) == 1 and len(gate.revoked_since()) == 2
    served.credentials.revoke(served.folder.revocations())
    # An hour later, the folder is not read again for nothing.
    old = tick - 3600 * 10**9
    for each in ("invitations", "revoked_names"):
        os.utime(served.folder.path / each, ns=(old, old))
    assert gate.revoked_since() is None
    monkeypatch.setattr(RunFolder, "revocations", None)
    assert gate.revoked_since() is None


def test_threads_may_redeem_at_the_same_time(tmp_path):
    """Each invitation gives one certificate, whoever comes first."""
    with coordinator() as server:
        invitation = read_invitation(invited(server.port, tmp_path))
        found = []

        def try_it():
            try:
                found.append(redeem(invitation, "127.0.0.1", server.port, make_key(), soon()))
            except HolmesError as error:
                found.append(error)

        threads = [threading.Thread(target=try_it) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert sum(not isinstance(one, HolmesError) for one in found) == 1, found

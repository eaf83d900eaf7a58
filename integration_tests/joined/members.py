"""Members of a run of joined jobs: invitations, revocations, and a member who runs under several names.

    members = Members(place, port)
    members.invite(job).start()        as with `holmes join invite` on another host
    members.revoke([job], server)      `holmes join revoke`; asserts that the job is shut out
    Crowd(members, ...)                several names of one member, all of them liars

The jobs keep their certificates in folders of their own, and do not see the coordinator's state folder.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from joined_jobs import run_at
from waiting import await_, soon

from holmes_ext.cli.main import main
from holmes_ext.join.address import JoinAddress, JoinPlace
from holmes_ext.join.coordinator.client import ask_status, new_incarnation
from holmes_ext.join.identity import run_folder
from holmes_ext.join.identity.invitation import Invitation, read_invitation
from holmes_ext.join.identity.job_certificate import (
    kept_certificate,
    kept_file,
    obtain_certificate,
)
from holmes_ext.join.identity.private_files import make_private_folder, write_private
from holmes_ext.join.sockets.certificates import KeyPair
from holmes_ext.join.sockets.handshake import Refused
from integration_tests.joined.accounting import revoked_line
from integration_tests.joined.faulty import Fault, Job

#: How a member gets certificates for several names (Crowd).
WAYS = ("one invitation", "one certificate", "certificate of all names")
#: Names of a member who runs under several names.
CROWD = 3
#: Seconds that a step takes at most. A busy machine may need most of them.
_PATIENCE_S = 120
#: Ends of a TCP connection: (host, port) of the job's end and of the other end.
Connection = tuple[tuple[Any, ...], tuple[Any, ...]]


class Members:
    """Invites jobs to the run of a coordinator on loopback, and revokes them.

    Args:
        place: Folder for invitations.
        port: Port of the coordinator.
    """

    def __init__(self, place: Path, port: int):
        self._place = place
        self._port = port
        self._invitations = 0  # written so far

    def invite(self, job: Job) -> Job:
        """Write an invitation for a job with `holmes join invite`, and give it to the job."""
        self._invitations += 1
        file = self._place / f"{job.name}.{self._invitations}.invitation"
        self._command("invite", job.name, "--address", "127.0.0.1", "--output", str(file))
        job.invitation = str(file)
        return job

    def revoke(self, jobs: Sequence[Job], server: Any) -> None:
        """Revoke the first job with `holmes join revoke`; the others must have its invitation.

        Then assert that all connections of the jobs end, and that the coordinator refuses their certificates.
        The lines of the coordinator get one for each job: from there on, the job must not take part.
        """
        open_before = connections_of(jobs)
        self._command("revoke", jobs[0].name)
        # The coordinator reads the list before it answers.
        ask_status("127.0.0.1", self._port, run_at(self._port).credentials(), _PATIENCE_S)
        for job in jobs:
            server.told.append(revoked_line(job.name))
            self._assert_is_refused(job)
        names = ", ".join(job.name for job in jobs)
        await_(
            lambda: not open_before & connections_of(jobs),
            _PATIENCE_S,
            f"the end of the connections of {names}, revoked",
        )

    def address_of(self, job: Job) -> JoinAddress:
        return JoinAddress(job.name, "127.0.0.1", self._port)

    def _command(self, action: str, name: str, *arguments: str) -> None:
        """Run `holmes join ACTION NAME`, and assert that it succeeds."""
        command = ["join", action, name, "--port", str(self._port), *arguments]
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = main(command)
        assert status == 0, f"{' '.join(command)}: status {status}: {output.getvalue()}"

    def _assert_is_refused(self, job: Job) -> None:
        """Assert that the coordinator refuses the certificate that a job has kept, if it has one."""
        address = self.address_of(job)
        kept = kept_certificate(address, job.invitation, environment_of(job))
        if kept is None:
            return  # it has redeemed no invitation, and cannot redeem one now
        purpose = {"purpose": "job", "job": job.name, "incarnation": new_incarnation()}
        try:
            JoinPlace(address, kept.credentials()).call(purpose, soon(_PATIENCE_S)).close()
        except Refused as refusal:
            assert "was revoked" in str(refusal), refusal
        else:
            raise AssertionError(f"the certificate of {job.name} was revoked, and is accepted")


class Crowd:
    """A member with one invitation who runs under several names, to have a vote for each.

    The ways to certificates for the names:

        one invitation             Each job shows the secret of the invitation for its own name.
        one certificate            The first job redeems the invitation; the others use its certificate.
        certificate of all names   The certificate of the invitation has all names, as a site's may. So each
                                   job is authentic, and only the rule "one job for each certificate" is left.

    Args:
        members: Writes the invitation.
        pattern: Job of whom all jobs of the crowd are copies with other names; it is not started.
        names: Names of the jobs.
        way: One of WAYS.
        lie: Lie of all jobs (faulty.LIES).
    """

    def __init__(self, members: Members, pattern: Job, names: Sequence[str], way: str, lie: str):
        self._members = members
        self.way = way
        self.jobs = [
            replace(
                pattern,
                name=name,
                ranks=1,
                fault=Fault("ready", 1, lie),
                faulty_incarnations=10**9,
                seed=100 + number,
                processes=[],
            )
            for number, name in enumerate(names)
        ]
        first = members.invite(self.jobs[0])
        invitation = read_invitation(Path(first.invitation))
        for job in self.jobs[1:]:
            job.invitation = f"{first.invitation}.{job.name}"
            write_private(Path(job.invitation), replace(invitation, job=job.name).text())
        if way != "one invitation":
            self._share_certificate(invitation, list(names))

    def start(self) -> Crowd:
        for job in self.jobs:
            job.start()
        return self

    def restart_ended(self) -> None:
        """Start the jobs again that have ended, for example because the coordinator refuses them."""
        for job in self.jobs:
            if job.ended:
                job.start()

    def kill_newcomers(self) -> None:
        """Kill the jobs that have not made a round since their last start."""
        for job in self.jobs:
            if not any(line.get("verdict") == "commit" for line in job.lines_of_last):
                job.kill()

    def end(self, server: Any) -> None:
        """Revoke the member's certificate, and kill its jobs."""
        self._members.revoke(self.jobs, server)
        self.kill()

    def kill(self) -> None:
        for job in self.jobs:
            job.kill()

    def _share_certificate(self, invitation: Invitation, names: list[str]) -> None:
        """Redeem the invitation, and copy the kept certificate to all jobs."""
        first = self.jobs[0]
        address = self._members.address_of(first)
        signing = contextlib.nullcontext()
        if self.way == "certificate of all names":
            signing = _all_names_in_certificate(names)
        with signing:
            obtain_certificate(address, first.invitation, environment_of(first), soon(_PATIENCE_S))
        kept = kept_file(address, environment_of(first))
        for job in self.jobs[1:]:
            copy = kept_file(self._members.address_of(job), environment_of(job))
            make_private_folder(copy.parent)
            shutil.copy(kept, copy)


def environment_of(job: Job) -> dict[str, str]:
    """Return the environment variables by which a job finds its certificate."""
    return {"XDG_STATE_HOME": str(job.home)}


@contextlib.contextmanager
def _all_names_in_certificate(names: Sequence[str]) -> Iterator[None]:
    """Let the run's CA sign certificates for the first name that contain all names."""
    sign_request = run_folder.sign_request

    def sign(authority: KeyPair, request: str, name: str) -> str:
        if name != names[0]:
            return sign_request(authority, request, name)
        return certificate_of_names(authority, request, names)

    with mock.patch.object(run_folder, "sign_request", sign):
        yield


def certificate_of_names(authority: KeyPair, request: str, names: Sequence[str]) -> str:
    """Return a certificate for the key in a certificate request, with several names, as PEM text."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    issuer = x509.load_pem_x509_certificate(authority.certificate.encode())
    key: Any = serialization.load_pem_private_key(authority.key.encode(), password=None)
    certificate = (
        x509.CertificateBuilder()
        .issuer_name(issuer.subject)
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])]))
        .public_key(x509.load_pem_x509_csr(request.encode()).public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1))
        .not_valid_after(datetime(2100, 1, 1))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def connections_of(jobs: Sequence[Job]) -> set[Connection]:
    """Return the established TCP connections of the jobs' processes to other processes."""
    ends = {
        (tuple(each.laddr), tuple(each.raddr))
        for job in jobs
        for process in job.processes
        for each in _connections_of_process(process.pid)
        if each.status == psutil.CONN_ESTABLISHED
    }
    # Ranks of a job are connected to each other, too: both ends are of these jobs.
    return {(here, there) for here, there in ends if (there, here) not in ends}


def _connections_of_process(pid: int) -> list[Any]:
    """Return the TCP connections of a process; none if it has ended."""
    try:
        return psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return []

"""Checks of the coordinator on who may connect and join: certificates, revocations, settings of the run.

The coordinator's rules (coordinator.py) identify jobs by name. This module makes sure that each name belongs
to a single certificate: a caller acts only for a job in its certificate, and two jobs in the run never have
the same certificate.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import is_name
from holmes_ext.join.algorithms import AUTO, AUTO_CHOICES
from holmes_ext.join.coordinator.membership import difference
from holmes_ext.join.coordinator.reports import Hello
from holmes_ext.join.identity.invitation import REDEEM
from holmes_ext.join.identity.run_folder import ServedRun
from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.sockets.certificates import Holder
from holmes_ext.join.sockets.handshake import (
    BY_FINGERPRINT,
    BY_NAME,
    Credentials,
    Purpose,
    problem_of_caller,
)
from holmes_ext.runtime.sockets import network_of

#: Purpose of the connection of `holmes join status`.
STATUS = "status"
#: Purpose of a job's connection to read the settings of the run.
SETTINGS = "settings"
#: Seconds over which log lines about rejected callers are counted.
_COMPLAINTS_S = 60.0
#: Log lines about rejected callers in that time, of each network and in all.
_COMPLAINTS = 5
_COMPLAINTS_IN_ALL = 60
#: Nanoseconds after a change of the state folder in which another change may have the same time.
_SETTLED_NS = 10**9


class JobIdentity(NamedTuple):
    """Name, incarnation (start) and certificate of the job at the other end of a connection."""

    job: str
    incarnation: str
    certificate: str  # its SHA-256, in hexadecimal digits


class _Complaint(NamedTuple):
    """Time and network of a rejected connection."""

    time: float
    network: str


class Complaints:
    """Limits how many log lines report rejected callers, who could flood the log. Not thread-safe."""

    def __init__(self) -> None:
        self._latest: list[_Complaint] = []  # of the last minute

    def add(self, host: str, now: float) -> str | None:
        """Count a rejected caller, and return how its log line ends; None: write no line.

        No line is written if the last minute has too many lines already: about callers from the same
        network, or about all callers.
        """
        network = network_of(host)
        self._latest = [
            complaint for complaint in self._latest if now - complaint.time < _COMPLAINTS_S
        ]
        count_of_network = sum(complaint.network == network for complaint in self._latest)
        if count_of_network >= _COMPLAINTS or len(self._latest) >= _COMPLAINTS_IN_ALL:
            return None
        self._latest.append(_Complaint(now, network))
        # If the limit is reached with this line, the log must say why further callers are missing.
        if len(self._latest) == _COMPLAINTS_IN_ALL:
            return "; further callers that are turned away within a minute are not listed"
        return ""


class Gate:
    """Checks callers and jobs against the certificates, revocations and settings of a run. Not thread-safe.

    Args:
        run: State folder and credentials of the run.
        settings: Settings that all jobs must have; None: those of the first job.
    """

    def __init__(self, run: ServedRun, settings: OuterSettings | None):
        self._run = run
        self._settings = settings
        self._certificates: dict[str, str] = {}  # job that has said hello -> its certificate
        self._folder_version: tuple[int, ...] = ()  # of the state folder when it was read last

    @property
    def credentials(self) -> Credentials:
        """Return the coordinator's certificate, and the list of revoked certificates."""
        return self._run.credentials

    def settings_reply(self) -> dict[str, Any]:
        """Return the reply to the purpose "settings": the settings that all jobs must have."""
        return {"settings": None if self._settings is None else asdict(self._settings)}

    def redeem_reply(self, purpose: Purpose) -> dict[str, Any]:
        """Return the reply to a job that shows its invitation: its certificate.

        Args:
            purpose: Sent by the job in the handshake: its name `job`, the `secret` of its invitation, and
                `request`, a certificate request (PKCS #10, PEM) with the public part of its key.

        Raises:
            HolmesError: The invitation is not valid.
        """
        job = str(purpose.get("job", ""))
        secret = str(purpose.get("secret", ""))
        certificate_request = str(purpose.get("request", ""))
        return self._run.folder.redeem(job, secret, certificate_request)._asdict()

    def admit_hello(self, identity: JobIdentity, hello: Hello, present: Iterable[str]) -> Hello:
        """Check the certificate and settings of a job; return its hello with the run's value of `min`.

        Only the settings of --holmes-outer are checked here, and only if the coordinator requires some.
        The rest of `hello.agreed`, such as the model, is compared with the other jobs' later
        (membership.py). `min` (the smallest number of jobs that may train) is never compared: the run's
        value replaces the job's.

        Args:
            identity: The job.
            hello: The job's description of itself.
            present: Names of the jobs in the run.

        Raises:
            HolmesError: The certificate was revoked or is that of another job in the run, or the settings
                are not the run's.
        """
        # A request that was sent before the revocation may be answered after it.
        holder = Holder(identity.certificate, frozenset({identity.job}))
        if self.credentials.is_revoked(holder):
            raise HolmesError(f"the certificate of job {identity.job!r} was revoked")
        for other in present:
            has_same_certificate = self._certificates.get(other) == identity.certificate
            if other != identity.job and has_same_certificate:
                raise HolmesError(
                    f"job {identity.job!r} cannot join with the certificate of job {other!r}, which is in"
                    " this run already; each job needs its own"
                )
        if self._settings is None:
            return hello
        # "outer": the --holmes-outer settings that must be equal in all jobs, by name.
        given = {"outer": hello.agreed.get("outer")}
        required = {"outer": self._settings.agreed()}
        algorithm = given["outer"].get("algorithm") if isinstance(given["outer"], dict) else None
        if self._settings.algorithm == AUTO and algorithm in AUTO_CHOICES:
            # The job has chosen by its optimizer. It is compared with the other jobs later.
            required["outer"]["algorithm"] = algorithm
        if text := difference(given, required, "`holmes join serve`"):
            raise HolmesError(f"job {identity.job!r} cannot join: it differs in {text}")
        return replace(hello, min=self._settings.min)

    def record(self, identity: JobIdentity, members: Iterable[str]) -> None:
        """Remember the certificate of a job whose hello was accepted.

        Args:
            identity: The job, with its certificate.
            members: Names of all jobs that the coordinator still lists, this one included. The certificates
                of jobs that it has deleted from its list are forgotten here, too.
        """
        known = {**self._certificates, identity.job: identity.certificate}
        self._certificates = {name: known[name] for name in members if name in known}

    def revoked_since(self) -> frozenset[str] | None:
        """Return the list of revoked certificates, if `holmes join revoke` has changed it.

        Returns:
            The whole list from the state folder. None if the folder has not changed since the last call (and
            not within the last second), or if its list equals the list in force (`credentials.revoked`).

        Raises:
            HolmesError, OSError: The list cannot be read. The list in force stays valid, and the next
                calls return None until the folder changes again.
        """
        folder = self._run.folder
        version = folder.changed_at()
        if version == self._folder_version:
            return None
        self._folder_version = version
        entries = folder.revocations()
        if time.time_ns() < max(version, default=0) + _SETTLED_NS:
            # Another change in the same tick of the file system's clock would not change the version again.
            self._folder_version = ()
        return entries if entries != self.credentials.revoked else None

    def is_revoked(self, job: str, entries: frozenset[str]) -> bool:
        """Return whether a list of revoked certificates has the certificate or the name of a job.

        Args:
            job: Name of the job. If this coordinator has accepted no hello of it, its certificate is
                unknown here, and only its name is looked up.
            entries: The list. An entry is "sha256:" and the hash of a certificate, or "name:" and the name
                of a job.
        """
        certificate = BY_FINGERPRINT + self._certificates.get(job, "")
        return certificate in entries or BY_NAME + job in entries


def problem_at_coordinator(purpose: Purpose, holder: Holder) -> str:
    """Return the reason to reject a caller with this purpose and certificate; "" to accept the caller."""
    use = purpose.get("purpose")
    if use == REDEEM:
        return ""  # its invitation is checked instead
    if use == STATUS:
        return "" if holder.fingerprint else "the caller has shown no certificate"
    if problem := problem_of_caller(purpose, holder):
        return problem
    # Limits the length and the characters of names that are kept and logged.
    for key in ("job", "incarnation"):
        value = purpose.get(key)
        if not isinstance(value, str) or not is_name(value):
            return f"a caller names no {key}"
    return ""

"""State folder of `holmes join serve`: the CA of a run, its invitations, and revocations. Needs no torch.

    run.json               key and certificate of the CA and of the coordinator
    invitations/HASH       a file for each invitation: name of the job, its certificate after it has redeemed
                           the invitation, and whether it was revoked. HASH: of the secret
    revoked_names/NAME     with a site's CA: a certificate with this name is refused
    serving.lock           locked while a coordinator runs, so that a second coordinator is refused
    changes.lock           locked while a process changes an invitation

`holmes join invite` and `holmes join revoke` change the folder, and a running coordinator reads it. So they
run on the coordinator's host, by the same user, also while no coordinator runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from holmes_ext.document import parse_json
from holmes_ext.errors import HolmesError
from holmes_ext.join.address import is_name
from holmes_ext.join.identity.invitation import (
    Invitation,
    IssuedCertificate,
    digest_of_secret,
)
from holmes_ext.join.identity.private_files import (
    check_private_folder,
    make_private_folder,
    read_private,
    state_home,
    write_private,
)
from holmes_ext.join.sockets.certificates import (
    COORDINATOR,
    KeyPair,
    fingerprint_of,
    has_key_of,
    make_authority,
    make_key,
    make_request,
    sign_request,
)
from holmes_ext.join.sockets.handshake import BY_FINGERPRINT, BY_NAME, Credentials
from holmes_ext.words import why

_RUN_FILE = "run.json"
_INVITATIONS = "invitations"
_REVOKED_NAMES = "revoked_names"
_DAMAGED = "remove the folder for a new CA, and invite all jobs again"


@dataclass(frozen=True)
class _RunFile:
    """Content of run.json: keys and certificates of the run's CA and of its coordinator, as PEM texts."""

    authority_key: str  # private key of the CA; it signs the certificates of the jobs
    authority: str  # certificate of the CA
    key: str  # private key of the coordinator
    certificate: str  # of the coordinator, signed by the CA


@dataclass(frozen=True)
class _Record:
    """Content of an invitation's file in the state folder of the run.

    A job redeems its invitation when it first connects: it gets a certificate for it.
    """

    job: str
    certificate: str = ""  # PEM text; "": not redeemed
    revoked: bool = False


class Revocation(NamedTuple):
    """Result of `holmes join revoke`: how many certificates and invitations of a job it has revoked."""

    certificates: int  # that are refused from now on
    invitations: int  # that can no longer be redeemed


@dataclass(frozen=True)
class ServedRun:
    """Run that a coordinator serves: its state folder, and the coordinator's certificate."""

    folder: RunFolder
    credentials: Credentials


@dataclass(frozen=True)
class RunFolder:
    """State folder of a run (jobs that train one model together), on the host of its coordinator.

    The folder has the CA that signs the jobs' certificates, the invitations of jobs, and the list of revoked
    certificates; a restarted coordinator reads them again.
    """

    path: Path  # belongs to this user

    @classmethod
    def of_port(cls, environ: Mapping[str, str], port: int) -> RunFolder:
        """Return the folder of the coordinator on a port of this host; the folder need not exist."""
        return cls(state_home(environ) / f"join-{port}")

    @property
    def has_authority(self) -> bool:
        """Return whether there is a CA in the folder."""
        return os.path.exists(self.path / _RUN_FILE)  # False, too, if this user may not look

    def make(self, with_authority: bool = True) -> None:
        """Make the folder and its CA, unless they exist.

        Args:
            with_authority: False: a site's CA signs the certificates.

        Raises:
            HolmesError: The folder cannot be made, or belongs to another user.
        """
        make_private_folder(self.path)
        for name in (_INVITATIONS, _REVOKED_NAMES):
            make_private_folder(self.path / name)
        if not with_authority or self.has_authority:
            return
        authority = make_authority()
        key = make_key()
        certificate = sign_request(authority, make_request(key), COORDINATOR)
        run_file = _RunFile(authority.key, authority.certificate, key, certificate)
        with self._writing():
            write_private(self.path / _RUN_FILE, json.dumps(asdict(run_file)))

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Keep other coordinators from using the folder.

        Raises:
            HolmesError: Another coordinator uses it.
        """
        with self._lock_file("serving.lock") as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise HolmesError(
                    f"holmes join serve: another coordinator serves the run in {self.path} already;"
                    " stop it, or give another --port"
                ) from None
            yield

    def served(self, of_site: Credentials | None = None) -> ServedRun:
        """Return the folder, and the coordinator's credentials with the list of revoked certificates.

        The folder and the CA of the run are made if they do not exist.

        Args:
            of_site: The coordinator's credentials, if a site (an organization) has a CA of its own that
                signs all certificates. None: the CA of the run signs them. Then callers without a
                certificate may connect, to redeem their invitations.

        Raises:
            HolmesError: The folder cannot be made or read, or belongs to another user.
        """
        self.make(with_authority=of_site is None)
        if of_site is not None:
            credentials = of_site
        else:
            credentials = self.credentials()
            credentials.accept_strangers()  # jobs that have an invitation and no certificate yet
        credentials.revoke(self.revocations())
        return ServedRun(self, credentials)

    def credentials(self) -> Credentials:
        """Return the coordinator's credentials for TLS: a certificate that the run's CA has signed."""
        run_file = self._run_file()
        try:
            pair = KeyPair(run_file.key, run_file.certificate)
            return Credentials.of_run(pair, run_file.authority)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise HolmesError(
                f"{self.path / _RUN_FILE}: is damaged ({why(error)}); {_DAMAGED}"
            ) from None

    @property
    def authority(self) -> str:
        """Return the certificate of the CA, as PEM text."""
        return self._run_file().authority

    def invite(self, job: str, address: str) -> Invitation:
        """Record a new invitation in the folder, and return it.

        Args:
            job: Name of the job.
            address: HOST:PORT of the coordinator.

        Raises:
            HolmesError: The name is not valid, or the folder cannot be written.
        """
        _check_name(job)
        invitation = Invitation.drawn(job, address, fingerprint_of(self._run_file().certificate))
        self._write_record(invitation.digest, _Record(job))
        return invitation

    def redeem(self, job: str, secret: str, request: str) -> IssuedCertificate:
        """Return the certificate of an invitation; the first call signs it.

        Args:
            job: Name of the job.
            secret: Secret of the invitation.
            request: Certificate request of the job, as PEM text. A second call needs a request with the
                same key.

        Raises:
            HolmesError: There is no such invitation, it was used by another key or revoked, or the
                request is malformed.
        """
        run_file = self._run_file()
        digest = digest_of_secret(secret)
        with self._changing():
            record = self._record(digest)
            if record is None or record.job != job:
                raise HolmesError(
                    f"there is no such invitation for job {job!r:.100}; `holmes join invite` makes one"
                )
            if record.revoked:
                raise HolmesError(f"the invitation of job {job!r} was revoked; invite it again")
            try:
                if record.certificate:
                    if not has_key_of(record.certificate, request):
                        raise HolmesError(
                            f"the invitation of job {job!r} was used already; `holmes join invite {job}`"
                            " makes another one"
                        )
                else:
                    authority = KeyPair(run_file.authority_key, run_file.authority)
                    certificate = sign_request(authority, request, job)
                    record = replace(record, certificate=certificate)
                    self._write_record(digest, record)
            except ValueError as error:
                raise HolmesError(f"the certificate request of job {job!r}: {error}") from None
        return IssuedCertificate(record.certificate, run_file.authority)

    def revoke(self, job: str) -> Revocation:
        """Refuse all certificates and invitations of a job from now on.

        With a site's CA, all certificates that contain the name are refused.

        Raises:
            HolmesError: No such job was invited, or there is no run.
        """
        _check_name(job)
        if not self.path.exists():
            raise self._missing()
        if not self.has_authority:
            self._write(self.path / _REVOKED_NAMES / job, "")
            return Revocation(certificates=1, invitations=0)
        certificates = 0
        invitations = 0
        with self._changing():
            records = self._records()
            for digest, record in records.items():
                if record.job != job or record.revoked:
                    continue
                self._write_record(digest, replace(record, revoked=True))
                if record.certificate:
                    certificates += 1
                else:
                    invitations += 1
        if not certificates and not invitations:
            invited = sorted({record.job for record in records.values() if not record.revoked})
            raise HolmesError(
                f"holmes join revoke: no job {job!r} is invited; invited are: {', '.join(invited) or 'none'}"
            )
        return Revocation(certificates, invitations)

    def accepts(self, certificate: str, authority: str) -> bool:
        """Return whether this run's CA has signed a certificate that a job has kept, and it is not revoked.

        Args:
            certificate: The job's certificate, as PEM text; "": it has none yet.
            authority: Certificate of the CA that signed it, as PEM text; the job has kept it, too. If this is
                not the CA of this run, the job's certificate is of an earlier run.
        """
        if not certificate or authority != self.authority:
            return False
        return BY_FINGERPRINT + fingerprint_of(certificate) not in self.revocations()

    def was_revoked(self, job: str) -> bool:
        """Return whether a job was invited before, and all its invitations were revoked."""
        records = [record for record in self._records().values() if record.job == job]
        return bool(records) and all(record.revoked for record in records)

    def revocations(self) -> frozenset[str]:
        """Return the list of revoked certificates, in the form of Credentials.revoke().

        An entry is "sha256:" and the hash of a certificate, or "name:" and the name of a job.
        """
        entries = {
            BY_FINGERPRINT + fingerprint_of(record.certificate)
            for record in self._records().values()
            if record.revoked and record.certificate
        }
        names = self.path / _REVOKED_NAMES
        if names.exists():
            entries |= {BY_NAME + file.name for file in names.iterdir() if is_name(file.name)}
        return frozenset(entries)

    def changed_at(self) -> tuple[int, ...]:
        """Return when the folders of invitations and of revoked names were last changed, in nanoseconds.

        A caller compares the result with an earlier result. If both are equal, it need not read the list of
        revocations again.
        """
        folders = (self.path / _INVITATIONS, self.path / _REVOKED_NAMES)
        return tuple(folder.stat().st_mtime_ns for folder in folders if folder.exists())

    def _run_file(self) -> _RunFile:
        """Return the content of run.json; raise HolmesError if it is missing or not this user's."""
        path = self.path / _RUN_FILE
        try:
            check_private_folder(self.path)
            text = read_private(path)
        except FileNotFoundError:
            raise self._missing() from None
        return parse_json(text, str(path), _DAMAGED).into(_RunFile)

    def _missing(self) -> HolmesError:
        return HolmesError(
            f"{self.path}: there is no run with a CA; start `holmes join serve` on this host first, with the"
            " same port and as the same user"
        )

    def _records(self) -> dict[str, _Record]:
        """Return all invitations, by the hash of their secret."""
        folder = self.path / _INVITATIONS
        if not folder.exists():
            return {}
        records = {}
        for file in sorted(folder.iterdir()):
            record = self._record(file.name)
            if record is not None:
                records[file.name] = record
        return records

    def _record(self, digest: str) -> _Record | None:
        """Return an invitation by the hash of its secret; None: there is none."""
        if digest.startswith("."):  # a file that is being written
            return None
        file = self.path / _INVITATIONS / digest
        try:
            text = read_private(file)
        except FileNotFoundError:
            return None
        return parse_json(text, str(file), "remove it").into(_Record)

    def _write_record(self, digest: str, record: _Record) -> None:
        self._write(self.path / _INVITATIONS / digest, json.dumps(asdict(record)))

    def _write(self, path: Path, text: str) -> None:
        make_private_folder(path.parent)
        with self._writing():
            write_private(path, text, replaces=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError of the block into a HolmesError that names the folder."""
        try:
            yield
        except OSError as error:
            raise HolmesError(
                f"{self.path}: the state of the run cannot be kept there ({why(error)});"
                " make space, or set XDG_STATE_HOME to another place"
            ) from None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock that allows a single process at a time to change invitations."""
        with self._lock_file("changes.lock") as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # held for milliseconds
            yield

    @contextlib.contextmanager
    def _lock_file(self, name: str) -> Iterator[int]:
        """Provide the descriptor of a file for locks; closing it releases the lock."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._writing():
            descriptor = os.open(self.path / name, flags, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _check_name(job: str) -> None:
    if not is_name(job):
        raise HolmesError(
            f"holmes join: {job!r:.100} is no name of a job: 1 to 64 letters, digits, '.', '_' or '-'"
        )

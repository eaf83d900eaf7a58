"""Certificate of a job: how the job gets and keeps it. Needs no torch.

Rank 0 of the job looks in this order:

    --holmes-join-invitation FILE    redeemed at the first start
    the kept file                    ~/.local/state/holmes_ext/join-jobs/NAME@HOST-PORT.json: a restarted job
                                     needs no other invitation
    the coordinator's state folder   if `holmes join serve` runs on this host as this user: the job signs its
                                     certificate itself

The private key is written to the kept file before the invitation is redeemed. So an invitation is not lost if
the disk is full, or the job is killed in between.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from holmes_ext.document import parse_json
from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinAddress
from holmes_ext.join.identity.invitation import Invitation, read_invitation, redeem
from holmes_ext.join.identity.private_files import (
    make_private_folder,
    read_private,
    state_home,
    write_private,
)
from holmes_ext.join.identity.run_folder import RunFolder
from holmes_ext.join.sockets.certificates import KeyPair, make_key, make_request
from holmes_ext.join.sockets.handshake import Credentials
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.words import why


@dataclass(frozen=True)
class JobCertificate:
    """Key and certificate of a job, and certificate of the run's CA, as PEM texts.

    Rank 0 of the job keeps them in a file between the starts of the job (kept_file()).
    """

    key: str  # private key
    certificate: str = ""  # "": the invitation was not redeemed yet
    authority: str = ""  # certificate of the CA that has signed `certificate`
    invitation: str = (
        ""  # hash of the secret of the invitation for which the certificate was issued
    )

    def credentials(self) -> Credentials:
        """Return the job's credentials for TLS connections, from this key and these certificates.

        Raises:
            HolmesError: The texts are damaged.
        """
        try:
            return Credentials.of_run(KeyPair(self.key, self.certificate), self.authority)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise HolmesError(
                f"the certificate of this job cannot be used ({why(error)}); invite the job again"
            ) from None


def obtain_certificate(
    address: JoinAddress, invitation_file: str, environ: Mapping[str, str], deadline: Deadline
) -> JobCertificate:
    """Return the certificate of a job: a new certificate at its first start, then the kept certificate.

    At the first start with an invitation, the coordinator issues the certificate. The job keeps it in a
    file, and uses it at later starts. If the coordinator runs on this host as this user, the job needs no
    invitation: it can read the key of the run's CA, and signs its certificate itself.

    Args:
        address: Name of the job, and address of the coordinator.
        invitation_file: Value of --holmes-join-invitation; "": not given.
        environ: Environment variables that name the folder for state (XDG_STATE_HOME, HOME).
        deadline: The coordinator must have answered by then.

    Raises:
        OSError: The coordinator was not reached; try again.
        HolmesError: There is no invitation, or it is not valid, or the certificate cannot be kept.
    """
    kept_path = kept_file(address, environ)
    kept = _read_kept(kept_path)
    if invitation_file:
        invitation = read_invitation(Path(invitation_file))
        if invitation.job != address.job:
            raise HolmesError(
                f"{invitation_file}: is the invitation of job {invitation.job}, not of {address.job};"
                f" give --holmes-join {invitation.job}@{address.host}:{address.port}, or another file"
            )
        if kept is None or kept.invitation != invitation.digest:
            kept = JobCertificate(make_key(), invitation=invitation.digest)
            _keep(kept_path, kept)
        if not kept.certificate:
            kept = _redeemed(kept, invitation, address, deadline)
            _keep(kept_path, kept)
        return kept
    run = run_on_this_host(address, environ)
    if run is not None:
        if kept is None or not run.accepts(kept.certificate, kept.authority):
            kept = _signed_on_this_host(run, address.job)
            _keep(kept_path, kept)
        return kept
    if kept is None or not kept.certificate:
        raise HolmesError(
            f"job {address.job!r} has no certificate for the run at {address.host}:{address.port}; run"
            f" `holmes join invite {address.job} --output FILE` on the host of `holmes join serve`, and"
            " give the job --holmes-join-invitation FILE"
        )
    return kept


def kept_certificate(
    address: JoinAddress, invitation_file: str, environ: Mapping[str, str]
) -> JobCertificate | None:
    """Return the certificate that an earlier start of a job has kept; None if there is none.

    Args:
        address: Name of the job, and address of the coordinator.
        invitation_file: Value of --holmes-join-invitation; a certificate of another invitation does not
            count. "": not given.
        environ: Environment variables, which say where state is kept.

    Raises:
        OSError: A file cannot be read.
        HolmesError: A file is damaged.
    """
    kept = _read_kept(kept_file(address, environ))
    if kept is None or not kept.certificate:
        return None
    if invitation_file and read_invitation(Path(invitation_file)).digest != kept.invitation:
        return None
    return kept


def kept_file(address: JoinAddress, environ: Mapping[str, str]) -> Path:
    """Return the path of the file that keeps the certificate of a job."""
    name = f"{address.job}@{address.host}-{address.port}.json".replace("/", "-")
    return state_home(environ) / "join-jobs" / name


def kept_certificates(host: str, port: int, environ: Mapping[str, str]) -> list[JobCertificate]:
    """Return all certificates for a coordinator that are kept in files of this user.

    A job gets a certificate when it redeems an invitation, and keeps it in a file. There may be several
    jobs of this user that have joined the run of the coordinator at `host` and `port`.
    """
    # The file of a job is NAME@HOST-PORT.json, so "@HOST-PORT.json" is the end of all jobs' files.
    file_without_job = kept_file(JoinAddress("", host, port), environ)
    folder = file_without_job.parent
    if not folder.exists():
        return []
    suffix = file_without_job.name
    kept = [_read_kept(path) for path in sorted(folder.iterdir()) if path.name.endswith(suffix)]
    # Before an invitation is redeemed, the job's file has a key but no certificate.
    return [
        certificate for certificate in kept if certificate is not None and certificate.certificate
    ]


def status_credentials(host: str, port: int, environ: Mapping[str, str]) -> Credentials | None:
    """Return credentials with which a coordinator answers this user's request for its status.

    Returns:
        Those of the coordinator itself if it runs on this host, or else those that a job of this user has
        kept; None: this user has neither.
    """
    run = run_on_this_host(JoinAddress("", host, port), environ)
    if run is not None:
        return run.credentials()
    for certificate in kept_certificates(host, port, environ):
        return certificate.credentials()
    return None


def run_on_this_host(address: JoinAddress, environ: Mapping[str, str]) -> RunFolder | None:
    """Return the state folder of a coordinator, if it runs on this host as this user; otherwise None."""
    run = RunFolder.of_port(environ, address.port)
    if run.has_authority and _is_this_host(address):
        return run
    return None


def _is_this_host(address: JoinAddress) -> bool:
    """Return whether a coordinator's address belongs to this host; nothing is sent."""
    try:
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = infos[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # UDP: only chooses the route
            # The route to an own address begins at this address.
            return bool(probe.getsockname()[0] == probe.getpeername()[0])
    except OSError:
        return False


def _signed_on_this_host(run: RunFolder, job: str) -> JobCertificate:
    """Return a new key and certificate for a job, signed by the run's CA without the coordinator.

    This process makes an invitation in the state folder of the run, and redeems it at once. Both need only
    the files of the folder, and the folder belongs to this user.

    Raises:
        HolmesError: The job was revoked, or the folder cannot be used.
    """
    if run.was_revoked(job):
        raise HolmesError(f"job {job!r} was revoked; `holmes join invite {job}` allows it again")
    key = make_key()
    invitation = run.invite(job, address="")
    issued = run.redeem(job, invitation.secret, make_request(key))
    return JobCertificate(key, issued.certificate, issued.authority, invitation.digest)


def _redeemed(
    kept: JobCertificate, invitation: Invitation, address: JoinAddress, deadline: Deadline
) -> JobCertificate:
    """Exchange an invitation for a certificate with the kept key, and return the certificate.

    Args:
        kept: Contains the private key of the job, and no certificate yet.
        invitation: The invitation.
        address: Address of the coordinator.
        deadline: The coordinator must have answered by then.
    """
    issued = redeem(invitation, address.host, address.port, kept.key, deadline)
    return JobCertificate(kept.key, issued.certificate, issued.authority, invitation.digest)


def _read_kept(path: Path) -> JobCertificate | None:
    """Read the certificate that a job has kept in a file; None: there is no file."""
    try:
        text = read_private(path)
    except FileNotFoundError:
        return None
    return parse_json(text, str(path), "remove it, and invite the job again").into(JobCertificate)


def _keep(path: Path, certificate: JobCertificate) -> None:
    """Write a job's certificate to the file that keeps it.

    Raises:
        HolmesError: The file cannot be written.
    """
    try:
        make_private_folder(path.parent)
        write_private(path, json.dumps(asdict(certificate)), replaces=True)
    except OSError as error:
        raise HolmesError(
            f"{path}: the certificate of the job cannot be kept there ({why(error)}); set XDG_STATE_HOME to"
            " another place"
        ) from None

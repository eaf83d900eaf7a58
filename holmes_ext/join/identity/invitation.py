"""Invitation to a run: a file that gets a job its certificate from `holmes join serve`. Needs no torch.

An invitation is a JSON file:

    job            name that the certificate will have
    address        HOST:PORT of the coordinator, from the options of `holmes join invite`
    fingerprint    SHA-256 of the coordinator's certificate
    secret         144 random bits; whoever sends them first gets the certificate

The job first checks that the coordinator has the certificate of this fingerprint, and only then sends the
secret. It sends a certificate request with the public part of a key that it has made itself; the private key
never leaves the job.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from holmes_ext.document import parse_json
from holmes_ext.errors import HolmesError
from holmes_ext.join.address import is_name
from holmes_ext.join.identity.private_files import read_private
from holmes_ext.join.sockets.certificates import holder_of, make_request, stranger_context
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import (
    HANDSHAKE_S,
    NotAuthentic,
    Refused,
    connect,
    printable,
    send_purpose,
    start_tls,
)
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import address_text

#: Bytes of the secret.
_SECRET_BYTES = 18
#: Purpose of a job's connection to redeem its invitation.
REDEEM = "redeem"
_ADVICE = "write one with `holmes join invite NAME --output FILE`"


@dataclass(frozen=True)
class Invitation:
    """Invitation of a job to a run; it can be used once."""

    job: str  # name that the job's certificate will have
    address: str  # HOST:PORT of the coordinator
    fingerprint: str  # SHA-256 of the coordinator's certificate, in hexadecimal digits
    secret: str  # the first job that sends it gets the certificate

    @classmethod
    def drawn(cls, job: str, address: str, fingerprint: str) -> Invitation:
        """Return an invitation with a random secret.

        Args:
            job: Name of the job.
            address: HOST:PORT of the coordinator.
            fingerprint: SHA-256 of the coordinator's certificate; the job recognizes the coordinator by it.
        """
        return cls(job, address, fingerprint, secrets.token_urlsafe(_SECRET_BYTES))

    @property
    def digest(self) -> str:
        """Return the name under which the invitation is recorded: a hash of the secret."""
        return digest_of_secret(self.secret)

    def text(self) -> str:
        """Return the content of an invitation file."""
        return json.dumps(asdict(self)) + "\n"


class IssuedCertificate(NamedTuple):
    """Certificate that the coordinator has signed for a job, and its CA, as PEM texts."""

    certificate: str
    authority: str


def digest_of_secret(secret: str) -> str:
    """Return the SHA-256 of an invitation's secret, in hexadecimal digits."""
    return hashlib.sha256(secret.encode()).hexdigest()


def read_invitation(path: Path) -> Invitation:
    """Read an invitation from a file.

    Raises:
        HolmesError: The file is missing, belongs to another user, or has no invitation.
    """
    try:
        # is_given: the user has put the file there, so root may own it, and other users may read it.
        text = read_private(path, is_given=True)
    except FileNotFoundError:
        raise HolmesError(f"--holmes-join-invitation: there is no file {path}; {_ADVICE}") from None
    invitation = parse_json(text, str(path), _ADVICE).into(Invitation)
    if not is_name(invitation.job):
        raise HolmesError(f"{path}: {invitation.job!r:.100} is no name of a job; {_ADVICE}")
    return invitation


def redeem(
    invitation: Invitation, host: str, port: int, key: str, deadline: Deadline
) -> IssuedCertificate:
    """Exchange an invitation for a certificate.

    If the request is repeated with the same key, the coordinator returns the same certificate. So a
    lost reply does no harm.

    Args:
        invitation: The invitation.
        host: Host of the coordinator.
        port: Port of the coordinator.
        key: Private key of the job; it is not sent.
        deadline: The certificate must have been received by then.

    Raises:
        OSError: The coordinator was not reached.
        NotAuthentic: Another process answers at the coordinator's address.
        Refused: The invitation was used or revoked, or is of another run.
    """
    where = address_text(host, port)
    deadline = deadline.part(HANDSHAKE_S, "redeeming the invitation")
    connection = start_tls(connect(host, port, deadline), stranger_context(), where, deadline)
    try:
        # Before the secret is sent: TLS has proved that the other end has the key of this certificate.
        if holder_of(connection).fingerprint != invitation.fingerprint:
            raise NotAuthentic(
                f"{where} is not the `holmes join serve` that invited job {invitation.job}: its certificate"
                " has another fingerprint. Invite the job again if its state folder was removed"
            )
        channel = Channel(connection)
        purpose = {
            "purpose": REDEEM,
            "job": invitation.job,
            "secret": invitation.secret,
            "request": make_request(key),
        }
        send_purpose(channel, where, purpose, deadline)
        reply = channel.receive(deadline)
        if "error" in reply:
            raise Refused(printable(str(reply["error"])))
        return IssuedCertificate(str(reply["certificate"]), str(reply["authority"]))
    finally:
        connection.close()

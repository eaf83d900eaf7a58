"""TLS 1.3 contexts by which both ends of a connection show a certificate, and the CA of a run.

    the run's CA     `holmes join serve` makes a CA with a random key. The CA signs the certificate of
                     `holmes join serve`, and a certificate for each invitation that a job redeems. Needs
                     `cryptography` (holmes_ext[join])
    a site's CA      --holmes-join-certificate FILE (certificate, chain and key) and --holmes-join-ca FILE

The certificate of a job names the job. The certificate of the coordinator names COORDINATOR (the run's CA) or
its host (a site's CA). Each end of a connection checks the name in the certificate of the other end
(handshake.py), so no process can act for another job.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError
from holmes_ext.words import why

MISSING = (
    "joined jobs make their keys and certificates with `cryptography`, which is not installed:"
    " pip install 'holmes_ext[join]'"
)
#: Common name of the coordinator's certificate. No job can have it, because names of jobs have no spaces.
COORDINATOR = "holmes join serve"
#: Common name of the CA of a run.
_AUTHORITY = "holmes joined jobs"
#: All key usages of a certificate (RFC 5280, section 4.2.1.3).
_KEY_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


class KeyPair(NamedTuple):
    """Private key of a CA or of a process, and its certificate, as PEM texts."""

    key: str
    certificate: str


@dataclass(frozen=True)
class TlsContexts:
    """TLS contexts of this process, for connections that it accepts and that it opens."""

    server: ssl.SSLContext  # for accepted connections
    client: ssl.SSLContext  # for calls


@dataclass(frozen=True)
class Holder:
    """Fingerprint and names in the certificate that the other end of a connection has shown."""

    #: SHA-256 of the certificate, in hexadecimal digits; "": the other end has shown no certificate.
    fingerprint: str = ""
    #: The common name, and the host names and IP addresses among the alternative names.
    names: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return ", ".join(sorted(self.names)) or "nobody"


def contexts_of(pair: KeyPair, authority: str) -> TlsContexts:
    """Return the TLS contexts of a process with a certificate that a CA has signed.

    Args:
        pair: Key and certificate of this process.
        authority: Certificate of the CA, as PEM text.

    Raises:
        ValueError, OSError: The texts are no key and certificates, or do not belong together.
    """
    with _memory_file((pair.certificate + pair.key).encode()) as file:
        return _contexts(file, authority)


def site_contexts(certificate: str, authority: str) -> TlsContexts:
    """Return TLS contexts with the certificates in files.

    Args:
        certificate: File with certificate, chain and key.
        authority: File with the CA.

    Raises:
        HolmesError: A file cannot be read or used.
    """
    chain = read_text(certificate, "--holmes-join-certificate names a PEM file")
    trusted = read_text(authority, "--holmes-join-ca names a PEM file")
    try:
        # OpenSSL loads certificate and key from a path, several times. A copy in memory has the
        # same text each time, also if the site replaces the file in between.
        with _memory_file(chain.encode()) as file:
            return _contexts(file, trusted)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = f"--holmes-join-certificate {certificate} and --holmes-join-ca {authority}"
        raise HolmesError(
            f"{files}: no certificate, key and CA can be read from them ({why(error)}); both are PEM"
            " files, the first with the chain and the key without a password"
        ) from None


def stranger_context() -> ssl.SSLContext:
    """Return the TLS context of a job that has no certificate yet, to redeem its invitation.

    It trusts no CA. The caller must compare the fingerprint of the other end's certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def holder_of(connection: ssl.SSLSocket) -> Holder:
    """Return the holder of the certificate that the other end of a TLS connection has shown.

    If the certificate was not verified (stranger_context()), the result has its fingerprint, but no names.
    """
    der = connection.getpeercert(binary_form=True)
    if der is None:
        return Holder()
    details: Any = connection.getpeercert() or {}  # {} if the certificate was not verified
    names = [value for kind, value in details.get("subjectAltName", ()) if kind != "URI"]
    for attributes in details.get("subject", ()):
        names += [value for kind, value in attributes if kind == "commonName"]
    return Holder(hashlib.sha256(der).hexdigest(), frozenset(names))


def fingerprint_of(certificate: str) -> str:
    """Return the SHA-256 of a certificate in a PEM text, in hexadecimal digits."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.strip())).hexdigest()


def _contexts(file: str, authority: str) -> TlsContexts:
    """Return TLS contexts with the certificate and key in a PEM file.

    Args:
        file: Path of the file.
        authority: Trusted CA, as PEM text.
    """
    server = _context(ssl.PROTOCOL_TLS_SERVER, file, authority)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, file, authority)
    server.num_tickets = 0  # sessions are not resumed
    return TlsContexts(server, client)


def _context(protocol: Any, file: str, authority: str) -> ssl.SSLContext:
    """Return a TLS 1.3 context that accepts only peers with a certificate of the given CA.

    Args:
        protocol: ssl.PROTOCOL_TLS_SERVER or ssl.PROTOCOL_TLS_CLIENT.
        file: Path of a PEM file with certificate and private key of this process.
        authority: Certificate of the CA, as PEM text.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A job may run on any host. handshake.py checks the name in the certificate instead.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # Without a password function, OpenSSL would prompt for the password of an encrypted key on the terminal.
    context.load_cert_chain(file, password=lambda: "")
    context.load_verify_locations(cadata=authority)
    return context


@contextlib.contextmanager
def _memory_file(data: bytes) -> Iterator[str]:
    """Provide a path from which OpenSSL can read `data` without a file on a disk."""
    descriptor = os.memfd_create("holmes-join")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


# Keys and certificates of the run's CA


def make_key() -> str:
    """Return a new random private key (P-256) as PEM text.

    Raises:
        HolmesError: `cryptography` is not installed.
    """
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise HolmesError(MISSING) from None
    data = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return data.decode()


def make_authority() -> KeyPair:
    """Return a new CA with a random key.

    Raises:
        HolmesError: `cryptography` is not installed.
    """
    key = make_key()
    private_key = _private_key(key)
    return KeyPair(key, _signed(private_key, private_key.public_key(), _AUTHORITY))


def make_request(key: str) -> str:
    """Return a certificate request (PKCS #10) for a private key, as PEM text.

    The request proves that its sender has the key. It contains no name, because the CA decides about
    the name.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    signed = request.sign(_private_key(key), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def sign_request(authority: KeyPair, request: str, name: str) -> str:
    """Return a certificate for the key in a certificate request, as PEM text.

    Args:
        authority: The CA.
        request: The certificate request, as PEM text.
        name: Common name of the certificate.

    Raises:
        ValueError: The text is no request for a key on the curve P-256, or its signature is wrong.
    """
    return _signed(_private_key(authority.key), _requested_key(request), name)


def has_key_of(certificate: str, request: str) -> bool:
    """Return whether a certificate and a certificate request contain the same public key.

    Raises:
        ValueError: A text cannot be read.
    """
    from cryptography import x509

    key_of_certificate: Any = x509.load_pem_x509_certificate(certificate.encode()).public_key()
    return bool(key_of_certificate.public_numbers() == _requested_key(request).public_numbers())


def _private_key(key: str) -> Any:
    from cryptography.hazmat.primitives import serialization

    return serialization.load_pem_private_key(key.encode(), password=None)


def _requested_key(request: str) -> Any:
    """Return the public key in a certificate request; raise ValueError if the request is not valid."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    parsed = x509.load_pem_x509_csr(request.encode())
    public_key = parsed.public_key()
    is_p256 = isinstance(public_key, ec.EllipticCurvePublicKey) and isinstance(
        public_key.curve, ec.SECP256R1
    )
    if not is_p256 or not parsed.is_signature_valid:
        raise ValueError("it is no certificate request for a key on the curve P-256")
    return public_key


def _signed(authority_key: Any, public_key: Any, name: str) -> str:
    """Return a new certificate, signed by the CA, as PEM text.

    The certificate is valid from 2000 to 2100, so that wrong clocks of hosts do not matter. `holmes join
    revoke` ends it before.

    Args:
        authority_key: Private key of the CA.
        public_key: Key that the certificate contains.
        name: Common name of the certificate; _AUTHORITY: make the certificate of the CA itself.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    def common_name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    is_authority = name == _AUTHORITY
    usages = dict.fromkeys(_KEY_USAGES, False)
    usages["key_cert_sign" if is_authority else "digital_signature"] = True
    path_length = 0 if is_authority else None  # 0: it signs no other CAs
    certificate = (
        x509.CertificateBuilder()
        .issuer_name(common_name(_AUTHORITY))
        .subject_name(common_name(name))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1))
        .not_valid_after(datetime(2100, 1, 1))
        .add_extension(x509.BasicConstraints(is_authority, path_length), critical=True)
        .add_extension(x509.KeyUsage(**usages), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode()

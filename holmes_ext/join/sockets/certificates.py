"""TLS 1.3 contexts with which both ends of a connection show a certificate.

    without files    each process makes, in memory, a CA whose key follows from the run's token (the same CA
                     in all processes), and its own certificate, signed by this CA. Needs `cryptography`
                     (holmes_ext[join])
    a site's CA      --holmes-join-certificate FILE (certificate, chain and key) and --holmes-join-ca FILE

In both cases the hashes of both certificates are part of the proof of the token (handshake.py). So a
man in the middle is detected, and a process with a certificate but without the token is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError
from holmes_ext.words import why

MISSING = "`cryptography` is not installed: pip install 'holmes_ext[join]'"

_BEGIN = "-----BEGIN CERTIFICATE-----"
_END = "-----END CERTIFICATE-----"
#: Order of the curve P-256 (FIPS 186-4, D.1.2.3).
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
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


@dataclass(frozen=True)
class TlsContexts:
    """TLS contexts of this process, for connections that it accepts and that it opens."""

    server: ssl.SSLContext  # for accepted connections
    client: ssl.SSLContext  # for calls
    certificate: bytes  # SHA-256 of this process's certificate


class _PemFiles(NamedTuple):
    """Certificates and private key that a process generates at start, as PEM texts."""

    authority: bytes  # certificate of the CA
    certificate: bytes  # of this process, signed by the CA
    private_key: bytes  # of this process


def own_contexts(key: bytes) -> TlsContexts:
    """Return TLS contexts with certificates that are made now.

    Args:
        key: Key of the run (handshake.Credentials), from which the CA follows.

    Raises:
        HolmesError: `cryptography` is not installed.
    """
    try:
        files = _make_certificates(key)
    except ImportError:
        raise HolmesError(MISSING) from None
    with _memory_file(files.certificate + files.private_key) as file:
        return _contexts(file, files.authority.decode())


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


def certificate_hash(der: bytes) -> bytes:
    """Return the SHA-256 of a certificate in DER format."""
    return hashlib.sha256(der).digest()


def _contexts(file: str, authority: str) -> TlsContexts:
    """Return TLS contexts with the certificate and key in a PEM file.

    Args:
        file: Path of the file.
        authority: Trusted CA, as PEM text.
    """
    server = _context(ssl.PROTOCOL_TLS_SERVER, file, authority)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, file, authority)
    server.num_tickets = 0  # sessions are not resumed
    # The first certificate in the file is this process's own; its chain follows.
    with open(file, encoding="ascii") as pem:
        first_certificate = pem.read().partition(_END)[0] + _END
    der = ssl.PEM_cert_to_DER_cert(first_certificate[first_certificate.index(_BEGIN) :])
    return TlsContexts(server, client, certificate_hash(der))


def _context(protocol: Any, file: str, authority: str) -> ssl.SSLContext:
    """Return a TLS 1.3 context that accepts only peers with a certificate of the given CA.

    Args:
        protocol: ssl.PROTOCOL_TLS_SERVER or ssl.PROTOCOL_TLS_CLIENT.
        file: Path of a PEM file with certificate and private key of this process.
        authority: Certificate of the CA, as PEM text.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The proof of the token identifies the other end, on whatever host it runs.
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


def _make_certificates(key: bytes) -> _PemFiles:
    """Make the CA of the run, and a certificate for this process.

    The CA's private key follows from the key of the run, so all processes of the run make the same CA.

    Args:
        key: Key of the run.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    curve = ec.SECP256R1()
    digest = hmac.digest(key, b"certificate authority", "sha512")
    # From 1 to the order of the curve - 1.
    private_number = int.from_bytes(digest, "big") % (_P256_ORDER - 1) + 1
    authority_key = ec.derive_private_key(private_number, curve)
    own_key = ec.generate_private_key(curve)
    return _PemFiles(
        authority=_signed(authority_key, authority_key.public_key(), is_authority=True),
        certificate=_signed(authority_key, own_key.public_key(), is_authority=False),
        private_key=own_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _signed(authority_key: Any, public_key: Any, is_authority: bool) -> bytes:
    """Return a new certificate, signed by the CA, as PEM text.

    The certificate is valid from 2000 to 2100, so that wrong clocks of hosts do not matter.

    Args:
        authority_key: Private key of the CA.
        public_key: Key that the certificate contains.
        is_authority: Make the certificate of the CA itself.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    if is_authority:
        subject = "holmes joined jobs"
        allowed_usage = "key_cert_sign"
        path_length = 0  # it signs no other CAs
    else:
        subject = "one process"
        allowed_usage = "digital_signature"
        path_length = None
    usages = dict.fromkeys(_KEY_USAGES, False)
    usages[allowed_usage] = True
    certificate = (
        x509.CertificateBuilder()
        .issuer_name(name("holmes joined jobs"))
        .subject_name(name(subject))
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
    return certificate.public_bytes(serialization.Encoding.PEM)

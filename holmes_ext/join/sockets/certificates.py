"""TLS 1.3 contexts: both ends show a certificate.

    without files     made at start, in memory: a CA whose key follows from the run's token, the
                      same in all processes, and a certificate of this process, signed by it.
                      Needs `cryptography` (holmes_ext[join])
    of a site's CA    --holmes-join-certificate FILE (chain and key) and --holmes-join-ca FILE

Either way both certificates' hashes are part of the proof of the token (handshake.py), so whoever stands
between two processes is found out, and whoever has a certificate but no token is refused.
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
from typing import Any

from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError
from holmes_ext.words import why

MISSING = "`cryptography` is not installed: pip install 'holmes_ext[join]'"


@dataclass(frozen=True)
class TlsContexts:
    """For listeners and for callers. certificate: SHA-256 of this process's own."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes


def own_contexts(key: bytes) -> TlsContexts:
    """Certificates made here. key: of the run (handshake.Credentials). HolmesError: no `cryptography`."""
    try:
        authority, certificate, private_key = _make(key)
    except ImportError:
        raise HolmesError(MISSING) from None
    with _memory_file(certificate + private_key) as file:
        return _contexts(file, authority.decode())


def site_contexts(certificate: str, authority: str) -> TlsContexts:
    """From files. HolmesError names the one that cannot be used."""
    chain = read_text(certificate, "--holmes-join-certificate names a PEM file")
    trusted = read_text(authority, "--holmes-join-ca names a PEM file")
    try:
        with _memory_file(chain.encode()) as file:
            return _contexts(file, trusted)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = f"--holmes-join-certificate {certificate} and --holmes-join-ca {authority}"
        raise HolmesError(
            f"{files}: no certificate, key and CA can be read from them ({why(error)}); both are PEM"
            " files, the first with the chain and the key without a password"
        ) from None


def certificate_hash(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()


def _contexts(file: str, authority: str) -> TlsContexts:
    made = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # who it is shows the token's proof, wherever it listens
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(file, password=lambda: "")
        context.load_verify_locations(cadata=authority)
        made.append(context)
    made[0].num_tickets = 0  # sessions are not resumed
    with open(file, encoding="ascii") as pem:
        first = pem.read().partition(_END)[0] + _END
    der = ssl.PEM_cert_to_DER_cert(first[first.index(_BEGIN) :])
    return TlsContexts(made[0], made[1], certificate_hash(der))


_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


@contextlib.contextmanager
def _memory_file(data: bytes) -> Iterator[str]:
    """A name under which OpenSSL can read `data`, which is never on a disk."""
    descriptor = os.memfd_create("holmes-join")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _make(key: bytes) -> tuple[bytes, bytes, bytes]:
    """The CA's certificate, one of this process, its private key: PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    curve = ec.SECP256R1()
    number = int.from_bytes(hmac.digest(key, b"certificate authority", "sha512"), "big")
    authority_key = ec.derive_private_key(number % (_P256_ORDER - 1) + 1, curve)
    own_key = ec.generate_private_key(curve)
    authority = _signed(authority_key, authority_key.public_key(), is_authority=True)
    certificate = _signed(authority_key, own_key.public_key(), is_authority=False)
    form, lock = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return authority, certificate, own_key.private_bytes(serialization.Encoding.PEM, form, lock)


def _signed(authority_key: Any, public_key: Any, is_authority: bool) -> bytes:
    """A certificate that is valid whatever the hosts' clocks say: PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    usage = dict.fromkeys(_KEY_USAGES, False)
    usage["key_cert_sign" if is_authority else "digital_signature"] = True
    made = (
        x509.CertificateBuilder()
        .issuer_name(name("holmes joined jobs"))
        .subject_name(name("holmes joined jobs" if is_authority else "one process"))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1))
        .not_valid_after(datetime(2100, 1, 1))
        .add_extension(
            x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True
        )
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


#: Of the curve P-256: FIPS 186-4, D.1.2.3.
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
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

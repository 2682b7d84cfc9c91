"""TLS 1.3 between peers: the listener shows a certificate of its identity, and the dialler compares the key in it."""

from __future__ import annotations

import os
import ssl
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from shoal.p2p.identity import Identity, PeerID

# The dates of the certificate have no meaning here: a new one is made at every start.
_BEGINNING, _END = datetime(2020, 1, 1), datetime(2120, 1, 1)


def listening(identity: Identity) -> tuple[ssl.SSLContext, bytes]:
    """The TLS context of a listener with this identity, and the certificate that it shows (DER)."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal")])
    certificate = (
        x509.CertificateBuilder(name, name, identity.peer_id.public_key(), x509.random_serial_number())
        .not_valid_before(_BEGINNING)
        .not_valid_after(_END)
        .sign(identity.secret, None)
    )
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    key = identity.secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # `ssl` reads keys from files only. This file is in memory, and never on a disk.
    with open(os.memfd_create("shoal"), "wb", buffering=0) as file:
        file.write(key + certificate.public_bytes(Encoding.PEM))
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context, certificate.public_bytes(Encoding.DER)


def dialling() -> ssl.SSLContext:
    """The TLS context of a dialler. It trusts any certificate: the caller must check `peer_of` the certificate."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def peer_of(certificate: bytes) -> PeerID | None:
    """The peer whose certificate (DER) this is. TLS has proven that the peer has the secret key. None if it is no
    certificate with an ed25519 key.
    """
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm):
        return None
    return PeerID(key.public_bytes_raw()) if isinstance(key, Ed25519PublicKey) else None


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context

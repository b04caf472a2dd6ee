"""A certificate authority that lives as long as a test, and the server certificates below it.

Python 3.13 verifies with VERIFY_X509_STRICT: without the key identifiers, a critical BasicConstraints and the CA's
KeyUsage a client refuses the chain.
"""

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID


class Authority:
    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def generate(cls) -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("Simulated APNs root")
        certificate = (
            _certificate(subject=name, issuer=name, public_key=key.public_key(), issuer_key=key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(key_cert_sign=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    def pem(self) -> bytes:
        return self._certificate.public_bytes(Encoding.PEM)

    def server_context(self, directory: Path) -> ssl.SSLContext:
        """Issue a certificate for 127.0.0.1 and localhost; OpenSSL takes it from a file only."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [
            x509.DNSName("localhost"),
            x509.DNSName("host.docker.internal"),  # what a container calls the machine that it runs on
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        certificate = (
            _certificate(
                subject=_name("Simulated APNs"),
                issuer=self._certificate.subject,
                public_key=key.public_key(),
                issuer_key=self._key.public_key(),
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        both = directory / "server.pem"
        both.touch(mode=0o600)
        both.write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            + certificate.public_bytes(Encoding.PEM),
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(both)
        context.set_alpn_protocols(["h2"])
        both.unlink()
        return context


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def _certificate(
    *,
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        # A day either way covers a clock that a test has moved and any run that is left standing over night.
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _key_usage(*, digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )

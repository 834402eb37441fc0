"""An authority that issues certificates to the two ends of a connection, good ones and bad ones."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, in files."""

    certificate: str
    key: str


class Authority:
    """Signs certificates for 127.0.0.1.

    Args:
        folder: Where the files go.
        name: Its own.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        own = self._builder(self._name, self._key, days=2).add_extension(x509.BasicConstraints(True, None), True)
        own = own.add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), False)
        own = own.add_extension(
            x509.KeyUsage(False, False, False, False, False, True, True, False, False), critical=True
        )
        self.file = self._write(f"{name}.pem", own.sign(self._key, hashes.SHA256()))

    def issue(
        self,
        name: str,
        *,
        address: str = "127.0.0.1",
        dns_name: str | None = None,
        days: int = 2,
        self_signed: bool = False,
    ) -> Issued:
        """A certificate for an address, or for a name in its place; of negative days: one that has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        whose = x509.IPAddress(ipaddress.ip_address(address)) if dns_name is None else x509.DNSName(dns_name)
        alternative = x509.SubjectAlternativeName([whose])
        signer = key if self_signed else self._key
        builder = self._builder(subject, key, days=days, issuer=subject if self_signed else self._name)
        builder = builder.add_extension(alternative, critical=False)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        path = self._folder / f"{name}.key"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return Issued(self._write(f"{name}.pem", builder.sign(signer, hashes.SHA256())), str(path))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: int, issuer: x509.Name | None = None
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 3 * DAY)
            .not_valid_after(now + days * DAY)
        )

    def _write(self, name: str, certificate: x509.Certificate) -> str:
        path = self._folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return str(path)

"""Credentials of one end of a connection between machines, and the rules that require them.

The folder permissions protect a Unix socket, and the logins of the machine protect a loopback address. Every other
address is on a network: without authentication anyone can use the accelerator of the engine, and without TLS anyone on
the network path can read the prompts. An address without authentication is rejected, and an address without TLS is
rejected unless the operator has allowed it.
"""

import hashlib
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maitred.core.errors import ConfigInvalid
from maitred.core.secret import Secret
from maitred.wire.address import Address, TcpAddress
from maitred.wire.link.config import LinkConfig
from maitred.wire.link.handshake import ENGINE_LINK, LinkKind
from maitred.wire.loopback import is_loopback

MIN_SECRET_CHARACTERS = 16
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of one end for one address; empty if the address needs none."""

    secret: Secret | None = None
    tls: ssl.SSLContext | None = None
    binding: bytes = b""
    """Digest of the certificate of this end, if this end listens; see `channel_binding`."""
    server_name: str | None = None
    """Name that the certificate of the other end must have; None: its address."""


def channel_binding(certificate: bytes) -> bytes:
    """Computes the binding of the proofs to a connection: the digest of the listener's certificate (DER)."""
    return hashlib.sha256(certificate).digest()


def listener_credentials(address: Address, config: LinkConfig, kind: LinkKind = ENGINE_LINK) -> Credentials:
    """Loads the credentials of an engine, or of another listener, at an address.

    Raises:
        ConfigInvalid: Other parties on the network could use it or read the traffic, or a file cannot be used.
    """
    if not isinstance(address, TcpAddress):
        return Credentials(config.secret)
    if fault := listener_fault(address, config, kind):
        raise ConfigInvalid(fault)
    if config.certificate_file is None:
        return Credentials(config.secret)
    tls = _tls_context(ssl.PROTOCOL_TLS_SERVER, config)
    if config.ca_file is not None:
        tls.verify_mode = ssl.CERT_REQUIRED
    found = _CERTIFICATE.search(Path(config.certificate_file).read_text())
    assert found is not None, "the context has read it"
    return Credentials(config.secret, tls, channel_binding(ssl.PEM_cert_to_DER_cert(found[0])))


def listener_fault(address: TcpAddress, config: LinkConfig, kind: LinkKind) -> str:
    """Returns why nobody should listen at an address with these settings; empty: it is safe."""
    fault = _exposure_fault(address, config, "engine_link.certificate_file", config.certificate_file)
    return fault and f"The {kind.listener} would listen on {address}, which other machines can reach. {fault}"


def dialer_credentials(address: Address, config: LinkConfig, kind: LinkKind = ENGINE_LINK) -> Credentials:
    """Loads the credentials of a gateway that connects to an address.

    Raises:
        ConfigInvalid: Other parties on the network could imitate the engine or read the traffic, or a file cannot be
            used.
    """
    if not isinstance(address, TcpAddress):
        return Credentials(config.secret)
    if fault := _exposure_fault(address, config, "engine_link.ca_file", config.ca_file):
        raise ConfigInvalid(f"The {kind.listener} at {address} is on another machine. {fault}")
    if config.ca_file is None:
        return Credentials(config.secret)
    name = config.server_name if kind is ENGINE_LINK else None
    return Credentials(config.secret, _tls_context(ssl.PROTOCOL_TLS_CLIENT, config), server_name=name)


def link_faults(config: LinkConfig) -> Iterator[tuple[str, str]]:
    """Yields each faulty setting as its key and a message."""
    if config.secret is not None and len(config.secret.reveal()) < MIN_SECRET_CHARACTERS:
        yield (
            "engine_link.secret",
            f"It is shorter than {MIN_SECRET_CHARACTERS} characters, so it can be guessed. `openssl rand -hex 32` "
            "makes a good one.",
        )
    if config.key_file is not None and config.certificate_file is None:
        yield "engine_link.key_file", "A key is of no use without engine_link.certificate_file."


def _exposure_fault(address: TcpAddress, config: LinkConfig, key: str, file: str | None) -> str:
    """Returns the protection that a network address lacks, or an empty text if it lacks none."""
    if is_loopback(address.host):
        return ""
    if config.secret is None:
        return (
            "Set engine_link.secret to {env: NAME} or {file: path}, the same on both ends; or use a loopback address."
        )
    if file is None and not config.allow_plaintext:
        return (
            f"Set {key}, so that prompts and answers are encrypted; or engine_link.allow_plaintext, if something else "
            "encrypts them."
        )
    return ""


def _tls_context(protocol: int, config: LinkConfig) -> ssl.SSLContext:
    """Makes a TLS context with this end's certificate and with the authorities for the other end."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # both ends are maitred, so no older version is needed
    try:
        if config.ca_file is not None:
            context.load_verify_locations(config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigInvalid(
            f"The certificates in engine_link.ca_file, {config.ca_file}, cannot be used: {error}."
        ) from error
    try:
        if config.certificate_file is not None:
            context.load_cert_chain(config.certificate_file, config.key_file, password=_reject_encrypted_key)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigInvalid(
            f"The certificate in engine_link.certificate_file, {config.certificate_file}, cannot be used with its key: "
            f"{error}."
        ) from error
    return context


def _reject_encrypted_key() -> str:
    """Rejects an encrypted key, because no person can enter its password."""
    raise ValueError("the key is encrypted, and it must not be")

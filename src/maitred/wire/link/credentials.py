"""What one end brings to a connection between a gateway and an engine, and where it may do without.

A Unix socket is guarded by the permissions of its folder, and a loopback address by who may log in. Everything else is
a network: there an engine that takes requests from anybody gives its accelerator away, and without TLS everybody on the
way reads the prompts. The first is refused, and the second unless the operator has said otherwise.
"""

import hashlib
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maitred.core.errors import ConfigInvalid
from maitred.core.loopback import is_loopback
from maitred.core.secret import Secret
from maitred.wire.address import Address, TcpAddress
from maitred.wire.link.config import LinkConfig

LEAST_SECRET_CHARACTERS = 16
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of one end, for one address; neither for one that needs none."""

    secret: Secret | None = None
    tls: ssl.SSLContext | None = None
    binding: bytes = b""
    """The digest of this end's own certificate, if it is an engine's; see `binding_of`."""


def binding_of(certificate: bytes) -> bytes:
    """What ties the proofs of the secret to a connection: the digest of the engine's certificate, in DER."""
    return hashlib.sha256(certificate).digest()


def engine_credentials(address: Address, config: LinkConfig) -> Credentials:
    """Those of an engine that listens there.

    Raises:
        ConfigInvalid: Strangers could use it or listen in, or a file cannot be used.
    """
    if not isinstance(address, TcpAddress):
        return Credentials(config.secret)
    if fault := _exposed(address, config, "engine_link.certificate_file", config.certificate_file):
        raise ConfigInvalid(f"The engine would listen on {address}, which other machines can reach. {fault}")
    if config.certificate_file is None:
        return Credentials(config.secret)
    tls = _context(ssl.PROTOCOL_TLS_SERVER, config)
    if config.ca_file is not None:
        tls.verify_mode = ssl.CERT_REQUIRED
    found = _CERTIFICATE.search(Path(config.certificate_file).read_text())
    assert found is not None, "the context has read it"
    return Credentials(config.secret, tls, binding_of(ssl.PEM_cert_to_DER_cert(found[0])))


def gateway_credentials(address: Address, config: LinkConfig) -> Credentials:
    """Those of a gateway that connects there.

    Raises:
        ConfigInvalid: Strangers could pose as the engine or listen in, or a file cannot be used.
    """
    if not isinstance(address, TcpAddress):
        return Credentials(config.secret)
    if fault := _exposed(address, config, "engine_link.ca_file", config.ca_file):
        raise ConfigInvalid(f"The engine at {address} is on another machine. {fault}")
    return Credentials(config.secret, None if config.ca_file is None else _context(ssl.PROTOCOL_TLS_CLIENT, config))


def link_faults(config: LinkConfig) -> Iterator[tuple[str, str]]:
    """The key to point at, and what is wrong."""
    if config.secret is not None and len(config.secret.reveal()) < LEAST_SECRET_CHARACTERS:
        yield (
            "engine_link.secret",
            f"It is shorter than {LEAST_SECRET_CHARACTERS} characters, so it can be guessed. `openssl rand -hex 32` "
            "makes a good one.",
        )
    if config.key_file is not None and config.certificate_file is None:
        yield "engine_link.key_file", "A key is of no use without engine_link.certificate_file."


def _exposed(address: TcpAddress, config: LinkConfig, key: str, file: str | None) -> str:
    """What is missing for an address that a network can reach; empty if nothing is."""
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


def _context(protocol: int, config: LinkConfig) -> ssl.SSLContext:
    """A context with this end's certificate and with those who vouch for the other."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # both ends are ours
    try:
        if config.ca_file is not None:
            context.load_verify_locations(config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigInvalid(
            f"The certificates in engine_link.ca_file, {config.ca_file}, cannot be used: {error}."
        ) from error
    try:
        if config.certificate_file is not None:
            context.load_cert_chain(config.certificate_file, config.key_file, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigInvalid(
            f"The certificate in engine_link.certificate_file, {config.certificate_file}, cannot be used with its key: "
            f"{error}."
        ) from error
    return context


def _no_password() -> str:
    """Nobody is there to be asked for one."""
    raise ValueError("the key is encrypted, and it must not be")

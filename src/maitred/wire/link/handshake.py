"""Mutual proof of a shared secret before the first frame; the code performs no I/O.

::

    listener -> dialer   magic, 32 random bytes                                              opening
    dialer -> listener   32 random bytes, HMAC("gateway", both, binding)                     answer
    listener -> dialer   HMAC("engine", both, binding)                                       proof; frames follow

A gateway dials engines, and agents dial gateways. The proofs of the two links differ, so that none serves the other.

The secret is the key of both HMAC-SHA256 and is never sent. Each proof covers the nonce that the other end has just
drawn, so a recorded proof is useless later; it also contains the role of its sender, so an attacker cannot send it
back. The *binding* is the digest of the listener's certificate if the connection uses TLS (the idea of RFC 5929's
``tls-server-end-point``): a man in the middle with a certificate that the gateway trusts by mistake cannot forward the
proofs. Without TLS the proofs protect only the opening of the connection, and an attacker on the network path can read
and change the later data.

The dialer sends its proof first: the listener reveals nothing to an unauthenticated peer, and reads only these few
bytes and no frame from it.
"""

import hashlib
import hmac
import secrets
from typing import NamedTuple

from maitred.core.errors import ProtocolViolation
from maitred.core.secret import Secret

MAGIC = b"maitred\x01"
"""First bytes of the listener, which cannot begin a frame.

As a frame length they would be far above the limit.
"""
NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size


class LinkKind(NamedTuple):
    """Kind of a link, by the roles of its two ends."""

    listener: str
    dialer: str


ENGINE_LINK = LinkKind("engine", "gateway")
AGENT_LINK = LinkKind("gateway", "agent")


class ListenerHandshake:
    """Listener's side of the handshake.

    Args:
        secret: The secret that the dialer must prove to know.
        binding: The digest of the listener's certificate; empty without TLS.
        nonce: Random bytes; the object draws them if the argument is missing.
        kind: Kind of the link.

    Attributes:
        opening: The bytes to send first.
    """

    def __init__(
        self, secret: Secret, binding: bytes = b"", nonce: bytes | None = None, kind: LinkKind = ENGINE_LINK
    ) -> None:
        self._secret = secret
        self._binding = binding
        self._kind = kind
        self._nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self._received = b""
        self.opening = MAGIC + self._nonce

    def feed(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Reads bytes from the dialer.

        Returns:
            None while there are too few bytes; after that, the proof to send and the bytes that follow the dialer's
            proof.

        Raises:
            ProtocolViolation: The dialer does not know the secret.
        """
        self._received += data
        if len(self._received) < NONCE_BYTES + _PROOF_BYTES:
            return None
        dialer_nonce, proof, rest = _split(self._received, NONCE_BYTES, _PROOF_BYTES)
        nonces, kind = self._nonce + dialer_nonce, self._kind
        if not hmac.compare_digest(proof, _proof(self._secret, kind, kind.dialer, nonces, self._binding)):
            raise ProtocolViolation(f"it does not know the secret of this {kind.listener} (engine_link.secret)")
        return _proof(self._secret, kind, kind.listener, nonces, self._binding), rest


class DialerHandshake:
    """Dialer's side of the handshake.

    Args:
        secret: The secret that the listener must prove to know.
        binding: The digest of the listener's certificate; empty without TLS.
        nonce: Random bytes; the object draws them if the argument is missing.
        kind: Kind of the link.

    Attributes:
        proof_sent: Whether the dialer's proof has been returned for sending.
        rest: Bytes after the listener's proof, or None until the proof has come.
    """

    def __init__(
        self, secret: Secret, binding: bytes = b"", nonce: bytes | None = None, kind: LinkKind = ENGINE_LINK
    ) -> None:
        self._secret = secret
        self._binding = binding
        self._kind = kind
        self._nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self._listener_nonce = b""
        self._received = b""
        self.proof_sent = False
        self.rest: bytes | None = None

    def feed(self, data: bytes) -> bytes:
        """Reads bytes from the listener and returns the bytes to send.

        Raises:
            ProtocolViolation: The peer does not ask for a secret, or does not know it.
        """
        self._received += data
        kind = self._kind
        if not self.proof_sent:
            if not MAGIC.startswith(self._received[: len(MAGIC)]):
                raise ProtocolViolation(
                    f"It asks for no secret, and this {kind.dialer} has one. Give the {kind.listener} the same "
                    "engine_link.secret."
                )
            if len(self._received) < len(MAGIC) + NONCE_BYTES:
                return b""
            _, self._listener_nonce, self._received = _split(self._received, len(MAGIC), NONCE_BYTES)
            self.proof_sent = True
            nonces = self._listener_nonce + self._nonce
            return self._nonce + _proof(self._secret, kind, kind.dialer, nonces, self._binding)
        if len(self._received) >= _PROOF_BYTES:
            proof, self.rest = self._received[:_PROOF_BYTES], self._received[_PROOF_BYTES:]
            nonces = self._listener_nonce + self._nonce
            if not hmac.compare_digest(proof, _proof(self._secret, kind, kind.listener, nonces, self._binding)):
                raise ProtocolViolation(
                    f"What answers does not know the secret (engine_link.secret). It is no {kind.listener} of ours."
                )
        return b""


def _proof(secret: Secret, kind: LinkKind, role: str, nonces: bytes, binding: bytes) -> bytes:
    message = b"\0".join((f"maitred {kind.listener} link".encode(), role.encode(), nonces + binding))
    return hmac.digest(secret.reveal().encode(), message, "sha256")


def _split(data: bytes, first: int, second: int) -> tuple[bytes, bytes, bytes]:
    return data[:first], data[first : first + second], data[first + second :]

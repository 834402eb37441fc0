"""Mutual proof of a shared secret, before a frame is read. Bytes in, bytes out.

::

    engine  -> gateway   magic, 32 random bytes                                              opening
    gateway -> engine    32 random bytes, HMAC("gateway", both, binding)                     answer
    engine  -> gateway   HMAC("engine", both, binding)                                       proof; frames follow

The secret is the key of both HMAC-SHA256 and is never sent. Each proof covers the nonce that the other end has just
drawn, so a recorded proof is of no use later; it names the role of its sender, so it cannot be reflected. The *binding*
is the digest of the engine's certificate where the connection is TLS (the idea of RFC 5929's
``tls-server-end-point``): a man in the middle, with a certificate of his own that the gateway has been made to trust,
cannot forward the proofs. Without TLS the proofs cover the opening of the connection only, and an attacker on the
network path can read and change what follows.

The gateway proves first: an engine reveals nothing to an unauthenticated peer, and reads only this many bytes of it and
no frame.
"""

import hashlib
import hmac
import secrets

from maitred.core.errors import ProtocolViolation
from maitred.core.secret import Secret

MAGIC = b"maitred\x01"
"""First bytes of the engine. No frame begins so: its length would be far over the limit."""
NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size


class EngineHandshake:
    """The engine's end of the handshake.

    Args:
        secret: The secret that the gateway must prove to know.
        binding: The digest of the engine's certificate; empty without TLS.
        nonce: Random bytes; drawn unless given.

    Attributes:
        opening: The bytes to send first.
    """

    def __init__(self, secret: Secret, binding: bytes = b"", nonce: bytes | None = None) -> None:
        self._secret = secret
        self._binding = binding
        self._nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self._received = b""
        self.opening = MAGIC + self._nonce

    def feed(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Reads bytes of the gateway.

        Returns:
            None while there are too few bytes; then the proof to send, and the bytes after the gateway's proof.

        Raises:
            ProtocolViolation: The gateway does not know the secret.
        """
        self._received += data
        if len(self._received) < NONCE_BYTES + _PROOF_BYTES:
            return None
        gateway_nonce, proof, rest = _split(self._received, NONCE_BYTES, _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(self._secret, b"gateway", self._nonce, gateway_nonce, self._binding)):
            raise ProtocolViolation("it does not know the secret of this engine (engine_link.secret)")
        return _proof(self._secret, b"engine", self._nonce, gateway_nonce, self._binding), rest


class GatewayHandshake:
    """The gateway's end of the handshake.

    Args:
        secret: The secret that the engine must prove to know.
        binding: The digest of the engine's certificate; empty without TLS.
        nonce: Random bytes; drawn unless given.

    Attributes:
        proof_sent: Whether the gateway's proof has been returned for sending.
        rest: The bytes after the engine's proof; None until that has come.
    """

    def __init__(self, secret: Secret, binding: bytes = b"", nonce: bytes | None = None) -> None:
        self._secret = secret
        self._binding = binding
        self._nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self._engine_nonce = b""
        self._received = b""
        self.proof_sent = False
        self.rest: bytes | None = None

    def feed(self, data: bytes) -> bytes:
        """Reads bytes of the engine; returns the bytes to send.

        Raises:
            ProtocolViolation: The peer asks for no secret, or does not know it.
        """
        self._received += data
        if not self.proof_sent:
            if not MAGIC.startswith(self._received[: len(MAGIC)]):
                raise ProtocolViolation(
                    "It asks for no secret, and this gateway has one. Give the engine the same engine_link.secret."
                )
            if len(self._received) < len(MAGIC) + NONCE_BYTES:
                return b""
            _, self._engine_nonce, self._received = _split(self._received, len(MAGIC), NONCE_BYTES)
            self.proof_sent = True
            return self._nonce + _proof(self._secret, b"gateway", self._engine_nonce, self._nonce, self._binding)
        if len(self._received) >= _PROOF_BYTES:
            proof, self.rest = self._received[:_PROOF_BYTES], self._received[_PROOF_BYTES:]
            if not hmac.compare_digest(
                proof, _proof(self._secret, b"engine", self._engine_nonce, self._nonce, self._binding)
            ):
                raise ProtocolViolation("What answers does not know the secret (engine_link.secret). It is no engine.")
        return b""


def _proof(secret: Secret, role: bytes, engine_nonce: bytes, gateway_nonce: bytes, binding: bytes) -> bytes:
    message = b"\0".join((b"maitred engine link", role, engine_nonce + gateway_nonce + binding))
    return hmac.digest(secret.reveal().encode(), message, "sha256")


def _split(data: bytes, first: int, second: int) -> tuple[bytes, bytes, bytes]:
    return data[:first], data[first : first + second], data[first + second :]

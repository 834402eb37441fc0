"""Mutual proof of a shared secret before the first frame; the code performs no I/O.

::

    engine  -> gateway   magic, 32 random bytes                                              opening
    gateway -> engine    32 random bytes, HMAC("gateway", both, binding)                     answer
    engine  -> gateway   HMAC("engine", both, binding)                                       proof; frames follow

The secret is the key of both HMAC-SHA256 and is never sent. Each proof covers the nonce that the other end has just
drawn, so a recorded proof is useless later; it also contains the role of its sender, so an attacker cannot send it
back. The *binding* is the digest of the engine's certificate if the connection uses TLS (the idea of RFC 5929's
``tls-server-end-point``): a man in the middle with a certificate that the gateway trusts by mistake cannot forward the
proofs. Without TLS the proofs protect only the opening of the connection, and an attacker on the network path can read
and change the later data.

The gateway sends its proof first: the engine reveals nothing to an unauthenticated peer, and reads only these few bytes
and no frame from it.
"""

import hashlib
import hmac
import secrets

from maitred.core.errors import ProtocolViolation
from maitred.core.secret import Secret

MAGIC = b"maitred\x01"
"""First bytes of the engine, which cannot begin a frame.

As a frame length they would be far above the limit.
"""
NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size


class EngineHandshake:
    """Engine side of the handshake.

    Args:
        secret: The secret that the gateway must prove to know.
        binding: The digest of the engine's certificate; empty without TLS.
        nonce: Random bytes; the object draws them if the argument is missing.

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
        """Reads bytes from the gateway.

        Returns:
            None while there are too few bytes; after that, the proof to send and the bytes that follow the gateway's
            proof.

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
    """Gateway side of the handshake.

    Args:
        secret: The secret that the engine must prove to know.
        binding: The digest of the engine's certificate; empty without TLS.
        nonce: Random bytes; the object draws them if the argument is missing.

    Attributes:
        proof_sent: Whether the gateway's proof has been returned for sending.
        rest: Bytes after the engine's proof, or None until the proof has come.
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
        """Reads bytes from the engine and returns the bytes to send.

        Raises:
            ProtocolViolation: The peer does not ask for a secret, or does not know it.
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

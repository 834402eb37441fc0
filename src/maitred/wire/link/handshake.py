"""Mutual proof of a shared secret, before a frame is read. Bytes in, bytes out.

::

    engine  -> gateway   magic, 32 random bytes                                              opening
    gateway -> engine    32 random bytes, HMAC("gateway", both, binding)                     answer
    engine  -> gateway   HMAC("engine", both, binding)                                       proof; frames follow

The secret is the key of both HMAC-SHA256 and never travels. Each proof covers what the other end has just drawn, so
nothing that was recorded serves twice; it names who proves, so nothing can be sent back to where it came from. The
*binding* is the digest of the engine's certificate where the connection is TLS (the idea of RFC 5929's
``tls-server-end-point``): somebody in between, with a certificate of his own that the gateway has been made to trust,
cannot pass the proofs on. Without TLS the proofs cover the opening of the connection only, and whoever sits on the wire
can read and change what follows.

The gateway proves first: an engine tells strangers nothing, and reads of them this many bytes and no frame.
"""

import hashlib
import hmac
import secrets

from maitred.core.errors import ProtocolViolation
from maitred.core.secret import Secret

MAGIC = b"maitred\x01"
"""No frame begins so: its length would be far over the limit."""
NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size


class EngineHandshake:
    """The engine's end.

    Args:
        secret: What the gateway must know.
        binding: See the module.
        nonce: Random bytes; drawn unless given.

    Attributes:
        opening: To be sent first.
    """

    def __init__(self, secret: Secret, binding: bytes = b"", nonce: bytes | None = None) -> None:
        self._secret = secret
        self._binding = binding
        self._nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self._heard = b""
        self.opening = MAGIC + self._nonce

    def feed(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Takes what came.

        Returns:
            None while there is too little; then the proof to send, and what came after the gateway's.

        Raises:
            ProtocolViolation: The gateway does not know the secret.
        """
        self._heard += data
        if len(self._heard) < NONCE_BYTES + _PROOF_BYTES:
            return None
        theirs, proof, rest = _cut(self._heard, NONCE_BYTES, _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(self._secret, b"gateway", self._nonce, theirs, self._binding)):
            raise ProtocolViolation("it does not know the secret of this engine (engine_link.secret)")
        return _proof(self._secret, b"engine", self._nonce, theirs, self._binding), rest


class GatewayHandshake:
    """The gateway's end.

    Args:
        secret: What the engine must know.
        binding: See the module.
        nonce: Random bytes; drawn unless given.

    Attributes:
        answered: Whether the engine has our proof.
        rest: What came after the engine's proof; None until that has come.
    """

    def __init__(self, secret: Secret, binding: bytes = b"", nonce: bytes | None = None) -> None:
        self._secret = secret
        self._binding = binding
        self._nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self._theirs = b""
        self._heard = b""
        self.answered = False
        self.rest: bytes | None = None

    def feed(self, data: bytes) -> bytes:
        """Takes what came; returns what is to be sent.

        Raises:
            ProtocolViolation: What answers asks for no secret, or does not know it.
        """
        self._heard += data
        if not self.answered:
            if not MAGIC.startswith(self._heard[: len(MAGIC)]):
                raise ProtocolViolation(
                    "It asks for no secret, and this gateway has one. Give the engine the same engine_link.secret."
                )
            if len(self._heard) < len(MAGIC) + NONCE_BYTES:
                return b""
            _, self._theirs, self._heard = _cut(self._heard, len(MAGIC), NONCE_BYTES)
            self.answered = True
            return self._nonce + _proof(self._secret, b"gateway", self._theirs, self._nonce, self._binding)
        if len(self._heard) >= _PROOF_BYTES:
            proof, self.rest = self._heard[:_PROOF_BYTES], self._heard[_PROOF_BYTES:]
            if not hmac.compare_digest(
                proof, _proof(self._secret, b"engine", self._theirs, self._nonce, self._binding)
            ):
                raise ProtocolViolation("What answers does not know the secret (engine_link.secret). It is no engine.")
        return b""


def _proof(secret: Secret, who: bytes, engines: bytes, gateways: bytes, binding: bytes) -> bytes:
    said = b"\0".join((b"maitred engine link", who, engines + gateways + binding))
    return hmac.digest(secret.reveal().encode(), said, "sha256")


def _cut(data: bytes, first: int, second: int) -> tuple[bytes, bytes, bytes]:
    return data[:first], data[first : first + second], data[first + second :]

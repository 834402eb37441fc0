"""Format of API keys, and the check of a secret.

A key is ``sk-mtd-<public id>-<secret>``. The public id finds the key, and may be shown and logged. The secret proves
that it is held: 256 random bits, of which only the SHA-256 is kept. A slow hash protects secrets that people make up;
one of this size cannot be guessed, so it would protect nothing and let anybody load the server by sending keys.
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from maitred.core.tenancy import KeySecret

PREFIX = "sk-mtd-"
_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_ID_LENGTH = 16
_SECRET_BYTES = 32
_KEY = re.compile(rf"{PREFIX}([a-z0-9]{{{_ID_LENGTH}}})-([A-Za-z0-9_-]{{43}})")
_KEY_LENGTH = len(PREFIX) + _ID_LENGTH + 1 + 43
_SHA256 = hashlib.sha256()
"""Copied for each secret: to look the algorithm up in OpenSSL anew takes longer than to hash so little."""
_NOBODYS = KeySecret(sha256=secrets.token_bytes(32))
"""Compared where a key has no secret, or there is no such key. Nobody knows what it is the hash of."""


class NewKey(NamedTuple):
    """A key at the one moment when it can be shown."""

    public_id: str
    plaintext: str
    secret: KeySecret

    def __repr__(self) -> str:
        return f"NewKey({self.public_id})"


def make_key(public_id: str | None = None, *, expires_s: float | None = None) -> NewKey:
    """Makes a new key with its secret.

    Args:
        public_id: Of the key that gets another secret; None makes a new id.
        expires_s: When the secret ends, in wall time.
    """
    public_id = public_id or "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
    secret = base64.urlsafe_b64encode(secrets.token_bytes(_SECRET_BYTES)).rstrip(b"=").decode("ascii")
    return NewKey(public_id, f"{PREFIX}{public_id}-{secret}", KeySecret(hash_secret(secret), expires_s))


def parse(text: str) -> tuple[str, str] | None:
    """Public id and secret of a key; None for any other text, which costs next to nothing whatever its length."""
    if len(text) != _KEY_LENGTH:
        return None
    match = _KEY.fullmatch(text)
    return (match[1], match[2]) if match is not None else None


def hash_secret(secret: str) -> bytes:
    """The SHA-256 of the secret part, which is what a store keeps."""
    digest = _SHA256.copy()
    digest.update(secret.encode("ascii"))
    return digest.digest()


def matches(secret: str, kept: Sequence[KeySecret], now_s: float) -> bool:
    """Whether `secret` is one of those kept, and that one has not expired.

    Takes the same time whatever is kept and however much of it fits: a key that is being rotated, one that has
    expired and one that does not exist (which has no secrets) cannot be told apart by a clock.
    """
    digest = hash_secret(secret)
    matched = False
    for candidate in (*kept, _NOBODYS, _NOBODYS)[: max(2, len(kept))]:
        live = candidate.expires_s is None or now_s < candidate.expires_s
        matched |= hmac.compare_digest(digest, candidate.sha256) and live
    return matched

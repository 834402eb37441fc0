"""Format of API keys, and the check of a secret.

A key is ``sk-mtd-<public id>-<secret>``. The public id finds the key, and may be shown and logged. The secret proves
the possession of the key: it has 256 random bits, and only its SHA-256 is stored. A slow hash protects secrets that
people choose. A secret of this size cannot be guessed, so a slow hash would add no protection, and callers could
overload the server with keys.

A foreign key is one of another gateway, such as LiteLLM. It can be any text, so its public id is the beginning of its
SHA-256, and all of its text is the secret. Where keys are kept as their SHA-256, as LiteLLM does, the digest alone is
enough to go on accepting them.
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
_LONGEST_FOREIGN_KEY = 512
_KEY_LENGTH = len(PREFIX) + _ID_LENGTH + 1 + 43
_SHA256 = hashlib.sha256()
"""Hash object that is copied for each secret, because the OpenSSL lookup is slower than the hash."""
_NOBODYS = KeySecret(sha256=secrets.token_bytes(32))
"""Placeholder secret for keys without a secret and for unknown keys. Its preimage is unknown."""


class NewKey(NamedTuple):
    """A new key, whose secret can be shown only now."""

    public_id: str
    plaintext: str
    secret: KeySecret

    def __repr__(self) -> str:
        return f"NewKey({self.public_id})"


def make_key(public_id: str | None = None, *, expires_s: float | None = None) -> NewKey:
    """Makes a new key with its secret.

    Args:
        public_id: Public id of the key that gets another secret; None makes a new id.
        expires_s: Wall time at which the secret expires.
    """
    public_id = public_id or "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
    secret = base64.urlsafe_b64encode(secrets.token_bytes(_SECRET_BYTES)).rstrip(b"=").decode("ascii")
    return NewKey(public_id, f"{PREFIX}{public_id}-{secret}", KeySecret(hash_secret(secret), expires_s))


def parse(text: str) -> tuple[str, str] | None:
    """Returns the public id and the secret of a key; None for any other text, at little cost."""
    if len(text) != _KEY_LENGTH:
        return None
    match = _KEY.fullmatch(text)
    return (match[1], match[2]) if match is not None else None


def parse_foreign(text: str) -> tuple[str, str] | None:
    """Returns the public id and the secret of a key of another gateway; None if the text can be none."""
    if len(text) > _LONGEST_FOREIGN_KEY or text.startswith(PREFIX):
        return None
    return foreign_id(hash_secret(text)), text


def foreign_id(sha256: bytes) -> str:
    """Returns the public id of a key of another gateway, from the SHA-256 of its whole text."""
    return sha256.hex()[:_ID_LENGTH]


def hash_secret(secret: str) -> bytes:
    """Returns the SHA-256 of the secret part, which the store keeps."""
    digest = _SHA256.copy()
    digest.update(secret.encode("utf-8", "surrogateescape"))
    return digest.digest()


def matches(secret: str, kept: Sequence[KeySecret], now_s: float) -> bool:
    """Whether `secret` matches a stored secret that has not expired.

    The check takes constant time for all stored secrets and all matches: a rotated key, an expired key and an unknown
    key (which has no secrets) cannot be distinguished by time.
    """
    digest = hash_secret(secret)
    matched = False
    for candidate in (*kept, _NOBODYS, _NOBODYS)[: max(2, len(kept))]:
        live = candidate.expires_s is None or now_s < candidate.expires_s
        matched |= hmac.compare_digest(digest, candidate.sha256) and live
    return matched

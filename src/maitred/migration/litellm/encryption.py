"""Decryption of credentials that LiteLLM keeps in its database, with the operator's salt key.

Facts: `litellm/proxy/common_utils/encrypt_decrypt_utils.py` of LiteLLM. Each text is encrypted by itself, in one of
three forms:

- ``v3:gcm:`` and Base64 of nonce, ciphertext and tag: AES-256-GCM with a key by HKDF-SHA256 (RFC 5869, no salt, the
  info ``litellm-at-rest-v3``).
- ``v2:gcm:`` likewise, with the SHA-256 of the salt key as the key.
- Base64 alone: NaCl's secret box, which is XSalsa20 and Poly1305, with the same key. No package here has that
  cipher, and the texts are short, so it is computed in Python: Bernstein, "Salsa20 specification" and "Extending the
  Salsa20 nonce"; RFC 8439, section 2.5, for Poly1305. It only opens what somebody else has sealed.
"""

import base64
import hashlib
import hmac
import struct

from maitred.core.errors import ConfigInvalid

_HKDF_INFO = b"litellm-at-rest-v3"
_GCM = {"v3:gcm:": True, "v2:gcm:": False}
_NONCE_BYTES, _TAG_BYTES = 12, 16
_BOX_NONCE_BYTES = 24
_MASK = 0xFFFFFFFF
_SIGMA = struct.unpack("<4I", b"expand 32-byte k")
_COLUMNS = [[(5 * i + 4 * j) % 16 for j in range(4)] for i in range(4)]
_ROWS = [[4 * i + (i + j) % 4 for j in range(4)] for i in range(4)]
"""Places of four words that a quarter of a round mixes; each begins on the diagonal."""
_POLY_PRIME = (1 << 130) - 5
_POLY_CLAMP = 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF


class WrongSaltKey(ValueError):
    """A text is not encrypted with this salt key, or not at all."""


def decrypt(text: str, salt_key: str) -> str:
    """Returns what was encrypted.

    Args:
        text: One value of the database.
        salt_key: LiteLLM's `LITELLM_SALT_KEY`, or its master key where there was none.

    Raises:
        WrongSaltKey: It is not encrypted with this key.
        ConfigInvalid: The package for it is not installed.
    """
    key = hashlib.sha256(salt_key.encode()).digest()
    try:
        for prefix, is_derived in _GCM.items():
            if text.startswith(prefix):
                sealed = base64.urlsafe_b64decode(text.removeprefix(prefix))
                return _open_gcm(sealed, _derived_key(salt_key) if is_derived else key).decode()
        return _open_box(base64.urlsafe_b64decode(text), key).decode()
    except WrongSaltKey:
        raise
    except ValueError as error:
        raise WrongSaltKey("This is not encrypted.") from error


def _derived_key(salt_key: str) -> bytes:
    """Returns the key by HKDF: its first block is as long as the key."""
    pseudo_random = hmac.digest(bytes(32), salt_key.encode(), "sha256")
    return hmac.digest(pseudo_random, _HKDF_INFO + b"\x01", "sha256")


def _open_gcm(sealed: bytes, key: bytes) -> bytes:
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError:
        raise ConfigInvalid(
            "LiteLLM's credentials are encrypted by a cipher whose package is not installed: pip install cryptography"
        ) from None
    if len(sealed) < _NONCE_BYTES + _TAG_BYTES:
        raise WrongSaltKey("This is too short to be encrypted.")
    try:
        return AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
    except InvalidTag:
        raise WrongSaltKey("This was encrypted with another key.") from None


def _open_box(sealed: bytes, key: bytes) -> bytes:
    """Opens a secret box: a nonce, a tag and the ciphertext."""
    if len(sealed) < _BOX_NONCE_BYTES + _TAG_BYTES:
        raise WrongSaltKey("This is too short to be encrypted.")
    nonce, tag, ciphertext = sealed[:24], sealed[24:40], sealed[40:]
    stream = _xsalsa20(key, nonce, 32 + len(ciphertext))
    if not hmac.compare_digest(_poly1305(ciphertext, stream[:32]), tag):
        raise WrongSaltKey("This was encrypted with another key.")
    return bytes(a ^ b for a, b in zip(ciphertext, stream[32:], strict=True))


def _xsalsa20(key: bytes, nonce: bytes, length: int) -> bytes:
    """Returns so many bytes of the key stream."""
    words = _state(key, nonce[:16])
    mixed = _double_rounds(words)
    subkey = struct.pack("<8I", *(mixed[i] for i in (0, 5, 10, 15, 6, 7, 8, 9)))
    stream = b""
    for block in range(-(-length // 64)):
        words = _state(subkey, nonce[16:] + struct.pack("<Q", block))
        mixed = _double_rounds(words)
        stream += struct.pack("<16I", *((a + b) & _MASK for a, b in zip(words, mixed, strict=True)))
    return stream[:length]


def _state(key: bytes, place: bytes) -> list[int]:
    """Returns the sixteen words that a block begins with: constants, key, and nonce with counter."""
    k, n = struct.unpack("<8I", key), struct.unpack("<4I", place)
    return [_SIGMA[0], *k[:4], _SIGMA[1], *n, _SIGMA[2], *k[4:], _SIGMA[3]]


def _double_rounds(words: list[int]) -> list[int]:
    """Returns the words after ten rounds on columns and ten on rows, in turn."""
    x = [*words]
    for _ in range(10):
        for a, b, c, d in (*_COLUMNS, *_ROWS):
            x[b] ^= _rotate(x[a] + x[d], 7)
            x[c] ^= _rotate(x[b] + x[a], 9)
            x[d] ^= _rotate(x[c] + x[b], 13)
            x[a] ^= _rotate(x[d] + x[c], 18)
    return x


def _rotate(value: int, bits: int) -> int:
    value &= _MASK
    return ((value << bits) & _MASK) | (value >> (32 - bits))


def _poly1305(message: bytes, key: bytes) -> bytes:
    """Returns the tag of a message by a key that is used once."""
    r = int.from_bytes(key[:16], "little") & _POLY_CLAMP
    total = 0
    for start in range(0, len(message), 16):
        piece = message[start : start + 16]
        total = (total + int.from_bytes(piece + b"\x01", "little")) * r % _POLY_PRIME
    return ((total + int.from_bytes(key[16:], "little")) & ((1 << 128) - 1)).to_bytes(16, "little")

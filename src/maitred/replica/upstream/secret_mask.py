"""Mask of the gateway's credentials in what a server sends.

A server may repeat the credential that it was sent: in an error, or in an answer of a model that sees its own request.
Whatever it says is masked before it is parsed, so the credential is in no answer and in no log line.
"""

from collections.abc import Iterable

_MIN_SECRET_CHARACTERS = 8
"""Shorter values, such as ``EMPTY``, are no secrets but words."""


class SecretMask:
    """Mask of some secrets. The masked data has the same length, so that JSON and lengths stay valid.

    Args:
        secrets: The secrets; those that are too short to be any are ignored.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        values = {secret.encode() for secret in secrets if len(secret) >= _MIN_SECRET_CHARACTERS}
        values |= {value.replace(b"/", b"\\/") for value in values}  # the same in JSON
        self._masks = [(value, b"*" * len(value)) for value in values]

    def apply(self, data: bytes) -> bytes:
        """Returns the data with all secrets masked."""
        for value, mask in self._masks:
            if value in data:
                data = data.replace(value, mask)
        return data

    def split(self, data: bytes, *, body_over: bool) -> tuple[bytes, bytes]:
        """Masks the data of a stream.

        Args:
            data: The data that has come.
            body_over: Whether no more data comes.

        Returns:
            The masked data, and the bytes at its end that may begin a secret: they belong before the next data.
        """
        data = self.apply(data)
        if body_over or not data:
            return data, b""
        held = 0
        for value, _ in self._masks:
            if data[-1] not in value:
                continue  # the common case: data ends with a line break
            longest = min(len(value) - 1, len(data))
            held = max(held, next((size for size in range(longest, 0, -1) if data.endswith(value[:size])), 0))
        return data[: len(data) - held], data[len(data) - held :]

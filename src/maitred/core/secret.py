"""A value that must not be printed, together with where it came from.

Configuration holds secrets by reference only (an environment variable or a file), so the reference may be shown
anywhere and the value nowhere: not by `repr`, not in a log line, not by an encoder that walks structs.
"""

import hmac
from typing import NoReturn


class Secret:
    """A secret and its reference.

    Args:
        value: The secret itself.
        reference: Where it was read, as it is written in the configuration: ``{env: NAME}`` or ``{file: path}``.
    """

    __slots__ = ("_value", "reference")

    def __init__(self, value: str, reference: str) -> None:
        self._value = value
        self.reference = reference

    def reveal(self) -> str:
        """The secret itself. Call it where the secret is used, and keep the result nowhere."""
        return self._value

    def __repr__(self) -> str:
        return f"Secret({self.reference})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash(self.reference)

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Secret is not pickled: pass its reference, and read it where it is used.")

"""Secret value that must never be printed, with its reference.

The configuration holds only references to secrets (an environment variable or a file). The reference may be shown
anywhere; the value must never appear in `repr`, in a log line or in the output of a struct encoder.
"""

import hmac
import os
from pathlib import Path
from typing import NoReturn


class Secret:
    """A secret and its reference.

    Args:
        value: The secret itself.
        reference: Source of the secret, as written in the configuration: ``{env: NAME}`` or ``{file: path}``.
    """

    __slots__ = ("_value", "reference")

    def __init__(self, value: str, reference: str) -> None:
        self._value = value
        self.reference = reference

    @classmethod
    def read(cls, reference: object) -> "Secret":
        """Reads a secret by its reference, such as ``{"env": "NAME"}`` or ``{"file": "path"}``.

        Raises:
            ValueError: That is no reference, or there is nothing where it points.
        """
        try:
            match reference:
                case {"env": str(name)}:
                    return cls(os.environ[name], f"{{env: {name}}}")
                case {"file": str(path)}:
                    return cls(Path(path).read_text(encoding="utf-8").rstrip("\r\n"), f"{{file: {path}}}")
        except (LookupError, OSError) as error:
            raise ValueError(f"the secret {reference} cannot be read: {error}") from error
        raise ValueError("a secret is given by reference: `{env: NAME}` or `{file: path}`")

    def reveal(self) -> str:
        """Returns the secret itself. Call it where the secret is used, and never store the result."""
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

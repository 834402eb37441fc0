"""Secrets of a source as references: none is ever written into the new configuration or into the report."""

import re
from collections.abc import Mapping

from maitred.migration.report import VariableToSet

ENVIRONMENT_PREFIX = "os.environ/"
"""How LiteLLM's file names an environment variable in place of a value."""
_WORDS = ("key", "secret", "token", "password", "credential", "authorization", "bearer", "cookie")
_NO_LETTER = re.compile(r"[^A-Z0-9]+")


class CredentialNames:
    """Names of environment variables for the secrets of a source.

    Args:
        env: The environment, with what the source itself puts into it.

    Attributes:
        values: Literal secrets of the source by the variable that they are to be given by. They stay in memory.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.values: dict[str, str] = {}
        self._uses: dict[str, str] = {}

    def reference(self, value: str, wanted_name: str, use: str) -> dict[str, str]:
        """Returns the reference to a secret, ``{env: NAME}``.

        Args:
            value: What the source says: the secret itself, or ``os.environ/NAME``.
            wanted_name: Text from which the variable of a literal secret gets its name.
            use: What it is for.
        """
        if value.startswith(ENVIRONMENT_PREFIX):
            return self.variable(value.removeprefix(ENVIRONMENT_PREFIX), use)
        for name, known in self.values.items():
            if known == value:
                return self.variable(name, use)
        base = _NO_LETTER.sub("_", wanted_name.upper()).strip("_") or "API_KEY"
        base = base if not base[0].isdigit() else f"KEY_{base}"
        name, number = base, 1
        while name in self.values or name in self._uses:
            number += 1
            name = f"{base}_{number}"
        self.values[name] = value
        return self.variable(name, use)

    def variable(self, name: str, use: str) -> dict[str, str]:
        """Returns the reference to a variable that the source names, or that LiteLLM reads unasked."""
        self._uses.setdefault(name, use)
        return {"env": name}

    def resolve(self, value: object) -> object:
        """Returns a value that is no secret, from the environment if the source says so; None: it is not set there."""
        if isinstance(value, str) and value.startswith(ENVIRONMENT_PREFIX):
            return self.env.get(value.removeprefix(ENVIRONMENT_PREFIX))
        return value

    def variables(self) -> list[VariableToSet]:
        """Returns all variables that the new configuration reads."""
        return [VariableToSet(name, use) for name, use in self._uses.items()]


def is_secret_name(name: str) -> bool:
    """Whether the value of a setting of this name is likely to be a secret."""
    words = re.split(r"[^a-z]+", name.lower())
    return any(word.rstrip("s") in _WORDS for word in words) and "max" not in words

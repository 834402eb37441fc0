"""Optional packages of some commands: a missing one becomes a sentence that says what to install."""

from collections.abc import Iterator
from contextlib import contextmanager

from maitred.core.errors import Unavailable

PACKAGES = {
    "engine": frozenset({"torch", "numpy", "numba", "safetensors", "psutil"}),
    "load": frozenset({"numpy", "matplotlib"}),
}
"""The extras of maitred, and what each of them installs."""


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Import what the extra installs within it.

    Args:
        extra: Name of the extra.
        what: What needs it, to begin a sentence with.

    Raises:
        Unavailable: One of its packages is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in PACKAGES[extra]:
            raise
        raise Unavailable(
            f"{what} needs {error.name}, which is not installed. Run: pip install 'maitred[{extra}]'"
        ) from error

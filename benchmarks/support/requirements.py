"""What a benchmark needs beside this repository: without it, it says in one sentence what is missing, and does not run.

``python -m benchmarks`` then exits with `NOT_RUN`, as with a server that is not installed (`ProgramMissing`).
"""

from importlib.util import find_spec
from pathlib import Path

NOT_RUN = 77
"""Exit code of a benchmark that something here was missing for; neither a missed bar nor a failure."""


class RequirementMissing(RuntimeError):
    """Error: something that a benchmark needs is not on this machine; the message says how to get it."""


def require_packages(*packages: str) -> None:
    """Looks for Python packages that the project does not depend on.

    Raises:
        RequirementMissing: One cannot be imported.
    """
    if missing := [package for package in packages if find_spec(package) is None]:
        raise RequirementMissing(f"It needs packages that are not installed: pip install {' '.join(missing)}")


def require_file(path: Path, origin: str) -> None:
    """Looks for a file of data.

    Args:
        path: The file.
        origin: How to get it.

    Raises:
        RequirementMissing: It is not there.
    """
    if not path.is_file():
        raise RequirementMissing(f"{path} is not there: {origin}")

"""Child processes of a program, as they are at one moment."""

import contextlib

import psutil


def living_children(pid: int | None = None, *, recursive: bool = False) -> dict[psutil.Process, tuple[str, str]]:
    """Returns the name and the command line of each child that has not ended, even while others end.

    Args:
        pid: The parent; None: this process.
        recursive: Whether children of children count.
    """
    found: dict[psutil.Process, tuple[str, str]] = {}
    for child in psutil.Process(pid).children(recursive=recursive):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one that has ended, too
            if child.status() != psutil.STATUS_ZOMBIE:
                found[child] = child.name(), " ".join(child.cmdline())
    return found

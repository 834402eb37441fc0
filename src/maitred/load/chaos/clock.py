"""Wall clock that can jump, for a process that is started with it.

libfaketime answers the process's reads of the time of day. It reads the offset from a file at each call. The monotonic
clock does not jump, just as when an administrator or NTP sets the time of day.
"""

from pathlib import Path

from maitred.core.errors import Unavailable

_LIBRARY = "libfaketime.so.1"
_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib")


class FakeClock:
    """Fake wall clock of one installation.

    Args:
        file: File that holds the offset; it is created here.
        library: Path of libfaketime.
    """

    def __init__(self, file: Path, library: Path) -> None:
        self._file = file
        self._library = library
        self.set(0.0)

    def set(self, offset_s: float) -> None:
        """Sets the offset of the time of day from now on."""
        self._file.write_text(f"{offset_s:+.6f}\n")

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that apply this clock to a process and all its children."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",  # the variable's name before version 0.9.9
        }


def find_library() -> Path:
    """Returns the path of libfaketime.

    Raises:
        Unavailable: libfaketime is not installed.
    """
    for folder in _FOLDERS:
        for pattern in (f"faketime/{_LIBRARY}", f"*/faketime/{_LIBRARY}", _LIBRARY, f"*/{_LIBRARY}"):
            if found := sorted(Path(folder).glob(pattern)):
                return found[0]
    raise Unavailable(
        "A clock_jump needs libfaketime, which is not installed. Install it (Debian and Ubuntu: "
        "`apt install faketime`), or remove that fault from the plan."
    )

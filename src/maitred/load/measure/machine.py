"""The machine that a run was made on, as a result file names it."""

import os
import platform
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the tester ran. The target's machine may be another."""

    cpu: str
    cores: int
    memory_gib: float
    python: str
    system: str

    @classmethod
    def here(cls) -> "Machine":
        """Returns this machine; what it does not tell is empty or 0."""
        return cls(
            cpu=_field("/proc/cpuinfo", "model name") or platform.processor(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
            memory_gib=round(int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
            python=platform.python_version(),
            system=platform.platform(),
        )


def _field(path: str, name: str) -> str:
    """The first value of this name in one of the kernel's tables; empty where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")

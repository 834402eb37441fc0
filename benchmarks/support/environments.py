"""Environments for the software of others, each with a Python and packages of its own.

They lie below the cache of this user (``$XDG_CACHE_HOME/maitred/externals``), never in the project's environment.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maitred" / "externals"
CPU_TORCH = "torch==2.13.0+cpu"
"""A build without CUDA. Where pip's indexes have none, name one that has: ``PIP_EXTRA_INDEX_URL``."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One environment.

    Attributes:
        name: Of its folder.
        packages: What pip installs; the first one is what it is for.
        without: Of what that depends on, what is left out: it is for pictures and sound, and needs CUDA.
        removed: Likewise, of what the others depend on.
    """

    name: str
    packages: Sequence[str]
    without: Sequence[str] = ()
    removed: Sequence[str] = ()

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.place / "bin" / "python"

    @property
    def place(self) -> Path:
        """Its environment."""
        return HOME / self.name

    @property
    def installed(self) -> bool:
        """Whether pip has finished."""
        return (self.place / "installed").exists()

    @property
    def package(self) -> str:
        """What it is for."""
        return self.packages[0].partition("=")[0].partition("[")[0]

    @property
    def version(self) -> str:
        """Of its package, as it is installed."""
        return (self.place / "installed").read_text().strip()

    def install(self) -> None:
        """Makes its environment anew.

        Raises:
            subprocess.CalledProcessError: pip failed, and printed why.
        """
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.place)], check=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if self.without:
            subprocess.run([*pip, "--no-deps", self.packages[0]], check=True)
            listing = [str(self.python), "-c", _REQUIREMENTS, self.package, *self.without]
            needed = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\n")
            subprocess.run([*pip, *filter(None, needed), *self.packages[1:]], check=True)
        else:
            subprocess.run([*pip, *self.packages], check=True)
        if self.removed:
            subprocess.run([str(self.python), "-m", "pip", "uninstall", "--quiet", "--yes", *self.removed], check=True)
        asking = [str(self.python), "-c", _VERSION, self.package]
        output = subprocess.run(asking, check=True, capture_output=True, text=True)
        (self.place / "installed").write_text(output.stdout)


_VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires(sys.argv[1]):
    needed = Requirement(line)
    if needed.name not in sys.argv[2:] and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
        needed.marker = None
        print(needed)
"""
"""What a package depends on here, without some of it; runs in its environment."""

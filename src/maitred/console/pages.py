"""The files of the console, read once: they come with the package, and nothing is fetched from anywhere else."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""What is served; other files, such as licences, only lie beside them."""


@dataclass(frozen=True, slots=True)
class ConsolePage:
    """File of the console."""

    body: bytes
    content_type: str
    tag: str
    """Another one when the file changes."""


def pages(folder: Path = _FOLDER) -> dict[str, ConsolePage]:
    """Every file by its name below ``/console/``."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in _TYPES:
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
            found[path.relative_to(folder).as_posix()] = ConsolePage(body, _TYPES[path.suffix], tag)
    return found

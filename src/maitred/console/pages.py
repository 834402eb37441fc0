"""Files of the console, which come with the package and are read once; nothing else is fetched."""

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
"""Content types of served files; other files in the folder, such as licences, are not served."""


@dataclass(frozen=True, slots=True)
class ConsolePage:
    """File of the console."""

    body: bytes
    content_type: str
    tag: str
    """Entity tag, which changes with the file."""


def pages(folder: Path = _FOLDER) -> dict[str, ConsolePage]:
    """Returns every file by its name below ``/console/``."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in _TYPES:
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
            found[path.relative_to(folder).as_posix()] = ConsolePage(body, _TYPES[path.suffix], tag)
    return found

"""Locations of the data folder and the database, as a path and a SQLAlchemy URL, and small files of that folder."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from maitred.core.errors import ConfigInvalid
from maitred.store.config import StoreConfig

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

_POSTGRES_DRIVERS = {"postgresql", "postgres", "postgresql+asyncpg"}
_SQLITE_DRIVERS = {"sqlite", "sqlite+aiosqlite"}
_DATABASE_FILE = "maitred.db"


def data_folder(config: StoreConfig) -> Path:
    """Returns the folder of this gateway's own files.

    A caller that writes there first creates it with `make_folder`.
    """
    if config.folder:
        return Path(config.folder).expanduser()
    data_home = os.environ.get("XDG_DATA_HOME", "")
    # The XDG specification says that a relative path must be ignored.
    return (Path(data_home) if Path(data_home).is_absolute() else Path.home() / ".local" / "share") / "maitred"


def make_folder(folder: Path) -> None:
    """Makes a folder that only its owner can read: usage data is private.

    Raises:
        ConfigInvalid: The folder cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigInvalid(
            f"store.folder: {folder} cannot be made ({error.strerror}). Name a folder that this user may write to."
        ) from None


def read_object(file: Path) -> dict[str, object]:
    """Returns the JSON object of a file; empty if there is none that can be read."""
    with suppress(OSError, ValueError):
        known = json.loads(file.read_bytes())
        if isinstance(known, dict):
            return known
    return {}


def write_object(file: Path, known: Mapping[str, object]) -> None:
    """Writes a JSON object into a file; see `write_file`.

    Raises:
        OSError: The file cannot be written.
    """
    write_file(file, json.dumps(known, indent=1, sort_keys=True).encode())


def write_file(file: Path, content: bytes) -> None:
    """Writes a file that only its owner can read. Whoever reads it finds the old or the new one.

    Raises:
        OSError: The file cannot be written.
    """
    temporary_file = file.with_name(f"{file.name}.{os.getpid()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary_file.touch(mode=0o600)
    temporary_file.write_bytes(content)
    temporary_file.replace(file)


def database_url(config: StoreConfig) -> "URL":
    """Returns the URL of the database, with the driver that is used.

    SQLAlchemy is imported in this function, so that a caller that needs only the folder, such as a gateway before it
    starts its engine, does not wait for the import.

    Raises:
        ConfigInvalid: The URL is invalid, or its database is not supported. The message never shows the URL, because it
            may contain a password.
    """
    from sqlalchemy.engine import URL, make_url
    from sqlalchemy.exc import ArgumentError

    if config.url is None:
        return URL.create("sqlite+aiosqlite", database=str(data_folder(config) / _DATABASE_FILE))
    try:
        url = make_url(config.url.reveal().strip())
    except (ArgumentError, ValueError):
        raise ConfigInvalid(
            "store.url is not the address of a database. Write it as `postgresql://user:password@host:5432/name`, and "
            "escape special characters of the password, such as %40 for @."
        ) from None
    if url.drivername in _POSTGRES_DRIVERS:
        return _with_asyncpg(url)
    if url.drivername in _SQLITE_DRIVERS:
        if url.database in (None, "", ":memory:"):
            raise ConfigInvalid("store.url: SQLite needs a file, such as `sqlite:////var/lib/maitred/maitred.db`.")
        return url.set(drivername="sqlite+aiosqlite")
    raise ConfigInvalid(
        f"store.url: {url.drivername} is not supported. Use `postgresql://…`, or omit it for SQLite in `store.folder`."
    )


def _with_asyncpg(url: "URL") -> "URL":
    if find_spec("asyncpg") is None:
        raise ConfigInvalid("store.url: PostgreSQL needs a driver. Install it with `pip install 'maitred[postgres]'`.")
    query = dict(url.query)
    # `sslmode` is the name that other PostgreSQL clients use, so it occurs in the URLs of hosting services.
    if "sslmode" in query:
        query["ssl"] = query.pop("sslmode")
    return url.set(drivername="postgresql+asyncpg", query=query)

"""Sources of LiteLLM's accounts: its PostgreSQL database, or a file with an export of the same rows."""

import asyncio
import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from maitred.core.errors import ConfigInvalid
from maitred.migration.litellm.accounts import TABLES, sections_of
from maitred.migration.litellm.stored_models import TABLES as ENCRYPTED_TABLES

CONNECT_S = 10.0


def read_accounts(source: str) -> dict[str, Any]:
    """Returns the rows of the accounts and of stored models by section; see `accounts.TABLES`.

    Args:
        source: URL of LiteLLM's database, or path of a JSON file.

    Raises:
        ConfigInvalid: They cannot be read. The message never shows a URL, because it may have a password.
    """
    if source.startswith(("postgres://", "postgresql://")):
        return _read_database(source)
    try:
        document = json.loads(Path(source).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigInvalid(f"{source}: No such file. Name an export, or the URL of LiteLLM's database.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{source}: Cannot be read as JSON: {error}.") from None
    if not isinstance(document, dict) or not any(sections_of(document)):
        raise ConfigInvalid(f"{source}: It is no export: it has none of {', '.join(TABLES)}.")
    return document


def _read_database(url: str) -> dict[str, Any]:
    if find_spec("asyncpg") is None:
        raise ConfigInvalid(
            "LiteLLM's database is read by a driver that is not installed: pip install 'maitred[postgres]'"
        )
    asyncpg: Any = import_module("asyncpg")  # it has no types

    async def read() -> dict[str, Any]:
        connection = await asyncpg.connect(url.partition("?")[0], timeout=CONNECT_S)
        try:
            found: dict[str, Any] = {}
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                for section, table in {**TABLES, **ENCRYPTED_TABLES}.items():
                    if await connection.fetchval("SELECT to_regclass($1)", f'"{table}"') is not None:
                        rows = await connection.fetch(f'SELECT row_to_json(t) FROM "{table}" AS t')
                        found[section] = [json.loads(row[0]) for row in rows]
            return found
        finally:
            await connection.close()

    try:
        return asyncio.run(read())
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
        raise ConfigInvalid(f"LiteLLM's database cannot be read: {type(error).__name__}. Check its URL.") from None

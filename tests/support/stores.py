"""Both databases, for tests that must hold on either."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from maitred.core.secret import Secret
from maitred.store.config import StoreConfig
from maitred.store.database import Database

DEADLINE_S = 300.0
"""One access to the database of a test may take so long: on a crowded machine, 5 s are not enough."""


@pytest.fixture(params=["sqlite", "postgresql"])
def store_config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    """A new, empty database: an SQLite file, then one on a real PostgreSQL server."""
    if request.param == "sqlite":
        return StoreConfig(folder=str(tmp_path / "data"), deadline_s=DEADLINE_S)
    url: str = request.getfixturevalue("postgres_url")
    return StoreConfig(folder=str(tmp_path / "data"), url=Secret(url, "{env: TEST_STORE_URL}"), deadline_s=DEADLINE_S)


@contextmanager
def deadline(database: Database, seconds: float) -> Iterator[None]:
    """Statements that begin within the block have so much time; everything else has enough on a crowded machine."""
    usual_s, database._deadline_s = database._deadline_s, seconds
    try:
        yield
    finally:
        database._deadline_s = usual_s

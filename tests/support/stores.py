"""Both databases, for tests that must hold on either."""

from pathlib import Path

import pytest

from maitred.core.secret import Secret
from maitred.store.config import StoreConfig

DEADLINE_S = 300.0
"""One access to the database of a test may take so long: on a crowded machine, 5 s are not enough."""


@pytest.fixture(params=["sqlite", "postgresql"])
def store_config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    """A new, empty database: an SQLite file, then one on a real PostgreSQL server."""
    if request.param == "sqlite":
        return StoreConfig(folder=str(tmp_path / "data"), deadline_s=DEADLINE_S)
    url: str = request.getfixturevalue("postgres_url")
    return StoreConfig(folder=str(tmp_path / "data"), url=Secret(url, "{env: TEST_STORE_URL}"), deadline_s=DEADLINE_S)

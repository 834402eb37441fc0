"""The servers and folders that integration tests share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.postgres_server import postgres_server, postgres_url
from tests.support.stores import store_config

__all__ = ["postgres_server", "postgres_url", "store_config"]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """An empty one whose name leaves room for that of a socket; a system takes some hundred characters of both."""
    with tempfile.TemporaryDirectory(prefix="maitred-test-") as folder:
        yield Path(folder)

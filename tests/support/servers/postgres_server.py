"""A real PostgreSQL of the tests' own; see `maitred.testing.postgres_server`."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from maitred.testing import postgres_server as real
from maitred.testing.postgres_server import PostgresServer
from tests.support.programs import entered


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server for all tests of a session. A test that kills it starts it again."""
    with ExitStack() as stack:
        yield entered(stack, real.postgres_server())


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """A new, empty database."""
    return postgres_server.database()

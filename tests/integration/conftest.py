"""The servers that integration tests share."""

from tests.postgres_server import postgres_server, postgres_url
from tests.stores import store_config

__all__ = ["postgres_server", "postgres_url", "store_config"]

"""A real Redis of a test's own; see `maitred.testing.redis_server`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from maitred.testing import redis_server as real
from maitred.testing.redis_server import RedisServer
from tests.support.programs import entered


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A server that runs."""
    with ExitStack() as stack:
        yield entered(stack, real.redis_server())

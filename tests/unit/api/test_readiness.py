"""What `/health/ready` says of the stores behind a gateway."""

import msgspec
import pytest

from maitred.api.health import HealthStatus, ServiceRoutes
from maitred.api.in_flight import InFlightLimiter
from maitred.core.errors import StoreUnavailable


class Answers:
    """A system whose replica is up."""

    def ready(self):
        return True


class Probe:
    """A call that keeps its answer."""

    status = 0
    body = b""

    async def respond(self, body, *, status=200):
        self.status, self.body = status, body


def too_old():
    raise StoreUnavailable("The directory is too old.")


def fresh():
    pass


@pytest.mark.parametrize(
    ("up", "check", "expected"),
    [
        (True, fresh, (200, HealthStatus("ok"))),
        (False, fresh, (200, HealthStatus("degraded", ["database"]))),
        (False, too_old, (503, HealthStatus("no_store", ["database"]))),
    ],
)
async def test_a_gateway_that_refuses_everybody_for_want_of_a_store_is_not_ready(up, check, expected):
    routes = ServiceRoutes(
        Answers(), InFlightLimiter(1), lambda accept: (b"", ""), stores_up=lambda: {"database": up}, check_stores=check
    )
    probe = Probe()
    await routes.ready(probe)
    assert (probe.status, msgspec.json.decode(probe.body, type=HealthStatus)) == expected

"""What is read of a head is read once where the head is kept, and holds for as long as it holds."""

from maitred.admission.policy.retries import RetryBudget
from maitred.api.app import GatewayApp, RetryAdvisor
from maitred.api.config import ServerConfig
from maitred.api.exchange import KEPT, HttpExchange
from maitred.api.in_flight import InFlightLimiter
from maitred.api.origin_policy import OriginPolicy
from maitred.api.routes import Route, RouteTable
from maitred.core.clock import SystemClock
from maitred.core.tenancy import Principal, Scope

HEADERS = [(b"x-maitred-explain", b"true"), (b"x-stainless-retry-count", b"2"), (b"idempotency-key", b"again")]


class Identity:
    """Counts how often it has to look at a credential."""

    def __init__(self):
        self.principal = Principal(key="ada", tenants=("acme",), scopes=frozenset({Scope.METRICS}))
        self.looks = 0

    async def identify(self, header):
        self.looks += 1
        return self.principal

    def is_still_valid(self, principal, header):
        return principal is self.principal


def scope(kept=None):
    extensions = {} if kept is None else {"extensions": {KEPT: kept}}
    return {"type": "http", "method": "GET", "path": "/one/x", "headers": HEADERS, **extensions}


def edge(identity, seen, name):
    async def handler(call):
        seen.append((name, call.parameter, call.principal))
        await call.respond(b"")

    async def standing(context):
        return None

    return GatewayApp(
        RouteTable([Route("GET", "/one/{name}", handler, "", needs=Scope.METRICS)]),
        *(identity, InFlightLimiter(1), [], standing, RetryAdvisor(RetryBudget(0.0, 0), SystemClock())),
        max_body_bytes=1,
        body_timeout_s=1.0,
        origin_policy=OriginPolicy(ServerConfig()),
        clock=SystemClock(),
    )


async def asked(application, scope):
    async def send(message):
        pass

    await application(scope, None, send)


def parsed_head(scope):
    return HttpExchange(scope, None, None, 0.0).parsed_head


def test_a_head_says_the_same_kept_or_not():
    for kept in (None, {}):
        for _ in range(2):
            greeting = parsed_head(scope(kept))
            assert (greeting.explain, greeting.retries, greeting.repeat_key, greeting.offered_id) == (
                True,
                2,
                "again",
                None,
            )
    assert parsed_head(scope(kept)) is greeting
    assert parsed_head(scope()) is not greeting


async def test_a_credential_is_looked_at_again_when_something_has_changed():
    identity, seen, kept = Identity(), [], {}
    application = edge(identity, seen, "edge")
    for _ in range(3):
        await asked(application, scope(kept))
    assert identity.looks == 1
    first = identity.principal
    identity.principal = Principal(key="ada", tenants=("acme",), scopes=frozenset({Scope.METRICS}))
    await asked(application, scope(kept))
    assert identity.looks == 2
    assert [principal is first for *_, principal in seen] == [True, True, True, False]
    identity.principal = Principal(key="ada", tenants=("acme",), scopes=frozenset())
    await asked(application, scope(kept))
    assert len(seen) == 4  # what it may do is asked each time


async def test_a_route_is_that_of_the_configuration_of_now():
    identity, seen, kept = Identity(), [], {}
    for name in ("before", "before", "after"):
        await asked(edge(identity, seen, name), scope(kept))
    assert seen == [(name, "x", identity.principal) for name in ("before", "before", "after")]

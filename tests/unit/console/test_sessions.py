"""Sessions: whose they are, when they count, and when they end."""

from msgspec.structs import replace

from maitred.console.sessions import COOKIE, ConsoleSessions, SessionIdentity, same_origin
from maitred.core.tenancy import ANONYMOUS, Principal, Scope
from tests.support.clock import FakeClock

ADA = Principal(key="ada0000000000000", tenants=("acme",), scopes=frozenset({Scope.INFERENCE}))
HOST = {b"host": "maitred.test:8000"}


class Known:
    """Knows a key by its header, and what has become of those that it knew."""

    def __init__(self):
        self.now = {ADA.key: ADA}

    async def identify(self, header):
        return self.now[header(b"authorization")] if header(b"authorization") else ANONYMOUS

    def refresh_principal(self, principal):
        return self.now.get(principal.key)

    def is_still_valid(self, principal, header):
        return self.refresh_principal(principal) is principal


def sessions(lasting_s=100.0, most=4):
    clock = FakeClock()
    return clock, ConsoleSessions(clock, lasting_s, most)


def headers(cookie, token=None):
    given = {b"cookie": f"other=1; {COOKIE}={cookie}", **HOST}
    return (given | ({} if token is None else {b"x-maitred-console": token})).get


async def test_cookie_and_token_together_stand_for_the_key():
    _, open_ = sessions()
    cookie, session = open_.open(ADA)
    identity = SessionIdentity(Known(), open_)
    assert await identity.identify(headers(cookie, session.token)) is ADA
    for half in (headers(cookie), headers(cookie, "guess"), headers("guess", session.token), headers(cookie, "")):
        assert await identity.identify(half) is ANONYMOUS


async def test_a_request_that_another_site_sends_does_not_count():
    _, open_ = sessions()
    cookie, session = open_.open(ADA)
    identity = SessionIdentity(Known(), open_)
    own = {b"origin": "http://maitred.test:8000", b"sec-fetch-site": "same-origin"}
    assert same_origin((HOST | own).get)
    for name, value in (
        (b"origin", "http://evil.test"),
        (b"origin", "null"),
        (b"sec-fetch-site", "cross-site"),
        (b"sec-fetch-site", "same-site"),
    ):
        forged = HOST | own | {name: value}
        assert not same_origin(forged.get)
        full = forged | {b"cookie": f"{COOKIE}={cookie}", b"x-maitred-console": session.token}
        assert await identity.identify(full.get) is ANONYMOUS


async def test_what_the_key_may_do_is_asked_every_time():
    _, open_ = sessions()
    cookie, session = open_.open(ADA)
    known = Known()
    identity = SessionIdentity(known, open_)
    known.now[ADA.key] = replace(ADA, scopes=frozenset({Scope.METRICS}))
    assert (await identity.identify(headers(cookie, session.token))).scopes == {Scope.METRICS}
    del known.now[ADA.key]
    assert await identity.identify(headers(cookie, session.token)) is ANONYMOUS


async def test_who_came_by_a_session_is_asked_every_time():
    _, open_ = sessions()
    cookie, session = open_.open(ADA)
    identity = SessionIdentity(Known(), open_)
    assert identity.is_still_valid(ADA, headers(cookie))
    assert not identity.is_still_valid(ADA, headers(cookie, session.token))


async def test_a_key_of_its_own_wins():
    _, open_ = sessions()
    cookie, session = open_.open(replace(ADA, key="other00000000000"))
    full = {b"cookie": f"{COOKIE}={cookie}", b"x-maitred-console": session.token, b"authorization": ADA.key, **HOST}
    assert await SessionIdentity(Known(), open_).identify(full.get) is ADA


def test_they_end_by_themselves_and_when_they_are_closed():
    clock, open_ = sessions(lasting_s=100)
    first, _ = open_.open(ADA)
    clock.now_s += 60
    second, _ = open_.open(ADA)
    clock.now_s += 40
    assert open_.session_for(headers(first)) is None
    assert open_.session_for(headers(second)) is not None
    open_.close(headers(second))
    assert open_.session_for(headers(second)) is None


def test_there_are_never_more_than_allowed_and_one_key_ends_only_its_own():
    _, open_ = sessions(most=40)
    others, _ = open_.open(replace(ADA, key="other00000000000"))
    cookies = [open_.open(ADA)[0] for _ in range(100)]
    assert len(open_) == 17
    assert open_.session_for(headers(others)) is not None
    assert open_.session_for(headers(cookies[-1])) is not None
    for number in range(100):
        open_.open(replace(ADA, key=f"key{number}"))
    assert len(open_) == 40
    assert open_.session_for(headers(others)) is None


def test_the_cookie_itself_is_kept_nowhere():
    _, open_ = sessions()
    cookie, session = open_.open(ADA)
    assert cookie not in repr(vars(open_)) + repr(session)

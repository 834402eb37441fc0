"""Sessions: whose they are, when they count, and when they end."""

from msgspec.structs import replace

from maitred.console.sessions import COOKIE, ConsoleSessions, same_origin
from maitred.core.tenancy import ANONYMOUS, ApiKey, DirectoryChanges, Principal, Scope, Tenant
from maitred.identity.directory import Directory
from maitred.identity.identity import Identity
from maitred.identity.keys import make_key
from tests.support.clock import FakeClock

MADE = make_key()
ADA_KEY = ApiKey(id=MADE.public_id, tenant="acme", secrets=(MADE.secret,), scopes=frozenset({Scope.INFERENCE}))
ADA = Principal(key=MADE.public_id, tenants=("acme",), scopes=frozenset({Scope.INFERENCE}))
HOST = {b"host": "maitred.test:8000"}


def identity_with(sessions):
    """Returns an identity that accepts the sessions, and its directory with a key of Ada's."""
    directory = Directory()
    directory.apply(DirectoryChanges(1, [Tenant(id="acme")], [ADA_KEY]))
    identity = Identity(directory, FakeClock(), anonymous=ANONYMOUS)
    identity.accept_sessions(sessions.owner)
    return identity, directory


def sessions(lasting_s=100.0, most=4):
    clock = FakeClock()
    return clock, ConsoleSessions(clock, lasting_s, most)


def headers(cookie, token=None):
    given = {b"cookie": f"other=1; {COOKIE}={cookie}", **HOST}
    return (given | ({} if token is None else {b"x-maitred-console": token})).get


async def test_cookie_and_token_together_stand_for_the_key():
    _, open_ = sessions()
    cookie, session = open_.open(ADA)
    identity, _ = identity_with(open_)
    assert (await identity.identify(headers(cookie, session.token))).key == ADA.key
    for half in (headers(cookie), headers(cookie, "guess"), headers("guess", session.token), headers(cookie, "")):
        assert await identity.identify(half) is ANONYMOUS


async def test_a_request_that_another_site_sends_does_not_count():
    _, open_ = sessions()
    cookie, session = open_.open(ADA)
    identity, _ = identity_with(open_)
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
    identity, directory = identity_with(open_)
    directory.apply(DirectoryChanges(2, [], [replace(ADA_KEY, scopes=frozenset({Scope.METRICS}))]))
    assert (await identity.identify(headers(cookie, session.token))).scopes == {Scope.METRICS}
    directory.apply(DirectoryChanges(3, [], [], deleted_keys=[ADA.key]))
    assert await identity.identify(headers(cookie, session.token)) is ANONYMOUS


async def test_who_came_by_a_session_is_asked_every_time():
    _, open_ = sessions()
    cookie, session = open_.open(ADA)
    identity, _ = identity_with(open_)
    ada = await identity.identify(headers(cookie, session.token))
    assert identity.is_still_valid(ada, headers(cookie))
    assert not identity.is_still_valid(ada, headers(cookie, session.token))


async def test_a_key_of_its_own_wins():
    _, open_ = sessions()
    cookie, session = open_.open(replace(ADA, key="other00000000000"))
    full = {
        b"cookie": f"{COOKIE}={cookie}",
        b"x-maitred-console": session.token,
        b"authorization": f"Bearer {MADE.plaintext}",
        **HOST,
    }
    identity, _ = identity_with(open_)
    assert (await identity.identify(full.get)).key == ADA.key


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


def test_one_organisation_ends_neither_the_sessions_of_others_nor_those_of_operators():
    _, open_ = sessions(most=20)
    operator = replace(ADA, key="operator00000000", scopes=frozenset({Scope.ADMIN}))
    cookies = [open_.open(operator)[0], open_.open(replace(ADA, key="b0", tenants=("other",)))[0]]
    for number in range(100):
        open_.open(replace(ADA, key=f"key{number}"))
    assert len(open_) == 20
    assert all(open_.session_for(headers(cookie)) is not None for cookie in cookies)


def test_the_cookie_itself_is_kept_nowhere():
    _, open_ = sessions()
    cookie, session = open_.open(ADA)
    assert cookie not in repr(vars(open_)) + repr(session)

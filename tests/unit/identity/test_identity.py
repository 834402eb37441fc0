import pytest

from maitred.core.errors import StoreUnavailable, Unauthenticated, Unavailable
from maitred.core.tenancy import ANONYMOUS, ApiKey, DirectoryChanges, Tenant
from maitred.identity.directory import Directory
from maitred.identity.identity import Identity, read_credential
from maitred.identity.keys import make_key
from tests.support.clock import FakeClock

INVALID = "This API key is not valid here. Check it, or ask for a new one."


def headers(**values):
    return {name.replace("_", "-").encode(): value for name, value in values.items()}.get


class Fixture:
    def __init__(self, **settings):
        self.clock = FakeClock(now_s=1000.0)
        self.directory = Directory()
        self.version = 0
        self.made = make_key()
        self.identity = Identity(self.directory, self.clock, **settings)
        self.put(Tenant(id="acme"))
        self.put_key()

    def put(self, *tenants, keys=()):
        self.version += 1
        self.directory.apply(DirectoryChanges(self.version, tenants, keys))

    def put_key(self, *secrets, **fields):
        key = ApiKey(id=self.made.public_id, tenant="acme", secrets=secrets or (self.made.secret,), **fields)
        self.put(keys=[key])

    async def who(self, text=None, **values):
        values = values or {"authorization": f"Bearer {text or self.made.plaintext}"}
        return await self.identity.identify(headers(**values))

    async def refusal(self, text=None, **values):
        with pytest.raises(Unauthenticated) as caught:
            await self.who(text, **values)
        return caught.value.message


@pytest.mark.parametrize("name", ["authorization", "x_api_key", "api_key"])
async def test_a_key_is_found_where_each_client_puts_it(name):
    fixture = Fixture()
    for lead in ("Bearer ", "bearer  ", " BEARER ") if name == "authorization" else ("", " "):
        found = await fixture.who(**{name: lead + fixture.made.plaintext + " "})
        assert found.subjects == (f"key:{fixture.made.public_id}", "tenant:acme", "*")


def test_the_first_credential_that_is_there_counts():
    assert read_credential(headers(authorization="Bearer a", x_api_key="b", api_key="c")) == "a"
    assert read_credential(headers(x_api_key="b", api_key="c")) == "b"
    assert read_credential(headers(x_api_key=" ", api_key="c")) == "c"
    assert read_credential(headers(authorization="Bearer ", x_api_key="b")) == "b"
    # What another proxy on the way asked for is not meant for us.
    assert read_credential(headers(authorization="Basic YTpi", x_api_key="b")) == "b"
    assert read_credential(headers(authorization="Basic YTpi")) is None
    assert read_credential(headers()) is None


async def test_the_other_credentials_are_not_tried():
    fixture = Fixture()
    assert await fixture.refusal(authorization="Bearer wrong", x_api_key=fixture.made.plaintext) == INVALID


async def test_whatever_is_wrong_gets_the_same_answer():
    fixture = Fixture()
    plaintext, other = fixture.made.plaintext, make_key()
    refusals = {
        await fixture.refusal("garbage"),
        await fixture.refusal("sk-mtd-"),
        await fixture.refusal(other.plaintext),
        await fixture.refusal(make_key(fixture.made.public_id).plaintext),
        await fixture.refusal(plaintext[:-1]),
    }
    fixture.put_key(expires_s=1000.0)
    refusals.add(await fixture.refusal())
    fixture.put_key(make_key(fixture.made.public_id).secret)
    refusals.add(await fixture.refusal())
    fixture.put_key(revoked=True)
    refusals.add(await fixture.refusal())
    fixture.put_key()
    fixture.put(Tenant(id="acme", disabled=True))
    refusals.add(await fixture.refusal())
    assert refusals == {INVALID}
    fixture.put(Tenant(id="acme"))
    assert (await fixture.who()).key == fixture.made.public_id


async def test_no_credential_has_a_sentence_of_its_own():
    fixture = Fixture()
    assert "No API key was sent" in await fixture.refusal(accept="*/*")


async def test_a_key_ends_at_the_second():
    fixture = Fixture()
    fixture.put_key(expires_s=1001.0)
    await fixture.who()
    fixture.clock.now_s = 1001.0
    await fixture.refusal()


async def test_what_held_when_a_request_came_may_not_hold_later():
    fixture = Fixture(anonymous=ANONYMOUS)
    someone = await fixture.who()
    assert fixture.identity.holds(someone)
    assert fixture.identity.holds(ANONYMOUS)
    fixture.put_key(expires_s=1001.0)
    assert fixture.identity.holds(someone)
    fixture.clock.now_s = 1001.0
    assert not fixture.identity.holds(someone), "it has expired"
    fixture.put_key(revoked=True)
    assert not fixture.identity.holds(someone)
    fixture.put_key()
    assert fixture.identity.holds(someone)
    fixture.put(Tenant(id="acme", disabled=True))
    assert not fixture.identity.holds(someone)
    fixture.put(Tenant(id="acme"))
    fixture.directory.apply(DirectoryChanges(9, deleted_keys=[someone.key]))
    assert not fixture.identity.holds(someone), "there is no such key any more"


async def test_who_came_with_a_token_stays_while_its_tenants_do():
    fixture = Fixture()
    bearer = fixture.directory.principal_in("acme", key="google:me", scopes=frozenset())
    assert fixture.identity.holds(bearer)
    fixture.put(Tenant(id="acme", disabled=True))
    assert not fixture.identity.holds(bearer)


async def test_a_secret_ends_before_its_key_while_another_takes_over():
    fixture = Fixture()
    old = make_key(fixture.made.public_id, expires_s=1010.0)
    fixture.put_key(old.secret, fixture.made.secret)
    await fixture.who(old.plaintext)
    await fixture.who()
    fixture.clock.now_s = 1010.0
    await fixture.refusal(old.plaintext)
    await fixture.who()


async def test_the_anonymous_may_come_where_they_are_let_in():
    fixture = Fixture(anonymous=ANONYMOUS)
    assert await fixture.who(accept="*/*") is ANONYMOUS
    for made_up in ("none", "sk-1234", "EMPTY", "a.b.c", "eyJhbGciOiJub25lIn0.e30."):
        assert await fixture.who(made_up) is ANONYMOUS
    assert (await fixture.who()).key == fixture.made.public_id


async def test_who_names_a_key_of_ours_is_not_anonymous():
    fixture = Fixture(anonymous=ANONYMOUS)
    for text in ("sk-mtd-", "sk-mtd-none", make_key().plaintext, fixture.made.plaintext + "x"):
        assert await fixture.refusal(text) == INVALID


async def test_a_directory_that_is_too_old_identifies_nobody():
    def stale():
        raise StoreUnavailable

    for settings in ({}, {"anonymous": ANONYMOUS}):
        fixture = Fixture(check_fresh=stale, **settings)
        for text in (None, "none"):
            with pytest.raises(StoreUnavailable):
                await fixture.who(text)


class Issuers:
    def __init__(self, answer):
        self.answer = answer

    def is_issued(self, token):
        return token.startswith("token")

    async def principal_for(self, token):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_tokens_go_to_their_issuers_and_nothing_else_does():
    fixture = Fixture(issuers=Issuers(ANONYMOUS))
    assert await fixture.who("token-1") is ANONYMOUS
    assert await fixture.refusal("other") == INVALID
    assert (await fixture.who()).key == fixture.made.public_id


async def test_a_token_of_an_issuer_must_be_valid_also_where_the_anonymous_may_come():
    fixture = Fixture(issuers=Issuers(None), anonymous=ANONYMOUS)
    assert await fixture.refusal("token-1") == INVALID
    assert await fixture.who("other") is ANONYMOUS
    fixture = Fixture(issuers=Issuers(Unavailable()), anonymous=ANONYMOUS)
    with pytest.raises(Unavailable):
        await fixture.who("token-1")


async def test_who_is_known_stands_until_something_of_it_changes():
    fixture = Fixture()
    header, known = headers(), await fixture.who()
    assert fixture.identity.is_still_valid(known, header)
    fixture.put(Tenant(id="other"))
    assert fixture.identity.is_still_valid(known, header)
    fixture.put_key()
    assert not fixture.identity.is_still_valid(known, header)
    fixture.put_key(expires_s=2000.0)
    assert not fixture.identity.is_still_valid(await fixture.who(), header)  # it will end by itself


async def test_nobody_stands_by_a_directory_that_is_too_old():
    def stale():
        raise StoreUnavailable

    fixture = Fixture()
    known = await fixture.who()
    with pytest.raises(StoreUnavailable):
        Identity(fixture.directory, fixture.clock, check_fresh=stale).is_still_valid(known, headers())

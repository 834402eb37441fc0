"""Keys of other gateways go on working: by their whole text, or by nothing but its SHA-256."""

import hashlib

import pytest

from maitred.api.headers import Headers
from maitred.core.errors import Unauthenticated
from maitred.core.tenancy import ANONYMOUS, ApiKey, DirectoryChanges, KeySecret, Tenant
from maitred.identity.directory import Directory
from maitred.identity.identity import Identity
from maitred.identity.keys import foreign_id, make_key, parse_foreign
from tests.support.clock import FakeClock

OLD_KEY = "sk-Xk29fj3lD0fkW2mmQ01abA"
DIGEST = hashlib.sha256(OLD_KEY.encode()).digest()


class Fixture:
    def __init__(self, **key):
        self.clock = FakeClock(now_s=1000.0)
        self.directory = Directory()
        self.identity = Identity(self.directory, self.clock, anonymous=ANONYMOUS)
        stored = ApiKey(id=foreign_id(DIGEST), tenant="acme", secrets=(KeySecret(DIGEST),), **key)
        self.directory.apply(DirectoryChanges(1, (Tenant(id="acme"),), (stored,)))

    async def who(self, text):
        return await self.identity.identify({b"authorization": f"Bearer {text}"}.get)


async def test_a_key_is_found_by_the_digest_that_is_kept_of_it():
    found = await Fixture().who(OLD_KEY)
    assert found.subjects == (f"key:{DIGEST.hex()[:16]}", "tenant:acme", "*")


@pytest.mark.parametrize("fields", [{"revoked": True}, {"expires_s": 999.0}])
async def test_one_that_is_not_valid_any_more_is_nobody_and_not_anonymous(fields):
    with pytest.raises(Unauthenticated):
        await Fixture(**fields).who(OLD_KEY)


async def test_other_texts_are_as_before():
    fixture = Fixture()
    assert await fixture.who(OLD_KEY + "x") is ANONYMOUS
    assert await fixture.who("k" * 10_000) is ANONYMOUS
    with pytest.raises(Unauthenticated):
        await fixture.who("sk-mtd-" + OLD_KEY)


@pytest.mark.parametrize(
    "key", [b"schl\xc3\xbcssel-1", b"cl\xc3\xa0", b"\xff\xfe-key\x85"], ids=["UTF-8", "NBSP", "bytes"]
)
@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
async def test_a_key_is_the_bytes_that_were_sent(key, name):
    fixture, digest = Fixture(), hashlib.sha256(key).digest()
    stored = ApiKey(id=foreign_id(digest), tenant="acme", secrets=(KeySecret(digest),))
    fixture.directory.apply(DirectoryChanges(2, (), (stored,)))
    value = key if name == b"x-api-key" else b"Bearer \t" + key + b" "
    found = await fixture.identity.identify(Headers([(name, value)]))
    assert found.key == stored.id


async def test_the_beginning_of_the_digest_is_not_enough():
    fixture = Fixture()
    other = ApiKey(id=foreign_id(DIGEST), tenant="acme", secrets=(KeySecret(bytes(32)),))
    fixture.directory.apply(DirectoryChanges(2, (), (other,)))
    with pytest.raises(Unauthenticated):
        await fixture.who(OLD_KEY)


def test_our_own_keys_are_not_foreign():
    assert parse_foreign(make_key().plaintext) is None
    assert parse_foreign(OLD_KEY) == (DIGEST.hex()[:16], OLD_KEY)

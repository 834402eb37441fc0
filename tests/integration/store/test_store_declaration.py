"""What a configuration declares and what the API made, in one directory."""

import logging

import pytest
from msgspec import structs

from maitred.core.errors import ConfigInvalid
from maitred.core.limits import Limit, LimitKind
from maitred.core.tenancy import ApiKey, CacheDirective, KeySecret, Scope, Tenant
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.directory import DirectoryStore
from tests.support.clock import FakeClock
from tests.support.stores import DEADLINE_S

ACME = Tenant(id="acme")
KEY = ApiKey(id="k" * 16, tenant="acme", secrets=(KeySecret(b"1" * 32),))


def rate(limit_id, value, model=None):
    kind = LimitKind.REQUESTS_PER_MINUTE
    return Limit(id=limit_id, subject="tenant:acme", kind=kind, value=value, model=model)


@pytest.fixture
async def store(tmp_path):
    async with open_database(StoreConfig(folder=str(tmp_path), deadline_s=DEADLINE_S)) as database:
        yield DirectoryStore(database, FakeClock(now_s=1_800_000_000.0))


async def limits(store):
    return {limit.id: limit.value for limit in await store.limits()}


async def test_the_same_again_changes_nothing(store):
    await store.declare([ACME], [KEY], [rate("config-1", 5)])
    before = await store.changes(0)
    await store.declare([ACME], [KEY], [rate("config-1", 5)])
    after = await store.changes(0)
    assert (before.tenants, before.keys, before.limits) == (after.tenants, after.keys, after.limits)


async def test_a_declared_limit_takes_the_place_of_one_that_was_made(store, caplog):
    await store.create_tenant(ACME)
    for made in (rate("made", 7), rate("other-model", 8, "small")):
        await store.put_limit(made)
    version = (await store.changes(0)).version
    with caplog.at_level(logging.WARNING):
        await store.declare([ACME], [], [rate("config-1", 5)])
    assert await limits(store) == {"config-1": 5, "other-model": 8}
    assert "made" in caplog.text
    assert (await store.changes(version)).deleted_limits == ["made"]


async def test_what_was_changed_since_is_as_declared_again(store):
    await store.declare([ACME], [KEY], [rate("config-1", 5)])
    await store.put_limit(rate("config-1", 500))
    await store.update_tenant("acme", weight=9.0)
    await store.declare([ACME], [KEY], [rate("config-1", 5)])
    assert await limits(store) == {"config-1": 5}
    assert (await store.tenant("acme")).weight == 1.0


async def test_what_is_no_longer_declared_ends_and_can_come_back_but_for_keys(store):
    await store.declare([ACME], [KEY], [rate("config-1", 5)])
    await store.declare([], [], [])
    assert (await store.tenant("acme")).disabled
    assert (await store.key(KEY.id)).revoked
    assert await limits(store) == {}
    await store.declare([ACME], [KEY], [rate("config-1", 6)])
    assert not (await store.tenant("acme")).disabled
    assert (await store.key(KEY.id)).revoked
    assert await limits(store) == {"config-1": 6}


async def test_cache_controls_of_a_key_are_those_that_are_declared(store):
    for controls in ((CacheDirective.TTL,), (), None):
        declared = structs.replace(KEY, cache_controls=controls)
        await store.declare([ACME], [declared], [])
        assert (await store.key(KEY.id)).cache_controls == controls


async def test_a_key_ends_when_it_is_declared_to_and_later_if_it_is_changed(store):
    for expires_s in (None, 1_900_000_000.0, 1_950_000_000.0, None):
        version = (await store.changes(0)).version
        await store.declare([ACME], [structs.replace(KEY, expires_s=expires_s)], [])
        assert (await store.key(KEY.id)).expires_s == expires_s
        assert [key.expires_s for key in (await store.changes(version)).keys] == [expires_s]


async def test_a_key_does_not_move(store):
    for tenant in ("acme", "other"):
        await store.create_tenant(Tenant(id=tenant))
    await store.create_key(ApiKey(id=KEY.id, tenant="other", secrets=KEY.secrets))
    with pytest.raises(ConfigInvalid, match="belongs to other"):
        await store.declare([ACME], [KEY], [])


async def test_a_configuration_that_declares_the_last_admin_key_no_longer_is_refused(store):
    admin = ApiKey(id="a" * 16, tenant="acme", scopes=(Scope.ADMIN,), secrets=(KeySecret(b"2" * 32),))
    await store.declare([ACME], [KEY, admin], [])
    before = await store.changes(0)
    for tenants, keys in (
        ([ACME], [KEY]),
        ([], []),
        ([Tenant(id="acme", disabled=True)], [KEY, admin]),
        ([ACME], [KEY, structs.replace(admin, scopes=(Scope.METRICS,))]),
    ):
        with pytest.raises(ConfigInvalid, match="scope `admin`"):
            await store.declare(tenants, keys, [])
    assert await store.changes(0) == before
    another = structs.replace(admin, id="b" * 16, secrets=(KeySecret(b"3" * 32),))
    await store.declare([ACME], [KEY, another], [])
    assert (await store.key(admin.id)).revoked

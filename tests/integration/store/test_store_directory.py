"""Tenants, keys and limits in both databases."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from maitred.core.errors import Conflict, InvalidRequest, ResourceNotFound, StoreUnavailable
from maitred.core.limits import Limit, LimitKind
from maitred.core.secret import Secret
from maitred.core.tenancy import ApiKey, DirectoryChanges, KeySecret, Scope, Tenant
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.directory import DirectoryStore
from tests.support.servers.postgres_server import PostgresServer
from tests.support.stores import DEADLINE_S

NASTY = [
    "",
    "'; DROP TABLE tenants; --",
    '" OR 1=1 --',
    "a\0b",
    "\ud800",
    "𝔸𝕔𝕞𝕖",
    "acme\u0301",
    "ＡＣＭＥ",
    "%",
    "a" * 1_000_000,
    "../../etc/passwd",
    "$1",
    ":id",
]
"""Ids that nothing has."""


class SetClock:
    """Stands where it was set."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self.now_s = now_s

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


def secret(text: str) -> KeySecret:
    return KeySecret(hashlib.sha256(text.encode(errors="surrogatepass")).digest())


def key(key_id: str, tenant: str = "acme", **fields: object) -> ApiKey:
    return ApiKey(**({"id": key_id, "tenant": tenant, "secrets": (secret(key_id),)} | fields))  # type: ignore[arg-type]


def limit(limit_id: str, subject: str = "*", value: int = 10, **fields: object) -> Limit:
    kind = LimitKind.REQUESTS_PER_MINUTE
    return Limit(**({"id": limit_id, "subject": subject, "kind": kind, "value": value} | fields))  # type: ignore[arg-type]


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def store(store_config: StoreConfig, clock: SetClock) -> AsyncIterator[DirectoryStore]:
    async with open_database(store_config) as database:
        yield DirectoryStore(database, clock)


async def test_an_empty_directory_has_version_0(store: DirectoryStore) -> None:
    assert await store.changes(0) == DirectoryChanges(0)


async def test_a_tenant_comes_back_as_it_was_stored(store: DirectoryStore) -> None:
    plain = Tenant(id="acme")
    full = Tenant(
        id="acme-ml",
        parent="acme",
        name="Größe 🦙 '; DROP TABLE tenants; --",
        weight=2.5,
        models=("a", "b'\"\\"),
        priority_ceiling=7,
        regions=("eu", "us"),
        tags=("local-only",),
        disabled=True,
    )
    none = Tenant(id="nothing", models=())
    for tenant in (plain, full, none):
        await store.create_tenant(tenant)
        assert await store.tenant(tenant.id) == tenant
    changes = await store.changes(0)
    assert (changes.version, list(changes.tenants)) == (3, [plain, full, none])
    assert await store.tenants() == [plain, full, none]
    assert await store.tenants(parent="acme") == [full]


async def test_a_tenant_is_changed_field_by_field(store: DirectoryStore) -> None:
    await store.create_tenant(Tenant(id="acme", tags=("a",)))
    changed = await store.update_tenant("acme", name="Acme", weight=3, models=["m"], disabled=True)
    assert changed == Tenant(id="acme", name="Acme", weight=3.0, models=("m",), disabled=True, tags=("a",))
    assert await store.tenant("acme") == changed
    assert await store.update_tenant("acme", models=None) == msgspec.structs.replace(changed, models=None)
    assert (await store.changes(2)).tenants == [await store.tenant("acme")]
    for wrong in ({"parent": "x"}, {"id": "x"}, {"weight": -1}, {"weight": "x"}, {"nonsense": 1}):
        with pytest.raises(InvalidRequest):
            await store.update_tenant("acme", **wrong)
    assert (await store.changes(0)).version == 3  # What failed took no version.


async def test_teams_have_organisations_and_nothing_is_deeper(store: DirectoryStore) -> None:
    with pytest.raises(InvalidRequest, match="There is no organisation acme"):
        await store.create_tenant(Tenant(id="ml", parent="acme"))
    await store.create_tenant(Tenant(id="acme"))
    await store.create_tenant(Tenant(id="ml", parent="acme"))
    with pytest.raises(InvalidRequest, match="ml is a team of acme"):
        await store.create_tenant(Tenant(id="deep", parent="ml"))
    with pytest.raises(Conflict, match="There is a tenant ml already"):
        await store.create_tenant(Tenant(id="ml"))


async def test_a_tenant_with_teams_or_live_keys_stays(store: DirectoryStore, clock: SetClock) -> None:
    await store.create_tenant(Tenant(id="acme"))
    await store.create_tenant(Tenant(id="ml", parent="acme"))
    with pytest.raises(Conflict, match=r"has teams: ml\. Delete them first"):
        await store.delete_tenant("acme")
    await store.create_key(key("k1", "ml"))
    await store.create_key(key("k2", "ml", expires_s=clock.now_s + 10))
    await store.put_limit(limit("of-team", "tenant:ml"))
    await store.put_limit(limit("of-key", "key:k1"))
    await store.put_limit(limit("of-all", "*"))
    with pytest.raises(Conflict, match="has keys: k1, k2"):
        await store.delete_tenant("ml")
    await store.revoke_key("k1")
    clock.now_s += 10  # The other has expired now.
    before = (await store.changes(0)).version
    await store.delete_tenant("ml")

    changes = await store.changes(before)
    assert list(changes.deleted_tenants) == ["ml"]
    assert sorted(changes.deleted_keys) == ["k1", "k2"]
    assert sorted(changes.deleted_limits) == ["of-key", "of-team"]
    assert (list(changes.tenants), list(changes.keys), list(changes.limits)) == ([], [], [])
    everything = await store.changes(0)
    assert [tenant.id for tenant in everything.tenants] == ["acme"]
    assert (list(everything.keys), list(everything.deleted_tenants), list(everything.deleted_keys)) == ([], [], [])
    assert [kept.id for kept in await store.limits()] == ["of-all"]
    with pytest.raises(ResourceNotFound):
        await store.key("k1")
    await store.delete_tenant("acme")


async def test_ids_are_never_used_again(store: DirectoryStore) -> None:
    await store.create_tenant(Tenant(id="acme"))
    await store.create_tenant(Tenant(id="gone"))
    await store.create_key(key("k1", "gone"))
    await store.revoke_key("k1")
    await store.put_limit(limit("l1"))
    await store.delete_tenant("gone")
    await store.delete_limit("l1")
    for again in (
        lambda: store.create_tenant(Tenant(id="gone")),
        lambda: store.create_key(key("k1")),
        lambda: store.put_limit(limit("l1")),
    ):
        with pytest.raises(Conflict, match="not used again"):
            await again()
    for unknown in (
        lambda: store.tenant("gone"),
        lambda: store.delete_tenant("gone"),
        lambda: store.tenants(parent="gone"),
        lambda: store.keys(tenant="gone"),
        lambda: store.limit("l1"),
        lambda: store.delete_limit("l1"),
        lambda: store.update_tenant("gone", name="x"),
    ):
        with pytest.raises(ResourceNotFound):
            await unknown()
    with pytest.raises(InvalidRequest, match="There is no tenant gone"):
        await store.create_key(key("k2", "gone"))
    with pytest.raises(InvalidRequest, match="There is no organisation gone"):
        await store.create_tenant(Tenant(id="team", parent="gone"))


async def test_a_key_comes_back_as_it_was_stored(store: DirectoryStore, clock: SetClock) -> None:
    await store.create_tenant(Tenant(id="acme"))
    plain = key("k1")
    full = key("k2", name="CI", scopes=tuple(Scope), expires_s=clock.now_s + 0.5)
    await store.create_key(full)
    await store.create_key(plain)
    assert await store.keys() == [plain, full]
    assert await store.key("k2") == full
    assert list((await store.changes(0)).keys) == [full, plain]
    assert list((await store.changes(2)).keys) == [plain]
    with pytest.raises(Conflict, match="There is a key k1"):
        await store.create_key(plain)
    changed = await store.update_key("k1", name="new", scopes=["admin"], expires_s=clock.now_s + 5)
    assert changed == key("k1", name="new", scopes=(Scope.ADMIN,), expires_s=clock.now_s + 5)
    assert await store.key("k1") == changed
    clock.now_s += 100
    renamed = await store.update_key("k1", name="expired")
    assert renamed.expires_s == changed.expires_s
    for wrong in ({"tenant": "x"}, {"secrets": []}, {"revoked": False}, {"scopes": []}, {"expires_s": 5.0}):
        with pytest.raises(InvalidRequest):
            await store.update_key("k1", **wrong)


async def test_revocation_is_for_good(store: DirectoryStore) -> None:
    await store.create_tenant(Tenant(id="acme"))
    await store.create_key(key("k1"))
    assert (await store.revoke_key("k1")).revoked
    assert (await store.revoke_key("k1")).revoked
    assert [key.revoked for key in (await store.changes(2)).keys] == [True]
    with pytest.raises(Conflict, match="revoked"):
        await store.rotate_key("k1", secret("new"), 0)
    with pytest.raises(Conflict, match="revoked"):
        await store.update_key("k1", name="x")


async def test_the_last_admin_key_cannot_lock_everybody_out(store: DirectoryStore, clock: SetClock) -> None:
    """However it would end: revoked, narrowed, expired, or with its tenant; and whatever else has the word in it."""
    admin = {"scopes": (Scope.ADMIN, Scope.METRICS)}
    await store.create_tenant(Tenant(id="org"))
    await store.create_tenant(Tenant(id="team", parent="org"))
    await store.create_tenant(Tenant(id="closed", disabled=True))
    await store.create_key(key("last", "team", **admin))
    await store.create_key(key("no", "org", name="admin"))
    await store.create_key(key("ended", "org", **admin, expires_s=clock.now_s + 5))
    await store.create_key(key("lost", "org", **(admin | {"secrets": (KeySecret(b"x" * 32, clock.now_s + 5),)})))
    await store.create_key(key("out", "closed", **admin))
    clock.now_s += 10
    changes: list[Callable[[], Awaitable[object]]] = [
        lambda: store.revoke_key("last"),
        lambda: store.update_key("last", scopes=["inference"]),
        lambda: store.update_key("last", expires_s=clock.now_s + 5),
        lambda: store.update_tenant("team", disabled=True),
        lambda: store.update_tenant("org", disabled=True),
    ]
    before = await store.changes(0)
    for change in changes:
        with pytest.raises(Conflict, match="scope `admin`"):
            await change()
    assert await store.changes(0) == before
    await store.update_key("last", name="the last", scopes=["admin"])
    await store.create_key(key("brief", "team", **admin, expires_s=clock.now_s + 50))
    for change in changes:
        with pytest.raises(Conflict, match="once keys expire"):
            await change()
    await store.create_key(key("next", "team", **admin))
    await store.revoke_key("last")
    await store.revoke_key("brief")


async def test_the_last_admin_key_may_expire_if_every_one_does(store: DirectoryStore, clock: SetClock) -> None:
    admin = {"scopes": (Scope.ADMIN, Scope.METRICS)}
    await store.create_tenant(Tenant(id="org"))
    await store.create_key(key("first", "org", **admin, expires_s=clock.now_s + 50))
    await store.create_key(key("next", "org", **admin, expires_s=clock.now_s + 40))
    await store.revoke_key("first")
    await store.update_key("next", expires_s=clock.now_s + 60)
    for change in (lambda: store.revoke_key("next"), lambda: store.update_tenant("org", disabled=True)):
        with pytest.raises(Conflict):
            await change()
    clock.now_s += 100  # nobody can any more, so nothing can be lost
    await store.revoke_key("next")
    await store.update_tenant("org", disabled=True)


async def test_of_two_admin_keys_that_revoke_each_other_one_remains(store: DirectoryStore) -> None:
    await store.create_tenant(Tenant(id="acme"))
    for name in ("a", "b"):
        await store.create_key(key(name, scopes=(Scope.ADMIN,)))
    done = await asyncio.gather(*map(store.revoke_key, ("a", "b")), return_exceptions=True)
    assert {type(outcome) for outcome in done} == {ApiKey, Conflict}


async def test_rotation_lets_older_secrets_go_on_for_the_overlap(store: DirectoryStore, clock: SetClock) -> None:
    await store.create_tenant(Tenant(id="acme"))
    await store.create_key(key("k1"))
    start_s = clock.now_s
    rotated = await store.rotate_key("k1", secret("b"), 100)
    assert rotated.secrets == (KeySecret(secret("k1").sha256, start_s + 100), secret("b"))
    assert list((await store.changes(2)).keys) == [rotated]
    # The first goes on for its own time, not for the longer one of the second rotation.
    clock.now_s += 50
    rotated = await store.rotate_key("k1", KeySecret(secret("c").sha256, clock.now_s + 1), 1000)
    assert rotated.secrets == (
        KeySecret(secret("k1").sha256, start_s + 100),
        KeySecret(secret("b").sha256, start_s + 1050),
        secret("c"),
    )
    # What has expired is forgotten; without an overlap all others are.
    clock.now_s += 50
    rotated = await store.rotate_key("k1", secret("d"), 0)
    assert rotated.secrets == (secret("d"),)
    assert await store.key("k1") == rotated
    with pytest.raises(Conflict, match="already"):
        await store.rotate_key("k1", secret("d"), 0)
    await store.update_key("k1", expires_s=clock.now_s + 1)
    clock.now_s += 1
    with pytest.raises(Conflict, match="expired"):
        await store.rotate_key("k1", secret("e"), 0)
    with pytest.raises(InvalidRequest):
        await store.rotate_key("k1", KeySecret(b"short"), 0)


async def test_racing_rotations_all_happen_and_only_the_last_is_for_good(
    store: DirectoryStore, clock: SetClock
) -> None:
    await store.create_tenant(Tenant(id="acme"))
    await store.create_key(key("k1"))
    results = await asyncio.gather(*(store.rotate_key("k1", secret(f"r{number}"), 60) for number in range(6)))
    kept = (await store.key("k1")).secrets
    assert len(kept) == 7
    assert [key.expires_s for key in kept] == [clock.now_s + 60] * 6 + [None]
    assert max(results, key=lambda result: len(result.secrets)).secrets == kept
    assert all(result.secrets[-1].expires_s is None for result in results)


async def test_a_limit_comes_back_as_it_was_stored(store: DirectoryStore) -> None:
    await store.create_tenant(Tenant(id="acme"))
    await store.create_key(key("k1"))
    made = [
        limit("z", "*", 2**53 - 1, burst=2**53 - 1),
        limit("y", "tenant:acme", model="m"),
        limit("x", "key:k1", kind=LimitKind.USD_PER_DAY, hard=False),
        limit("w", "tenant:*"),
        limit("v", "key:*"),
        limit("u", "tenant:acme"),
    ]
    for each in made:
        await store.put_limit(each)
        assert await store.limit(each.id) == each
    assert list((await store.changes(0)).limits) == made  # As they were made.
    assert await store.limits() == made[::-1]  # By id.
    assert await store.limits(subject="tenant:acme") == [made[5], made[1]]
    assert await store.limits(subject="tenant:unknown") == []

    before = (await store.changes(0)).version
    higher = limit("y", "tenant:acme", 99, model="m", burst=5)
    await store.put_limit(higher)
    assert list((await store.changes(before)).limits) == [higher]
    assert [limit.id for limit in (await store.changes(0)).limits] == ["z", "y", "x", "w", "v", "u"]
    for other in (limit("y", "*", model="n"), limit("y", "tenant:acme"), limit("y", "tenant:acme", model="n")):
        with pytest.raises(Conflict):
            await store.put_limit(other)
    with pytest.raises(Conflict, match="The limit y already sets requests_per_minute for tenant:acme and the model m"):
        await store.put_limit(limit("second", "tenant:acme", model="m"))
    with pytest.raises(Conflict, match=r"The limit z already sets requests_per_minute for \*\. Change"):
        await store.put_limit(limit("second"))
    await store.delete_limit("z")
    await store.put_limit(limit("second"))
    assert list((await store.changes(before + 1)).deleted_limits) == ["z"]
    for subject in ("tenant:unknown", "key:unknown"):
        with pytest.raises(InvalidRequest, match=r"There is no (tenant|key) unknown"):
            await store.put_limit(limit("l", subject))


async def test_the_slowest_rate_is_the_one_with_the_most_minutes_of_burst(store: DirectoryStore) -> None:
    assert await store.longest_refill_s() == 0
    await store.put_limit(limit("money", kind=LimitKind.USD_TOTAL))
    assert await store.longest_refill_s() == 0
    await store.put_limit(limit("minute", value=7))
    await store.put_limit(limit("quick", value=100, burst=1, model="m"))
    assert await store.longest_refill_s() == 60
    await store.put_limit(limit("slow", value=4, burst=6, model="n"))
    assert await store.longest_refill_s() == 90
    await store.delete_limit("slow")
    assert await store.longest_refill_s() == 60


async def test_a_budget_may_have_a_soft_limit_below_its_hard_one(store: DirectoryStore) -> None:
    hard = limit("hard", "*", 100, kind=LimitKind.USD_PER_DAY)
    soft = limit("soft", "*", 80, kind=LimitKind.USD_PER_DAY, hard=False)
    await store.add_many(limits=[hard])
    await store.put_limit(soft)
    assert await store.limits() == [hard, soft]
    with pytest.raises(Conflict, match="The limit soft already"):
        await store.put_limit(msgspec.structs.replace(soft, id="other"))
    with pytest.raises(Conflict, match="The limit hard already"):
        await store.put_limit(msgspec.structs.replace(soft, hard=True))


async def test_racing_limits_for_one_thing_leave_one(store: DirectoryStore) -> None:
    results = await asyncio.gather(
        *(store.put_limit(limit(f"l{number}")) for number in range(5)), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == ["Conflict"] * 4 + ["NoneType"]
    assert len(await store.limits()) == 1


async def test_a_key_and_the_deletion_of_its_tenant_race_to_one_outcome(store: DirectoryStore) -> None:
    for number in range(10):
        tenant = f"t{number}"
        await store.create_tenant(Tenant(id=tenant))
        made, deleted = await asyncio.gather(
            store.create_key(key(f"k{number}", tenant)), store.delete_tenant(tenant), return_exceptions=True
        )
        assert (made is None) != (deleted is None)
        assert isinstance(made or deleted, InvalidRequest | Conflict)


async def test_pages_cover_everything_once_and_in_order(store: DirectoryStore) -> None:
    ids = sorted(["b", "b-", "b_", "b0", "ba", "a", "z9", "0", *(f"t{number}" for number in range(50))])
    await store.add_many([Tenant(id=id_) for id_ in reversed(ids)], [key(id_, "a") for id_ in ids])
    await store.add_many(limits=[limit(id_, f"key:{id_}") for id_ in ids])

    async def all_pages(page: Callable[..., Awaitable[list[Tenant] | list[ApiKey] | list[Limit]]]) -> list[str]:
        found: list[str] = []
        while got := await page(after=found[-1] if found else "", limit=7):
            assert len(got) <= 7
            found += [key.id for key in got]
        return found

    # In the order of their bytes on both databases, as in Python.
    assert await all_pages(store.tenants) == ids
    assert await all_pages(store.keys) == ids
    assert await all_pages(store.limits) == ids
    assert (await store.keys(after="t9", limit=1000))[0].secrets == (secret("z9"),)
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after": "'"}, {"after": "a\0"}):
        for page in (store.tenants, store.keys, store.limits):
            with pytest.raises(InvalidRequest):
                await page(**wrong)


@pytest.mark.parametrize("number", range(len(NASTY)))
async def test_hostile_ids_find_nothing_and_break_nothing(store: DirectoryStore, number: int) -> None:
    nasty = NASTY[number]
    await store.create_tenant(Tenant(id="acme", name="kept"))
    for attempt, error in [
        (lambda: store.tenant(nasty), ResourceNotFound),
        (lambda: store.key(nasty), ResourceNotFound),
        (lambda: store.limit(nasty), ResourceNotFound),
        (lambda: store.delete_tenant(nasty), ResourceNotFound),
        (lambda: store.delete_limit(nasty), ResourceNotFound),
        (lambda: store.revoke_key(nasty), ResourceNotFound),
        (lambda: store.update_tenant(nasty, name="x"), ResourceNotFound),
        (lambda: store.update_key(nasty, name="x"), ResourceNotFound),
        (lambda: store.rotate_key(nasty, secret("x"), 0), ResourceNotFound),
        (lambda: store.tenants(parent=nasty), ResourceNotFound),
        (lambda: store.keys(tenant=nasty), ResourceNotFound),
        (lambda: store.limits(subject=f"key:{nasty}"), InvalidRequest),
        (lambda: store.create_tenant(Tenant(id=nasty)), InvalidRequest),
        (lambda: store.create_tenant(Tenant(id="x", parent=nasty)), InvalidRequest),
        (lambda: store.create_key(key(nasty)), InvalidRequest),
        (lambda: store.create_key(key("x", nasty)), InvalidRequest),
        (lambda: store.put_limit(limit(nasty)), InvalidRequest),
        (lambda: store.put_limit(limit("x", f"tenant:{nasty}")), InvalidRequest),
    ]:
        with pytest.raises(error):
            await attempt()
    assert await store.tenants() == [Tenant(id="acme", name="kept")]


async def test_a_poller_misses_nothing_while_writers_race(store_config: StoreConfig, clock: SetClock) -> None:
    """Four gateways write; a fifth follows by versions alone and ends with what a full read shows."""
    writers, rounds = 4, 15
    done = asyncio.Event()

    async def write(writer: int) -> None:
        async with open_database(store_config) as database:
            store = DirectoryStore(database, clock)
            for number in range(rounds):
                name = f"w{writer}-{number}"
                await store.create_tenant(Tenant(id=name))
                await store.create_key(key(name, name))
                await store.put_limit(limit(name, f"tenant:{name}"))
                if number % 3 == 0:
                    await store.rotate_key(name, secret(f"{name}-2"), 60)
                if number % 3 == 1:
                    await store.revoke_key(name)
                    await store.delete_tenant(name)

    async def follow() -> tuple[int, dict[str, object], int]:
        known: dict[str, object] = {}
        version = polls = 0
        async with open_database(store_config) as database:
            store = DirectoryStore(database, clock)
            while True:
                last = done.is_set()
                changes = await store.changes(version)
                assert changes.version >= version
                polls += changes.version > version
                version = changes.version
                for sort in ("tenants", "keys", "limits"):
                    for thing in getattr(changes, sort):
                        known[f"{sort} {thing.id}"] = thing
                    for gone in getattr(changes, f"deleted_{sort}"):
                        known.pop(f"{sort} {gone}", None)
                if last:
                    return version, known, polls

    async with asyncio.TaskGroup() as group:
        following = group.create_task(follow())

        async def all_writers() -> None:
            await asyncio.gather(*(write(writer) for writer in range(writers)))
            done.set()

        group.create_task(all_writers())
    version, known, polls = following.result()

    async with open_database(store_config) as database:
        everything = await DirectoryStore(database, clock).changes(0)
    expected = {
        f"{sort} {thing.id}": thing for sort in ("tenants", "keys", "limits") for thing in getattr(everything, sort)
    }
    assert known == expected
    assert len(everything.tenants) == writers * (rounds - len(range(1, rounds, 3)))
    changes_made = 3 * rounds + len(range(0, rounds, 3)) + 2 * len(range(1, rounds, 3))
    assert version == everything.version == writers * changes_made
    assert polls > 10  # It did read in between.


async def test_many_are_loaded_at_once(store: DirectoryStore) -> None:
    teams = [Tenant(id=f"team{number}", parent=f"org{number % 3}") for number in range(1500)]
    organisations = [Tenant(id=f"org{number}") for number in range(3)]
    keys = [key(f"k{number}", f"team{number}", name=f"n{number}") for number in range(1500)]
    limits = [limit(f"l{number}", f"key:k{number}") for number in range(1500)]
    await store.add_many([*teams, *organisations], keys, limits)  # Whatever order they come in.
    changes = await store.changes(0)
    assert {tenant.id for tenant in changes.tenants} == {tenant.id for tenant in [*teams, *organisations]}
    assert sorted(changes.keys, key=lambda each: each.id) == sorted(keys, key=lambda each: each.id)
    assert {limit.id for limit in changes.limits} == {limit.id for limit in limits}

    with pytest.raises(InvalidRequest):
        await store.add_many([Tenant(id="fine"), Tenant(id="Not fine")])
    for wrong in (
        lambda: store.add_many([Tenant(id="fine"), Tenant(id="org1")]),
        lambda: store.add_many([Tenant(id="fine"), Tenant(id="fine")]),
        lambda: store.add_many(keys=[key("x", "org1"), key("x", "org1")]),
        lambda: store.add_many(limits=[limit("x"), limit("x")]),
        lambda: store.add_many(limits=[limit("x"), limit("y")]),
    ):
        with pytest.raises(Conflict):
            await wrong()
    with pytest.raises(InvalidRequest, match="fine is a team of org1"):
        await store.add_many([Tenant(id="fine", parent="org1"), Tenant(id="deep", parent="fine")])
    with pytest.raises(ResourceNotFound):
        await store.tenant("fine")
    await store.add_many()


async def test_a_version_from_the_future_gets_the_current_version(store: DirectoryStore) -> None:
    await store.create_tenant(Tenant(id="acme"))
    assert await store.changes(1) == DirectoryChanges(1)
    assert await store.changes(500) == DirectoryChanges(1)


async def test_administrative_replies_are_remembered_for_a_day(store: DirectoryStore, clock: SetClock) -> None:
    assert await store.find_reply("k", b"hash") is None
    await store.store_reply("k", b"hash", 201, b"\0reply")
    await store.store_reply("k", b"hash", 500, b"later")
    assert await store.find_reply("k", b"hash") == (201, b"\0reply")
    with pytest.raises(Conflict, match="another call"):
        await store.find_reply("k", b"other")
    clock.now_s += 86400
    assert await store.find_reply("k", b"other") is None
    await store.store_reply("k", b"other", 200, b"new")
    assert await store.find_reply("k", b"other") == (200, b"new")
    for nasty in ("", "a\0b", "x" * 257, "\ud800"):
        with pytest.raises(InvalidRequest):
            await store.find_reply(nasty, b"hash")
        with pytest.raises(InvalidRequest):
            await store.store_reply(nasty, b"hash", 200, b"")
    await asyncio.gather(*(store.store_reply("raced", b"hash", 200 + number, b"") for number in range(5)))
    assert await store.find_reply("raced", b"hash") is not None
    await store.store_reply("'; DROP TABLE admin_replies; -- 🦙", b"hash", 200, b"")
    assert await store.find_reply("'; DROP TABLE admin_replies; -- 🦙", b"hash") == (200, b"")


async def test_without_its_server_every_call_says_that_the_store_is_away(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: object, clock: SetClock
) -> None:
    config = StoreConfig(folder=str(tmp_path), url=Secret(postgres_url, ""), deadline_s=DEADLINE_S)
    async with open_database(config) as database:
        store = DirectoryStore(database, clock)
        await store.create_tenant(Tenant(id="acme"))
        await store.create_key(key("k1"))
        postgres_server.kill()
        try:
            for call in (
                lambda: store.changes(0),
                lambda: store.tenant("acme"),
                lambda: store.keys(),
                lambda: store.create_tenant(Tenant(id="other")),
                lambda: store.rotate_key("k1", secret("new"), 5),
                lambda: store.add_many([Tenant(id="many")]),
                lambda: store.find_reply("k", b""),
                lambda: store.store_reply("k", b"", 200, b""),
            ):
                with pytest.raises(StoreUnavailable):
                    await call()
        finally:
            postgres_server.start()
        # What was committed is there, and what failed is not.
        changes = await store.changes(0)
        assert (changes.version, list(changes.tenants), list(changes.keys)) == (2, [Tenant(id="acme")], [key("k1")])
        await store.create_tenant(Tenant(id="other"))


async def test_a_server_that_is_killed_under_writers_loses_nothing_that_it_confirmed(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: object, clock: SetClock
) -> None:
    config = StoreConfig(folder=str(tmp_path), url=Secret(postgres_url, ""), deadline_s=DEADLINE_S)
    confirmed: set[str] = set()
    async with open_database(config) as database:
        store = DirectoryStore(database, clock)
        enough = asyncio.Event()

        async def write(writer: int) -> None:
            for number in range(10_000):
                name = f"w{writer}-{number}"
                try:
                    await store.create_tenant(Tenant(id=name))
                except StoreUnavailable:  # Anything else fails the test.
                    return
                confirmed.add(name)
                if len(confirmed) > 40:
                    enough.set()

        async with asyncio.TaskGroup() as group:
            for writer in range(4):
                group.create_task(write(writer))
            await enough.wait()
            postgres_server.kill()
        postgres_server.start()
        present = {tenant.id for tenant in (await store.changes(0)).tenants}
        assert confirmed <= present
        assert len(present - confirmed) <= 4  # A commit whose confirmation was lost may have happened.

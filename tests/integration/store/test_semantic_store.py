"""Gateways of one database certify scopes of the semantic cache together."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest
from sqlalchemy import func, select, text

from maitred.cache.config import SemanticConfig
from maitred.cache.semantic.scope import apply_outcomes
from maitred.core.errors import StoreUnavailable
from maitred.core.request import LabelledPair
from maitred.core.secret import Secret
from maitred.core.semantic_scope import CertificationRecord, LookupLabel, LookupTally, LookupTrial, ScopeRecord
from maitred.core.tenancy import Tenant
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.directory import DirectoryStore
from maitred.store.schema import (
    metadata,
    scaler_leases,
    scaling_decisions,
    scaling_demands,
    semantic_labels,
    semantic_scopes,
    semantic_verifiers,
)
from maitred.store.semantic import SemanticStore
from tests.support.clock import FakeClock
from tests.support.stores import DEADLINE_S

SETTINGS = SemanticConfig(training_labels=5)
SCOPE = '["chat","tenant","acme"]'
CERTIFYING = ScopeRecord(
    encoder="e1",
    attempt=3,
    labels=5,
    verifier="v1",
    certification=CertificationRecord(thresholds=(0.9, 0.5)),
    budget=SETTINGS.budget,
    confidence=SETTINGS.confidence,
)
DAY_S = 86_400.0


def pair(number, same=True):
    return LabelledPair(f"How do I pay bill {number}?", "How can I pay?", same, (0.5, 0.25, 0.125))


def found(*outcomes):
    return partial(apply_outcomes, outcomes=outcomes, settings=SETTINGS)


def labelled(*pairs):
    """Pairs that are compared in whatever attempt the scope is in."""

    def change(record):
        return found(*(LookupLabel(each, record.attempt) for each in pairs))(record)

    return change


def labels(*numbers):
    return labelled(*map(pair, numbers))


@asynccontextmanager
async def stores(config, count, clock=None):
    """Stores of so many gateways, each with connections of its own."""
    if not count:
        yield []
        return
    async with open_database(config) as database, stores(config, count - 1, clock) as others:
        yield [SemanticStore(database, clock or FakeClock()), *others]


@pytest.fixture
async def store(store_config):
    async with stores(store_config, 1) as (made,):
        yield made


async def rows(store, table):
    async with store._database.begin_read() as connection:
        return await connection.scalar(select(func.count()).select_from(table))


async def test_gateways_lose_none_of_their_trials(store_config):
    trial = LookupTrial(0.7, is_false=False, attempt=CERTIFYING.attempt)
    async with stores(store_config, 3) as gateways:
        await gateways[0].change(SCOPE, "e1", lambda _: (CERTIFYING, ()))

        async def observe(store):
            for _ in range(15):
                await store.change(SCOPE, "e1", found(trial, LookupTally(lookups=2, served=1)))

        await asyncio.gather(*(observe(store) for store in gateways))
        record = await gateways[0].load(SCOPE, "e1")
    assert record.certification.lookups == record.counts.audits == 45
    assert (record.counts.lookups, record.counts.served) == (90, 45)


async def test_gateways_that_find_a_scope_at_once_make_one(store_config):
    async with stores(store_config, 4) as gateways:
        await asyncio.gather(*(store.change(SCOPE, "e1", labels(i)) for i, store in enumerate(gateways)))
        record = await gateways[0].load(SCOPE, "e1")
        assert record.labels == record.counts.same == 4
        assert sorted(label.asked for label in await gateways[0].labels(SCOPE, "e1", 99)) == [
            pair(i).asked for i in range(4)
        ]


async def test_labels_are_kept_as_they_are_and_no_more_than_the_training_asks_for(store):
    assert await store.load(SCOPE, "e1") is None
    assert await store.labels(SCOPE, "e1", 9) == []
    same = LabelledPair("What is\0 a \ud800?", "🦙", False, (1.0, 0.0, -0.5))
    record = await store.change(SCOPE, "e1", labelled(same))
    assert await store.labels(SCOPE, "e1", 9) == [msgspec.structs.replace(same, asked="What is\ufffd a \ufffd?")]
    for number in range(4):
        record = await store.change(SCOPE, "e1", labels(number, number + 10))
    assert (record.labels, await rows(store, semantic_labels)) == (5, 5)
    assert await store.labels(SCOPE, "e1", 2) == [pair(11), pair(1)], "the newest"
    assert await store.load(SCOPE, "e1") == record


async def test_labels_are_listed_by_what_is_asked_for(store):
    for number, scope in enumerate((SCOPE, '["chat","public"]', '["mail","tenant","team","acme"]')):
        one, other = pair(10 * number), pair(10 * number + 1, same=False)
        await store.change(scope, "e1", labelled(one, other))

    async def listed(**chosen):
        return [label.asked.rpartition(" ")[2] for label in await store.list_labels(**chosen)]

    newest_first = ["21?", "20?", "11?", "10?", "1?", "0?"]
    assert await listed() == newest_first
    assert await listed(limit=2) == newest_first[:2]
    before = (await store.list_labels(limit=2))[-1].id
    assert await listed(before=before) == newest_first[2:]
    assert await listed(same=True) == newest_first[1::2]
    assert await listed(same=False, model="chat") == ["11?", "1?"]
    assert await listed(tenant="acme") == ["21?", "20?", "1?", "0?"]
    assert await listed(tenant="team") == ["21?", "20?"]
    assert await listed(scope=SCOPE, same=True) == ["0?"]
    assert await listed(scope=SCOPE, model="mail") == []
    label = (await store.list_labels(scope=SCOPE))[-1]
    assert (label.scope, label.cached, label.same) == (SCOPE, "How can I pay?", True)
    assert label.created_s == FakeClock().wall_s()


async def test_a_change_that_raises_changes_nothing(store):
    before = await store.change(SCOPE, "e1", labels(1))
    with pytest.raises(ZeroDivisionError):
        await store.change(SCOPE, "e1", lambda _: 1 // 0)
    assert await store.load(SCOPE, "e1") == before


async def test_only_one_gateway_sets_the_verifier(store_config):
    async with stores(store_config, 2) as (one, other):
        record = await one.change(SCOPE, "e1", labels(*range(5)))
        assert await one.set_verifier('["none","public"]', "e1", 0, "v0", b"") is None
        set_by = await asyncio.gather(
            one.set_verifier(SCOPE, "e1", record.attempt, "v1", b"one"),
            other.set_verifier(SCOPE, "e1", record.attempt, "v2", b"other"),
        )
        (winner,) = (after for after in set_by if after is not None)
        assert winner == record.with_verifier(winner.verifier) == await one.load(SCOPE, "e1")
        weights = {"v1": b"one", "v2": b"other"}
        for store in (one, other):
            assert [await store.weights(SCOPE, "e1", version) for version in weights] == [
                data if version == winner.verifier else None for version, data in weights.items()
            ]


async def test_only_one_gateway_trains_as_long_as_its_lease_lasts(store_config):
    clock = FakeClock()
    async with stores(store_config, 2, clock) as (one, other):
        record = await one.change(SCOPE, "e1", labels(*range(5)))
        claim = (SCOPE, "e1", record.attempt, 60.0)
        claims = await asyncio.gather(one.claim_training(*claim), other.claim_training(*claim))
        assert sorted(claims) == [False, True]
        assert not await one.claim_training(SCOPE, "e1", record.attempt + 1, 60.0)
        assert not await one.claim_training('["none","public"]', "e1", record.attempt, 60.0)
        clock.now_s += 59.0
        assert not await one.claim_training(*claim)
        clock.now_s += 1.0
        assert await other.claim_training(*claim), "the first one may be lost"
        record = await one.set_verifier(SCOPE, "e1", record.attempt, "v1", b"weights")
        clock.now_s += 60.0
        assert not await one.claim_training(SCOPE, "e1", record.attempt, 60.0), "it has a verifier"


async def test_labels_of_which_nothing_can_be_learnt_are_not_tried_again(store_config):
    clock = FakeClock()
    async with stores(store_config, 1, clock) as (store,):
        record = await store.change(SCOPE, "e1", labels(*range(4)))
        assert await store.claim_training(SCOPE, "e1", record.attempt, 60.0)
        await store.give_up_training(SCOPE, "e1", record.attempt + 1)
        clock.now_s += 60.0
        assert await store.claim_training(SCOPE, "e1", record.attempt, 60.0), "those were others"
        await store.give_up_training(SCOPE, "e1", record.attempt)
        clock.now_s += 1e6
        assert not await store.claim_training(SCOPE, "e1", record.attempt, 60.0)
        record = await store.change(SCOPE, "e1", labels(9))
        assert await store.claim_training(SCOPE, "e1", record.attempt, 60.0), "there is one more"
        record = await store.reset(SCOPE, "e1", keep_labels=True)
        assert await store.claim_training(SCOPE, "e1", record.attempt, 60.0)


async def test_a_verifier_of_labels_that_were_given_up_is_not_set(store):
    record = await store.change(SCOPE, "e1", labels(*range(5)))
    await store.reset(SCOPE, "e1", keep_labels=False)
    assert await store.set_verifier(SCOPE, "e1", record.attempt, "v1", b"weights") is None
    assert await rows(store, semantic_verifiers) == 0


@pytest.mark.parametrize(("keep_labels", "kept"), [(True, 5), (False, 0)])
async def test_a_reset_takes_the_verifier_and_the_labels_if_it_is_to(store, keep_labels, kept):
    assert await store.reset(SCOPE, "e1", keep_labels=keep_labels) is None
    before = await store.change(SCOPE, "e1", labels(*range(5)))
    before = await store.set_verifier(SCOPE, "e1", before.attempt, "v1", b"weights")
    record = await store.reset(SCOPE, "e1", keep_labels=keep_labels)
    assert record == await store.load(SCOPE, "e1")
    assert (record.labels, record.verifier, record.certification) == (kept, "", None)
    assert record.attempt > before.attempt
    assert await store.weights(SCOPE, "e1", "v1") is None
    assert len(await store.labels(SCOPE, "e1", 9)) == kept
    again = await store.set_verifier(SCOPE, "e1", record.attempt, "v1", b"weights")
    assert again is not None, "the same version may come back"


async def test_gateways_with_different_encoders_leave_each_other_alone(store_config):
    async with stores(store_config, 2) as (one, other):
        for number in range(5):
            first = await one.change(SCOPE, "e1", labels(number))
            second = await other.change(SCOPE, "e2", labels(number + 10))
        assert [(each.encoder, each.labels) for each in (first, second)] == [("e1", 5), ("e2", 5)]
        first = await one.set_verifier(SCOPE, "e1", first.attempt, "v1", b"one")
        second = await other.set_verifier(SCOPE, "e2", second.attempt, "v1", b"other")
        assert (await other.load(SCOPE, "e1"), await one.load(SCOPE, "e2")) == (first, second)
        assert [await one.weights(SCOPE, encoder, "v1") for encoder in ("e1", "e2")] == [b"one", b"other"]
        second = await other.reset(SCOPE, "e2", keep_labels=False)
        assert await other.labels(SCOPE, "e2", 9) == []
        assert await one.labels(SCOPE, "e1", 9) == [pair(number) for number in reversed(range(5))]
        assert [each.record for each in await one.scopes()] == [first, second]
        assert [each.record for each in await one.scopes(limit=1, after=(SCOPE, "e1"))] == [second]
        assert await one.remove(SCOPE, "e1")
        assert await one.labels(SCOPE, "e1", 9) == []
        assert await other.load(SCOPE, "e2") == second


async def test_it_is_known_which_scopes_have_changed(store_config):
    clock = FakeClock()
    async with stores(store_config, 1, clock) as (store,):
        await store.change(SCOPE, "e1", labels(1))
        await store.change(SCOPE, "e2", labels(1))
        first = clock.wall_s()
        clock.now_s += 1
        await store.change('["chat","public"]', "e1", labels(1))
        both = [SCOPE, '["chat","public"]', '["none","public"]']
        assert await store.last_changes(both, "e1") == {SCOPE: first, '["chat","public"]': clock.wall_s()}
        clock.now_s += 1
        await store.reset(SCOPE, "e1", keep_labels=True)
        assert await store.last_changes([SCOPE], "e1") == {SCOPE: clock.wall_s()}
        assert await store.last_changes([], "e1") == {}


async def test_what_was_judged_before_a_removal_does_not_come_back(store):
    before = await store.change(SCOPE, "e1", labels(1))
    late = found(*(LookupLabel(pair(number), before.attempt) for number in range(2, 5)))
    await store.remove(SCOPE, "e1")
    record = await store.change(SCOPE, "e1", late)
    assert (record.labels, await store.labels(SCOPE, "e1", 9)) == (0, [])
    record = await store.change(SCOPE, "e1", labels(*range(5)))
    await store.remove(SCOPE, "e1")
    await store.change(SCOPE, "e1", labels(1))
    assert await store.set_verifier(SCOPE, "e1", record.attempt, "v1", b"weights") is None


async def test_scopes_are_listed_and_forgotten(store):
    names = {
        '["chat","key","team","acme","k1"]': ("chat", "team", "acme"),
        '["chat","organisation","acme"]': ("chat", "acme", "acme"),
        '["chat","public"]': ("chat", "", ""),
        '["chat","tenant","other"]': ("chat", "other", "other"),
        '["mail","tenant","team","acme"]': ("mail", "team", "acme"),
    }
    for name in names:
        record = await store.change(name, "e1", labels(1))
        await store.set_verifier(name, "e1", record.attempt, "v1", b"weights")
    listed = await store.scopes()
    assert {each.scope: (each.model, each.tenant, each.organisation) for each in listed} == names
    assert listed[0].record == await store.load(listed[0].scope, "e1")
    assert listed[0].updated_s == FakeClock().wall_s()
    order = sorted(names)
    assert [each.scope for each in listed] == order
    assert [each.scope for each in await store.scopes(limit=2)] == order[:2]
    assert [each.scope for each in await store.scopes(limit=2, after=(order[1], "e1"))] == order[2:4]
    assert [each.scope for each in await store.scopes(model="mail")] == order[4:]
    assert len(await store.scopes(tenant="acme")) == 3
    assert len(await store.scopes(tenant="team", model="chat")) == 1

    assert await store.remove('["chat","tenant","other"]', "e1")
    assert not await store.remove('["chat","tenant","other"]', "e1")
    directory = DirectoryStore(store._database, FakeClock())
    await directory.create_tenant(Tenant(id="acme", name="Acme"))
    await directory.create_tenant(Tenant(id="team", name="Team", parent="acme"))
    await directory.delete_tenant("team")
    assert [each.scope for each in await store.scopes()] == ['["chat","organisation","acme"]', '["chat","public"]']
    await directory.delete_tenant("acme")
    for table in (semantic_labels, semantic_verifiers, semantic_scopes):
        assert await rows(store, table) == 1


async def test_scopes_that_nobody_asks_are_deleted_with_their_texts(store_config):
    clock = FakeClock()
    async with stores(store_config, 1, clock) as (store,):
        await store.change(SCOPE, "e1", labels(1))
        clock.now_s += 50 * DAY_S
        await store.change('["chat","public"]', "e1", labels(1))
        clock.now_s += 39 * DAY_S
        assert await store.sweep() == 0
        clock.now_s += DAY_S
        assert await store.sweep() == 1
        assert [each.scope for each in await store.scopes()] == ['["chat","public"]']
        assert await rows(store, semantic_labels) == 1


LATER = [scaling_decisions, scaling_demands, scaler_leases]
"""Tables of later versions."""


async def test_a_database_of_the_version_before_gets_the_tables(store_config):
    tables = [semantic_labels, semantic_verifiers, semantic_scopes]
    async with stores(store_config, 1) as (store,), store._database.begin() as connection:
        await connection.run_sync(partial(metadata.drop_all, tables=[*tables, *LATER]))
        await connection.execute(text("UPDATE alembic_version SET version_num = '0009'"))
        await connection.execute(text("UPDATE directory_version SET version = 7"))
    async with stores(store_config, 1) as (store,):
        await store.change(SCOPE, "e1", labels(1))
        assert await store.labels(SCOPE, "e1", 9) == [pair(1)]
        async with store._database.begin_read() as connection:
            assert await connection.scalar(text("SELECT version FROM directory_version")) == 7


async def test_what_was_learnt_for_encoders_of_before_is_deleted(store_config):
    tables = [semantic_labels, semantic_verifiers, semantic_scopes]
    async with stores(store_config, 1) as (store,), store._database.begin() as connection:
        await connection.run_sync(partial(metadata.drop_all, tables=[*tables, *LATER]))
        for statement in (
            "CREATE TABLE semantic_scopes (scope TEXT PRIMARY KEY, updated_s DOUBLE PRECISION)",
            "CREATE INDEX ix_semantic_scopes_updated_s ON semantic_scopes (updated_s)",
            "CREATE TABLE semantic_labels (scope TEXT REFERENCES semantic_scopes (scope))",
            "CREATE TABLE semantic_verifiers (scope TEXT REFERENCES semantic_scopes (scope))",
            "INSERT INTO semantic_scopes VALUES ('a scope', 1.0)",
            "INSERT INTO semantic_labels VALUES ('a scope')",
            "INSERT INTO semantic_verifiers VALUES ('a scope')",
            "UPDATE alembic_version SET version_num = '0010'",
        ):
            await connection.execute(text(statement))
    async with stores(store_config, 1) as (store,):
        assert [await rows(store, table) for table in tables] == [0, 0, 0]
        await store.change(SCOPE, "e1", labels(1))
        assert await store.labels(SCOPE, "e1", 9) == [pair(1)]


async def all_refuse(store):
    for access in (
        lambda: store.load(SCOPE, "e1"),
        lambda: store.last_changes([SCOPE], "e1"),
        lambda: store.weights(SCOPE, "e1", "v1"),
        lambda: store.labels(SCOPE, "e1", 9),
        lambda: store.change(SCOPE, "e1", labels(1)),
        lambda: store.claim_training(SCOPE, "e1", 0, 1.0),
        lambda: store.give_up_training(SCOPE, "e1", 0),
        lambda: store.set_verifier(SCOPE, "e1", 0, "v1", b""),
        lambda: store.reset(SCOPE, "e1", keep_labels=True),
        lambda: store.remove(SCOPE, "e1"),
        lambda: store.scopes(),
        lambda: store.list_labels(),
        lambda: store.sweep(),
    ):
        with pytest.raises(StoreUnavailable):
            await access()


async def test_while_a_file_is_away_nothing_is_stored(tmp_path):
    config = StoreConfig(folder=str(tmp_path / "data"), deadline_s=DEADLINE_S)
    async with stores(config, 1) as (store,):
        before = await store.change(SCOPE, "e1", labels(1))
        (tmp_path / "data" / "maitred.db").rename(tmp_path / "aside.db")
        await all_refuse(store)
        (tmp_path / "aside.db").rename(tmp_path / "data" / "maitred.db")
        assert await store.load(SCOPE, "e1") == before


async def test_while_a_server_is_away_nothing_is_stored(postgres_server, postgres_url, tmp_path):
    config = StoreConfig(folder=str(tmp_path), url=Secret(postgres_url, ""), deadline_s=DEADLINE_S)
    async with stores(config, 1) as (store,):
        before = await store.change(SCOPE, "e1", labels(1))
        postgres_server.kill()
        try:
            await all_refuse(store)
        finally:
            postgres_server.start()
        assert await store.load(SCOPE, "e1") == before

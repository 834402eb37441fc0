"""Responses that later requests go on with: stored with their usage, found by their tenant alone, deleted for good."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from msgspec.json import decode, encode
from msgspec.structs import replace
from sqlalchemy import func, select

from maitred.core.errors import InvalidRequest, StoreUnavailable
from maitred.core.stored_response import BackgroundClaim, StoredConversation, StoredItem, StoredResponse
from maitred.core.tenancy import Principal, Scope
from maitred.store.schema import response_items, responses, usage
from tests.support.clock import FakeClock
from tests.support.stores import open_responses
from tests.support.usage_events import usage_event


def caller_of(*tenants):
    return Principal(key="key", tenants=tenants, scopes=frozenset({Scope.INFERENCE}))


TEAM, SIBLING = caller_of("team", "org"), caller_of("sibling", "org")
ORGANISATION, STRANGER = caller_of("org"), caller_of("stranger")


def response(number, previous=None, **changes):
    fields = {
        "id": f"resp_{number}",
        "tenant": "team",
        "organisation": "org",
        "previous": None if previous is None else f"resp_{previous}",
        "created_s": 0.0,
        "expires_s": 2_000_000.0,
        "input": b"[]",
        "output": b"[]",
        "resource": b"{}",
    }
    return StoredResponse(**fields | changes)


async def test_a_response_is_there_when_it_was_saved_with_its_usage(store_config):
    async with open_responses(store_config, FakeClock()) as (store, ledger, database):
        ledger.record(usage_event(1), "resp_1")
        await store.save(response(1, input=b'["\\u0000"]'))
        async with database.begin_read() as connection:
            assert await connection.scalar(select(func.count()).select_from(usage)) == 1
        assert await store.find(TEAM, "resp_1") == response(1, input=b'["\\u0000"]')
        assert ledger.backlog == 0


async def test_a_response_is_found_by_an_item_that_its_server_has_named(store_config):
    async with open_responses(store_config, FakeClock()) as (store, _, database):
        for number in range(2):
            await store.save(response(number, item_ids=("msg_a", f"rs_{number}")))
        assert (await store.find_by_item(TEAM, "rs_0")).id == "resp_0"
        assert (await store.find_by_item(ORGANISATION, "msg_a")).id == "resp_1"
        assert await store.find_by_item(SIBLING, "rs_0") is None
        assert await store.delete(TEAM, "resp_1")
        assert (await store.find_by_item(TEAM, "msg_a")).id == "resp_0"
        async with database.begin_read() as connection:
            assert await connection.scalar(select(func.count()).select_from(response_items)) == 2


async def test_many_are_saved_at_once_and_behind_a_long_backlog(store_config):
    async with open_responses(store_config, FakeClock()) as (store, ledger, database):
        for number in range(1200):
            ledger.record(usage_event(number), f"resp_{number}" if number >= 1150 else "")
        await asyncio.gather(*(store.save(response(number)) for number in range(1150, 1200)))
        async with database.begin_read() as connection:
            assert await connection.scalar(select(func.count()).select_from(responses)) == 50
            last = usage.c.id >= usage_event(1150).id
            assert await connection.scalar(select(func.count()).select_from(usage).where(last)) == 50
        assert ledger.backlog <= 650


async def test_usage_is_billed_with_its_response_or_not_at_all(store_config):
    async def billed(database):
        async with database.begin_read() as connection:
            rows = await connection.execute(select(usage.c.id, usage.c.outcome, usage.c.cost_nusd).order_by(usage.c.id))
            return [tuple(row) for row in rows]

    clock = FakeClock()
    stored, lost, given_up, plain = (usage_event(number) for number in range(4))
    async with open_responses(store_config, clock) as (store, ledger, database):
        for event, name in ((stored, "resp_0"), (lost, "resp_1"), (given_up, "resp_2"), (plain, "")):
            ledger.record(event, name)
        await ledger.flush()
        as_recorded = [(event.id, event.outcome, event.cost_nusd) for event in (stored, given_up, plain)]
        assert await billed(database) == as_recorded[2:]
        await store.save(response(0))
        await store.give_up("resp_2")
        await store.give_up("resp_0")  # it is stored, so nothing changes
        assert await billed(database) == [as_recorded[0], as_recorded[2]]
        ledger._backlog.close()  # as if the gateway had been killed
        async with open_responses(store_config, clock) as (_, next_ledger, next_database):
            assert await next_ledger.replay() == 4
            assert await billed(next_database) == [as_recorded[0], (lost.id, "failed", 0), *as_recorded[1:]]
            assert await next_ledger.spent([*lost.charges]) == {
                counter: sum(event.charges.get(counter, 0) for event in (stored, given_up, plain))
                for counter in lost.charges
            }


async def test_a_conversation_is_read_in_its_order_and_says_what_is_missing(store_config):
    async with open_responses(store_config, FakeClock()) as (store, _, _):
        for number in range(30):
            await store.save(response(number, None if number == 0 else number - 1))
        await store.save(response(100, 5))
        turns = await store.conversation(TEAM, "resp_29")
        assert [turn.id for turn in turns] == [f"resp_{number}" for number in range(30)]
        assert turns[0].previous is None
        assert [turn.id for turn in await store.conversation(TEAM, "resp_100")][-2:] == ["resp_5", "resp_100"]
        assert await store.delete(TEAM, "resp_7")
        turns = await store.conversation(TEAM, "resp_29")
        assert (turns[0].id, turns[0].previous) == ("resp_8", "resp_7")
        assert await store.conversation(TEAM, "resp_unknown") == []


@pytest.mark.parametrize(("caller", "sees"), [(TEAM, True), (ORGANISATION, True), (SIBLING, False), (STRANGER, False)])
async def test_a_response_is_seen_by_its_tenant_and_its_organisation(store_config, caller, sees):
    async with open_responses(store_config, FakeClock()) as (store, _, _):
        await store.save(response(1))
        assert (await store.find(caller, "resp_1") is not None) == sees
        assert (await store.conversation(caller, "resp_1") != []) == sees
        assert await store.delete(caller, "resp_1") == sees
        assert (await store.find(TEAM, "resp_1") is None) == sees


async def test_a_conversation_of_two_tenants_is_not_read_beyond_the_callers(store_config):
    async with open_responses(store_config, FakeClock()) as (store, _, _):
        await store.save(response(1, tenant="sibling"))
        await store.save(response(2, 1))
        assert [turn.id for turn in await store.conversation(TEAM, "resp_2")] == ["resp_2"]
        assert [turn.id for turn in await store.conversation(ORGANISATION, "resp_2")] == ["resp_1", "resp_2"]


async def test_a_response_ends_with_its_time(store_config):
    clock = FakeClock()
    async with open_responses(store_config, clock, ttl_s=60.0) as (store, _, database):
        created_s, expires_s = store.lifetime()
        assert expires_s - created_s == 60.0
        await store.save(response(1, created_s=created_s, expires_s=expires_s))
        await store.save(response(2, 1, expires_s=expires_s + 100.0))
        clock.now_s += 60.0
        assert await store.find(TEAM, "resp_1") is None
        assert [turn.id for turn in await store.conversation(TEAM, "resp_2")] == ["resp_2"]
        assert await store.sweep() == 1
        async with database.begin_read() as connection:
            assert (await connection.scalars(select(responses.c.id))).all() == ["resp_2"]


async def test_a_second_gateway_finds_it_at_once(store_config):
    async with (
        open_responses(store_config, FakeClock()) as (first, _, _),
        open_responses(store_config, FakeClock(), name="other") as (second, _, _),
    ):
        for number in range(10):
            await (first, second)[number % 2].save(response(number, None if number == 0 else number - 1))
            turns = await (second, first)[number % 2].conversation(TEAM, f"resp_{number}")
            assert len(turns) == number + 1


async def test_whoever_waits_is_told_that_the_database_is_away(store_config, monkeypatch):
    async with open_responses(store_config, FakeClock()) as (store, ledger, _):
        write = ledger._writer.write

        async def fail(*_):
            raise StoreUnavailable("It is away.")

        monkeypatch.setattr(ledger._writer, "write", fail)
        ledger.record(usage_event(1))
        failed = await asyncio.gather(*(store.save(response(number)) for number in range(3)), return_exceptions=True)
        assert [type(error) for error in failed] == [StoreUnavailable] * 3
        monkeypatch.setattr(ledger._writer, "write", write)
        await store.save(response(9))
        assert await store.find(TEAM, "resp_9") is not None
        assert await store.find(TEAM, "resp_0") is None
        assert ledger.backlog == 0


async def test_a_response_that_was_not_stored_is_not_stored_later(store_config, monkeypatch):
    """Also where the ledger is so long that its beginning is written first: the client was told."""
    async with open_responses(store_config, FakeClock()) as (store, ledger, _):
        write = ledger._writer.write

        async def fail(*_):
            raise StoreUnavailable("It is away.")

        monkeypatch.setattr(ledger._writer, "write", fail)
        for number in range(600):
            ledger.record(usage_event(number))
        with pytest.raises(StoreUnavailable):
            await store.save(response(1))
        monkeypatch.setattr(ledger._writer, "write", write)
        await store.save(response(2))
        assert await store.find(TEAM, "resp_1") is None
        assert await store.find(TEAM, "resp_2") is not None


@asynccontextmanager
async def two_gateways(store_config, clock):
    async with (
        open_responses(store_config, clock, name="one", has_others=True) as (first, ledger, _),
        open_responses(store_config, clock, name="two", has_others=True) as (second, _, _),
    ):
        yield first, ledger, second


async def test_a_response_in_the_background_is_seen_everywhere_and_ended_by_its_owner(store_config):
    async with two_gateways(store_config, FakeClock()) as (first, ledger, second):
        await second.conversations.create(conversation(1), [])
        row = response(1, conversation="conv_1", resource=b'{"status": "queued"}')
        await first.claims.begin(row)
        assert await second.find(TEAM, "resp_1") == replace(row, owner=first.claims.owner)
        assert await second.find(STRANGER, "resp_1") is None
        await second.claims.update("resp_1", b"{}")  # it is not the other's
        await first.claims.update("resp_1", b'{"status": "in_progress"}')
        assert (await second.find(TEAM, "resp_1")).resource == b'{"status": "in_progress"}'
        await second.claims.cancel("resp_1")
        claims = await first.claims.read(["resp_1", "resp_unknown"])
        assert claims == {"resp_1": BackgroundClaim(first.claims.owner, cancelled=True)}
        ledger.record(usage_event(1))
        end = replace(row, owner=first.claims.owner, output=b'[{"id": "o1"}]', resource=b"{}", last_event=7)
        for _ in range(2):
            await first.save(end)
        assert ledger.backlog == 0
        assert await second.find(TEAM, "resp_1") == replace(end, owner=None)
        assert [item.id for item in await second.conversations.items("conv_1")] == ["o1"], "once"
        await first.claims.begin(response(2))
        assert await second.delete(TEAM, "resp_2")
        await first.save(response(2, owner=first.claims.owner))
        assert await second.find(TEAM, "resp_2") is None


async def test_what_a_gateway_leaves_behind_is_ended_by_another(store_config):
    clock = FakeClock()
    async with two_gateways(store_config, clock) as (first, _, second):
        resource = encode({"status": "in_progress", "error": None})
        for number in (1, 2, 3):
            await first.claims.begin(response(number, resource=resource))
        await second.claims.cancel("resp_3")
        clock.now_s += 20.0
        await first.claims.renew(["resp_2"])
        assert await second.claims.end_lost() == 0
        clock.now_s += 20.0
        assert await second.claims.end_lost() == 2
        states = [decode((await second.find(TEAM, f"resp_{number}")).resource) for number in (1, 2, 3)]
        assert [state["status"] for state in states] == ["failed", "in_progress", "cancelled"]
        assert states[0]["error"]["code"] == "server_error"
        # The first word counts, should its owner be there still.
        await first.save(response(1, owner=first.claims.owner, resource=b'{"status": "completed"}'))
        assert decode((await second.find(TEAM, "resp_1")).resource) == states[0]
        await first.claims.release()
        assert decode((await second.find(TEAM, "resp_2")).resource)["status"] == "failed"


async def test_a_gateway_without_others_ends_at_its_start_what_the_one_before_ran(store_config):
    async with open_responses(store_config, FakeClock()) as (store, _, _):
        await store.claims.begin(response(1))
        await store.claims.run()
        assert (await store.find(TEAM, "resp_1")).owner == store.claims.owner
    async with open_responses(store_config, FakeClock(), name="next") as (store, _, _):
        await store.claims.run()
        assert decode((await store.find(TEAM, "resp_1")).resource)["status"] == "failed"


def conversation(number, **changes):
    fields = {
        "id": f"conv_{number}",
        "tenant": "team",
        "organisation": "org",
        "created_s": 0.0,
        "expires_s": 2_000_000.0,
    }
    return StoredConversation(metadata={}, **fields | changes)


def items(*ids):
    return [StoredItem(item_id, encode({"id": item_id})) for item_id in ids]


async def test_a_response_adds_its_items_to_its_conversation(store_config):
    async with open_responses(store_config, FakeClock()) as (store, _, _):
        conversations = store.conversations
        await conversations.create(conversation(1), items("a"))
        said = [
            response(
                number,
                conversation="conv_1",
                input=encode([{"id": f"i{number}"}]),
                output=encode([{"id": f"o{number}"}]),
            )
            for number in range(20)
        ]
        await asyncio.gather(*map(store.save, said), conversations.add(TEAM, "conv_1", items("b", "c")))
        found = [item.id for item in await conversations.items("conv_1")]
        assert found[0] == "a"
        assert sorted(found) == sorted(["a", "b", "c", *(f"{kind}{number}" for number in range(20) for kind in "io")])
        for number in range(20):
            assert found.index(f"o{number}") == found.index(f"i{number}") + 1, "what belongs together stays together"
        await store.save(response(100, conversation="conv_gone"))
        assert await store.find(TEAM, "resp_100") is not None


async def test_two_gateways_add_to_one_conversation(store_config):
    async with (
        open_responses(store_config, FakeClock()) as (first, _, _),
        open_responses(store_config, FakeClock(), name="other") as (second, _, _),
    ):
        await first.conversations.create(conversation(1), [])
        await asyncio.gather(
            *(
                store.conversations.add(TEAM, "conv_1", items(f"{number}"))
                for number in range(20)
                for store in (first, second)
            )
        )
        found = [item.id for item in await second.conversations.items("conv_1")]
        assert sorted(found) == sorted([f"{number}" for number in range(20)] * 2)


@pytest.mark.parametrize(("caller", "sees"), [(TEAM, True), (ORGANISATION, True), (SIBLING, False), (STRANGER, False)])
async def test_a_conversation_is_seen_by_its_tenant_and_its_organisation(store_config, caller, sees):
    async with open_responses(store_config, FakeClock()) as (store, _, _):
        conversations = store.conversations
        await conversations.create(conversation(1), items("a"))
        assert (await conversations.find(caller, "conv_1") is not None) == sees
        assert await conversations.set_metadata(caller, "conv_1", {"a": "b"}) == sees
        assert await conversations.add(caller, "conv_1", items("b")) == sees
        assert len(await conversations.items("conv_1")) == 1 + sees
        assert await conversations.delete(caller, "conv_1") == sees
        assert len(await conversations.items("conv_1")) == (0 if sees else 1)


async def test_a_conversation_ends_after_its_last_use(store_config):
    clock = FakeClock()
    async with open_responses(store_config, clock, ttl_s=60.0) as (store, _, _):
        conversations = store.conversations
        for number in (1, 2):
            created_s, expires_s = conversations.lifetime()
            await conversations.create(conversation(number, created_s=created_s, expires_s=expires_s), items("a"))
        clock.now_s += 50.0
        assert await conversations.add(TEAM, "conv_1", items("b"))
        clock.now_s += 50.0
        assert await conversations.find(TEAM, "conv_1") is not None
        assert await conversations.find(TEAM, "conv_2") is None
        assert not await conversations.add(TEAM, "conv_2", items("b"))
        assert await conversations.sweep() == 1
        assert await conversations.items("conv_2") == []


async def test_a_conversation_that_is_too_large_is_not_read(store_config):
    async with open_responses(store_config, FakeClock()) as (store, _, _):
        for number in range(3):
            await store.save(response(number, None if number == 0 else number - 1, input=b"[%b]" % (b" " * 98)))
        await store.conversations.create(conversation(1), items("a", "b"))
        assert len(await store.conversation(TEAM, "resp_2", max_bytes=306)) == 3
        with pytest.raises(InvalidRequest, match="306 bytes"):
            await store.conversation(TEAM, "resp_2", max_bytes=305)
        with pytest.raises(InvalidRequest, match="reads at most 10"):
            await store.conversations.items("conv_1", max_bytes=10)

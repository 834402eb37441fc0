"""Batches of usage on real databases: whatever part of one is there already, the rest is added once."""

import pytest
from sqlalchemy import func, select

from maitred.core.usage import UsageEvent
from maitred.store.batch import BatchWriter
from maitred.store.database import open_database
from maitred.store.schema import spend, usage
from tests.support.usage_events import usage_event

ACME = "spend:tenant:acme"


@pytest.mark.parametrize("known", [0, 1, 70, 130])
async def test_what_is_new_is_added(store_config, known):
    events = [usage_event(number) for number in range(130)]
    async with open_database(store_config) as database:
        batches = BatchWriter(database)
        await batches.write(events[:known])
        await batches.write(events[::-1])
        async with database.begin_read() as connection:
            rows = (await connection.execute(select(usage).order_by(usage.c.id))).mappings().all()
            charged = await connection.scalar(select(spend.c.charged_nusd).where(spend.c.counter == ACME))
    assert [UsageEvent(**row) for row in rows] == events
    assert charged == sum(event.charges[ACME] for event in events)


async def test_odd_text_is_written_and_keeps_nothing_out(store_config):
    odd = usage_event(1, request_id="a\0b", model="\ud800", key="né")
    async with open_database(store_config) as database:
        await BatchWriter(database).write([odd, usage_event(2)])
        async with database.begin_read() as connection:
            assert await connection.scalar(select(func.count()).select_from(usage)) == 2
            row = (await connection.execute(select(usage).where(usage.c.id == odd.id))).mappings().one()
    assert (row["request_id"], row["model"], row["key"]) == ("a\ufffdb", "\ufffd", "né")

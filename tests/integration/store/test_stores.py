"""All stores of a gateway, opened as it opens them."""

import os

import pytest

from maitred.app.assembly.stores import open_stores, restore_rates
from maitred.config.loader import load
from maitred.core.clock import SystemClock
from maitred.core.counters import CounterKind, LimitClaim
from maitred.core.limits import Limit, LimitKind
from tests.support.usage_events import usage_event

COUNTER = "requests_per_minute|*|*"
CLAIM = LimitClaim(COUNTER, CounterKind.BUCKET, 60, 0, refill_per_s=1.0)


def config(folder, **settings):
    return load(None, {}, {"store.folder": str(folder), **settings}).config


@pytest.mark.parametrize("durable", [True, False])
async def test_a_durable_journal_syncs_every_line(tmp_path, monkeypatch, durable):
    synced = []
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (synced.append(file), sync(file)))
    settings = config(tmp_path, **{"store.durable_journal": str(durable).lower()})
    async with open_stores(settings, SystemClock()) as stores:
        stores.ledger.begin(usage_event(1, charges={}))
        stores.ledger.record(usage_event(1))
    assert len(synced) == (2 if durable else 0)


async def test_rates_begin_where_the_last_gateway_left_them(tmp_path):
    clock = SystemClock()
    async with open_stores(config(tmp_path), clock) as stores:
        await stores.directory.put_limit(Limit(id="rate", subject="*", kind=LimitKind.REQUESTS_PER_MINUTE, value=60))
        stores.ledger.record(usage_event(1, time_s=clock.wall_s() - 700, taken={COUNTER: 60}))
        stores.ledger.record(usage_event(2, time_s=clock.wall_s() - 20, taken={COUNTER: 50}))
    async with open_stores(config(tmp_path), clock) as stores:
        await restore_rates(stores, clock)
        (reading,) = await stores.counters.read([CLAIM])
        assert 28 <= reading.remaining <= 35  # thirty, less what is rounded up, and more with each second since


async def test_without_rates_nothing_is_recalled(tmp_path):
    clock = SystemClock()
    async with open_stores(config(tmp_path), clock) as stores:
        stores.ledger.record(usage_event(1, time_s=clock.wall_s(), taken={COUNTER: 50}))
        await restore_rates(stores, clock)
        (reading,) = await stores.counters.read([CLAIM])
        assert reading.remaining == 60

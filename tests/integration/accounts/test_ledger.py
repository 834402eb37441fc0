"""The ledger on real databases: exactly once, whatever is killed, repeated or away."""

import asyncio
import math
import random
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import insert, select

from maitred.core.clock import SystemClock
from maitred.core.context import Outcome
from maitred.core.errors import Bug, StoreUnavailable
from maitred.core.request import Usage
from maitred.core.secret import Secret
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.journal import Journal
from maitred.store.ledger import UsageLedger
from maitred.store.orphan_journal import SurvivingWork, journal_folders
from maitred.store.recent_usage import RecentRateUsage, read_rate_usage
from maitred.store.schema import spend, usage
from tests.support.stores import DEADLINE_S, deadline
from tests.support.suite import given_code
from tests.support.usage_events import SetClock, usage_event


async def until(condition, within_s=300.0):
    """Waits for something that another task or process brings about."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)


ACME = "spend:tenant:acme"


@asynccontextmanager
async def opened(config, folder, **options):
    """A database and a ledger on it that nobody runs."""
    async with open_database(config) as database:
        ledger = UsageLedger(database, Journal(folder, segment_bytes=4_000), SetClock(), **options)
        try:
            yield database, ledger
        finally:
            await ledger.close()


async def stored(database):
    """Everything in the ledger; its charges must be the ones in `spend`."""
    async with database.begin_read() as connection:
        rows = (await connection.execute(select(usage).order_by(usage.c.id))).mappings().all()
        sums = dict((await connection.execute(select(spend.c.counter, spend.c.charged_nusd))).all())
    expected: dict[str, int] = {}
    for row in rows:
        for counter, amount in row["charges"].items():
            expected[counter] = expected.get(counter, 0) + amount
    assert sums == expected
    return rows


def ids(rows):
    return [row["id"] for row in rows]


async def test_events_arrive_whole(store_config, tmp_path):
    event = usage_event(1, replica="r", route="/v1/completions", price="1/1/1", ttft_s=0.5, outcome=Outcome.CANCELLED)
    async with opened(store_config, tmp_path / "journal") as (database, ledger):
        ledger.begin(usage_event(1, charges={}))
        ledger.record(event)
        assert (ledger.backlog, await stored(database)) == (1, [])
        await ledger.flush()
        (row,) = await stored(database)
        assert ledger.backlog == 0
    assert {name: getattr(event, name) for name in event.__struct_fields__} == dict(row)
    assert list((tmp_path / "journal").iterdir()) == []


async def test_the_same_id_counts_once(store_config, tmp_path):
    async with opened(store_config, tmp_path / "journal") as (database, ledger):
        for event in (usage_event(1), usage_event(1), usage_event(2)):
            ledger.record(event)
        await ledger.flush()
        ledger.record(usage_event(1, cost_nusd=999, charges={ACME: 999}))
        await ledger.flush()
        rows = await stored(database)
    assert [(row["id"], row["cost_nusd"]) for row in rows] == [("u-000001", 1_001), ("u-000002", 1_002)]


@pytest.mark.parametrize(
    "wrong", [{"prompt_tokens": 2**63}, {"output_tokens": -1}, {"cost_nusd": 2**60}, {"charges": {ACME: 2**62}}]
)
async def test_an_amount_that_no_database_takes_is_not_taken(store_config, tmp_path, wrong):
    async with opened(store_config, tmp_path / "journal") as (database, ledger):
        with pytest.raises(Bug, match="req-1"):
            ledger.record(usage_event(1, **wrong))
        most = 2**53
        ledger.record(usage_event(2, prompt_tokens=most, cost_nusd=most, charges={ACME: most}))
        await ledger.flush()
        assert ids(await stored(database)) == ["u-000002"]


async def test_spent_counts_what_waits(store_config, tmp_path):
    async with opened(store_config, tmp_path / "journal") as (_, ledger):
        ledger.record(usage_event(1, charges={ACME: 100}))
        await ledger.flush()
        ledger.record(usage_event(2, charges={ACME: 20, "other\0": 3}))
        assert await ledger.spent([ACME, "other\0", "none"]) == {ACME: 120, "other\0": 3, "none": 0}
        await ledger.flush()
        assert await ledger.spent([ACME, "other\0"]) == {ACME: 120, "other\0": 3}
        assert await ledger.spent([]) == {}


async def test_spent_is_exact_at_every_moment_of_a_write(store_config, tmp_path):
    async with opened(store_config, tmp_path / "journal") as (_, ledger):
        for number in range(2_000):
            ledger.record(usage_event(number, charges={ACME: 1}))
        writing = asyncio.create_task(ledger.flush())
        while not writing.done():
            assert await ledger.spent([ACME]) == {ACME: 2_000}
        await writing


async def test_the_ledger_sums_what_was_taken_from_rates_by_second(store_config, tmp_path):
    start_s = 1_000_000.0
    async with opened(store_config, tmp_path / "journal") as (database, ledger):
        assert await ledger.rate_usage_since(start_s) == RecentRateUsage(-math.inf, {})
        for number, (after_s, taken) in enumerate(
            [
                (-0.5, {"a": 1}),
                (7.2, {"a": 2, "b\0|": 3}),
                (0.0, {"a": 10}),
                (6.1, {"a": 5}),
                (6.0, {}),
                (6.0, {"a": 4}),
            ]
        ):
            ledger.record(usage_event(number, time_s=start_s + after_s, taken=taken))
            if number == 2:
                await ledger.flush()
        counters = {
            "a": [(start_s, 10), (start_s + 6, 4), (start_s + 7, 5), (start_s + 8, 2)],
            "b\0|": [(start_s + 8, 3)],
        }
        assert await ledger.rate_usage_since(start_s) == RecentRateUsage(start_s, counters)
        assert ledger.backlog == 0
        ever = await ledger.rate_usage_since(0)
        assert (ever.since_s, ever.counters["a"][0]) == (-math.inf, (start_s, 11))
        assert await read_rate_usage(database, start_s, max_lines=2) == RecentRateUsage(
            start_s + 6.1, {"a": [(start_s + 7, 5), (start_s + 8, 2)], "b\0|": [(start_s + 8, 3)]}
        )


async def test_what_orphans_had_reserved_was_taken(store_config, tmp_path):
    begun = [usage_event(1, taken={"a": 30}), usage_event(2, taken={"a": 40})]
    orphan(tmp_path / "journal", [usage_event(1, time_s=50.0, taken={"a": 3})], begun)
    async with opened(store_config, tmp_path / "journal") as (_, ledger):
        await ledger.replay()
        taken = await ledger.rate_usage_since(0)
    assert sum(amount for _, amount in taken.counters["a"]) == 43


async def test_ten_thousand_lines_are_summed_into_a_few_rows(store_config, tmp_path):
    counters = dict.fromkeys(["requests|key", "tokens|key", "requests|team", "tokens|team"], 1)
    async with opened(store_config, tmp_path / "journal") as (database, ledger):
        row = {**msgspec.structs.asdict(usage_event(0, taken=counters)), "outcome": "finished"}
        rows = [row | {"id": f"u{number:06d}", "time_s": number / 100} for number in range(10_000)]
        for start in range(0, len(rows), 5_000):
            async with database.begin() as connection:
                await connection.execute(insert(usage), rows[start : start + 5_000])
        taken = await ledger.rate_usage_since(0.0)
    sums = {counter: sum(amount for _, amount in pairs) for counter, pairs in taken.counters.items()}
    assert sums == dict.fromkeys(counters, 10_000)
    assert max(map(len, taken.counters.values())) <= 101


async def test_totals_are_of_what_was_recorded(store_config, tmp_path):
    async with opened(store_config, tmp_path / "journal") as (_, ledger):
        for model in ("a", "a", "b"):
            ledger.record(usage_event(5, model=model))
        assert ledger.token_totals() == {"a": Usage(210, 10, 20), "b": Usage(105, 5, 10)}
        assert ledger.costs_nusd() == {"a": 2 * usage_event(5).cost_nusd, "b": usage_event(5).cost_nusd}


async def test_the_age_of_the_backlog(store_config, tmp_path):
    async with open_database(store_config) as database:
        clock = SetClock()
        ledger = UsageLedger(database, Journal(tmp_path / "journal"), clock)
        assert ledger.backlog_age_s == 0
        ledger.record(usage_event(1, time_s=clock.now_s))
        clock.now_s += 12
        assert ledger.backlog_age_s == 12
        await ledger.close()
        assert ledger.backlog_age_s == 0


async def test_little_memory_is_enough(store_config, tmp_path):
    async with opened(store_config, tmp_path / "journal", max_events=3) as (database, ledger):
        for number in range(1_234):
            ledger.record(usage_event(number))
        assert ledger.backlog == 1_234
        await ledger.flush()
        assert len(await stored(database)) == 1_234
        ledger.record(usage_event(5_000))
        await ledger.flush()
        assert len(await stored(database)) == 1_235


def orphan(folder, events, begun=()):
    """The journal of a process that has died."""
    journal = Journal(folder, segment_bytes=4_000)
    for event in begun:
        journal.begin(event)
    for event in events:
        journal.record(event)
    journal.close()


async def test_orphans_are_written_once(store_config, tmp_path):
    folder, events = tmp_path / "journal", [usage_event(number) for number in range(700)]
    orphan(folder, events[:400], begun=[usage_event(900)])
    orphan(folder, events[300:])  # some of them for the second time
    async with opened(store_config, folder) as (database, ledger):
        assert await ledger.replay() == 801
        rows = await stored(database)
        assert ids(rows) == [*(event.id for event in events), "u-000900"]
        assert (rows[-1]["outcome"], rows[-1]["cost_nusd"]) == ("failed", 0)
        orphan(folder, events)
        await ledger.replay()
        assert await stored(database) == rows
        assert await ledger.replay() == 0
    assert list(folder.iterdir()) == []


async def test_what_outlives_its_process_is_carried_over_and_recorded_once(store_config, tmp_path):
    folder, runs, ended = tmp_path / "journal", usage_event(900), usage_event(901)
    orphan(folder, [ended], begun=[runs, usage_event(902)])
    async with opened(store_config, folder) as (database, ledger):
        assert await ledger.replay(surviving=SurvivingWork({runs.id, ended.id})) == 2
        assert ledger.surviving_ids == {runs.id}
        assert ids(await stored(database)) == [ended.id, "u-000902"]
        await ledger.close()  # as if it died, too: what it has carried over is in its own journal
    async with opened(store_config, folder) as (database, ledger):
        assert await ledger.replay(surviving=SurvivingWork({runs.id})) == 0
        ledger.record(runs)
        await ledger.flush()
        rows = await stored(database)
        assert [row["outcome"] for row in rows if row["id"] == runs.id] == ["finished"]
    assert list(folder.iterdir()) == []


async def test_what_was_granted_and_never_heard_of_is_given_back_and_is_no_line(store_config, tmp_path):
    folder = tmp_path / "journal"
    runs, unheard, ended, dead = (usage_event(number) for number in range(900, 904))
    orphan(folder, [ended], begun=[runs, unheard, dead])
    (orphaned,) = [path.name for path in folder.iterdir()]
    settled, gateways, released = {}, set(), []

    async def settle(lease, amounts, gateway):
        settled[lease] = dict(amounts)
        gateways.add(gateway)

    async def release(gateway, surviving):
        released.append((gateway, len(settled), surviving))

    # A request may have been granted something twice: the first it has not heard of, and with the second it runs.
    asking = {event.request_id for event in (runs, unheard, ended)}
    async with opened(store_config, folder) as (database, ledger):
        assert await ledger.replay(settle, SurvivingWork({runs.id}, asking), release_gateway=release) == 2
        assert gateways == {orphaned}
        assert released == [(orphaned, 3, [runs.id])], "what it held otherwise is released last"
        assert ledger.surviving_ids == {runs.id}
        assert ids(await stored(database)) == [ended.id, dead.id]
        assert settled.keys() == {unheard.id, ended.id, dead.id}
        assert settled[unheard.id] == {}
        ledger.record(runs)
    assert list(folder.iterdir()) == []


async def test_a_death_between_commit_and_removal_changes_nothing(store_config, tmp_path, monkeypatch):
    folder = tmp_path / "journal"
    orphan(folder, [usage_event(number) for number in range(10)])
    async with opened(store_config, folder) as (database, ledger):
        with monkeypatch.context() as patched:

            def die(_):
                raise KeyboardInterrupt

            patched.setattr("maitred.store.orphan_journal.OrphanJournal.remove", die)
            with pytest.raises(KeyboardInterrupt):
                await ledger.replay()
        rows = await stored(database)
        assert len(rows) == 10
        assert await ledger.replay() == 10
        assert await stored(database) == rows


async def test_two_writers_of_the_same_events(store_config, tmp_path):
    events = [usage_event(number) for number in range(1_000)]
    backwards = events[::-1]
    async with (
        opened(store_config, tmp_path / "one") as (database, one),
        opened(store_config, tmp_path / "two") as (_, two),
    ):
        orphan(tmp_path / "one", events)
        orphan(tmp_path / "two", backwards)
        for event in events:
            one.record(event)
            two.record(event)
        await asyncio.gather(one.replay(), two.replay(), one.flush(), two.flush())
        assert ids(await stored(database)) == [event.id for event in events]


async def test_cancelled_at_any_moment_every_event_counts_once(store_config, tmp_path):
    chance = random.Random(5)
    async with opened(store_config, tmp_path / "journal", max_events=700) as (database, ledger):
        for life in range(20):
            for number in range(life * 300, life * 300 + 300):
                ledger.record(usage_event(number))
            writing = asyncio.create_task(ledger.flush())
            await asyncio.sleep(chance.uniform(0, 0.03))
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        expected = sum(1_000 + number for number in range(6_000))
        assert await ledger.spent([ACME]) == {ACME: expected}
        await ledger.flush()
        assert len(await stored(database)) == 6_000
        assert await ledger.spent([ACME]) == {ACME: expected}


async def test_run_writes_by_itself_and_close_writes_the_rest(store_config, tmp_path):
    async with open_database(store_config) as database:
        clock = SystemClock()
        ledger = UsageLedger(database, Journal(tmp_path / "journal"), clock)
        task = asyncio.create_task(ledger.run())
        for number in range(1_000):
            ledger.record(usage_event(number))
        await until(lambda: not ledger.backlog)
        assert len(await stored(database)) == 1_000
        ledger.record(usage_event(1_000))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await ledger.close()
        assert len(await stored(database)) == 1_001


async def test_an_adopter_that_lives_takes_orphans_too(store_config, tmp_path):
    async with open_database(store_config) as database:
        clock = SetClock()
        ledger = UsageLedger(database, Journal(tmp_path / "journal"), clock)
        task = asyncio.create_task(ledger.run())
        await asyncio.sleep(0)
        alive = journal_folders(tmp_path / "journal")
        orphan(tmp_path / "journal", [usage_event(1)])
        clock.now_s += 60
        await until(lambda: journal_folders(tmp_path / "journal") == alive)
        assert len(await stored(database)) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await ledger.close()


async def test_usage_waits_for_a_database_that_is_away(postgres_server, postgres_url, tmp_path, caplog):
    config = StoreConfig(folder=str(tmp_path), url=Secret(postgres_url, "{env: TEST}"), deadline_s=DEADLINE_S)
    async with open_database(config) as database:
        clock = SystemClock()
        ledger = UsageLedger(database, Journal(tmp_path / "journal"), clock, max_events=50)
        task = asyncio.create_task(ledger.run())
        ledger.record(usage_event(0))
        await until(lambda: not ledger.backlog)
        postgres_server.kill()
        try:
            for number in range(1, 2_000):
                ledger.record(usage_event(number))
            await until(lambda: "cannot be written to the database" in caplog.text)
            assert ledger.backlog == 1_999
            assert ledger.backlog_age_s > 0
            with pytest.raises(StoreUnavailable):
                await ledger.spent([ACME])
        finally:
            postgres_server.start()
        await until(lambda: not ledger.backlog)
        assert len(await stored(database)) == 2_000
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await ledger.close()


async def test_what_close_cannot_write_the_next_start_does(postgres_server, postgres_url, tmp_path):
    config = StoreConfig(folder=str(tmp_path), url=Secret(postgres_url, "{env: TEST}"), deadline_s=DEADLINE_S)
    folder = tmp_path / "journal"
    async with open_database(config) as database:
        ledger = UsageLedger(database, Journal(folder), SetClock())
        ledger.record(usage_event(1))
        with postgres_server.paused(), deadline(database, 2.0):
            async with asyncio.timeout(300):
                await ledger.close(deadline_s=0.3)
    async with opened(config, folder) as (database, ledger):
        await ledger.replay()
        assert ids(await stored(database)) == ["u-000001"]


WRITING = """
import asyncio, sys
from pathlib import Path
from maitred.core.clock import SystemClock
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.journal import Journal
from maitred.store.ledger import UsageLedger
from tests.support.usage_events import usage_event

async def main():
    clock, first = SystemClock(), int(sys.argv[3])
    async with open_database(StoreConfig(folder=sys.argv[1], deadline_s=300.0)) as database:
        journal = Journal(Path(sys.argv[2]), segment_bytes=20_000)
        ledger = UsageLedger(database, journal, clock, max_events=100)
        await ledger.replay()
        print("ready", flush=True)
        for number in range(first, first + 100_000):
            ledger.begin(usage_event(number, cost_nusd=0, charges={}))
            ledger.record(usage_event(number))
            sys.stdout.write(f"{number}\\n")
            sys.stdout.flush()
            if number % 20 == 0:
                await ledger.flush()

asyncio.run(main())
"""


KILLED = """
import sys, time
from pathlib import Path
from maitred.core.clock import SystemClock
from maitred.store.journal import Journal
from tests.support.usage_events import usage_event

journal = Journal(Path(sys.argv[1]), segment_bytes=20_000)
first = int(sys.argv[2])
print("ready", flush=True)
for number in range(first, first + 100_000):
    journal.begin(usage_event(number, cost_nusd=0, charges={}))
    journal.record(usage_event(number))
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


def killed_life(script, *arguments, after_s):
    """What a child says that it has recorded before it is killed."""
    command = [sys.executable, "-m", given_code.__name__, script, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().splitlines(keepends=True)
    return [f"u-{int(line):06d}" for line in lines if line.endswith(b"\n")]


async def test_killed_at_any_moment_nothing_recorded_is_lost_or_doubled(tmp_path):
    """A child prints what it has recorded; all of that must be in the ledger, once, after the child was killed."""
    folder, recorded, chance = tmp_path / "journal", [], random.Random(7)
    config = StoreConfig(folder=str(tmp_path / "data"), deadline_s=DEADLINE_S)
    async with opened(config, folder) as (database, ledger):
        for life in range(50):
            recorded += killed_life(KILLED, folder, life * 100_000, after_s=chance.uniform(0, 0.01))
            if chance.random() < 0.3:
                await ledger.replay()
        await ledger.replay()
        assert await ledger.replay() == 0
        rows = await stored(database)
    finished = [row["id"] for row in rows if row["outcome"] == "finished"]
    assert len(recorded) > 100
    assert set(recorded) <= set(finished)
    assert len(finished) <= len(recorded) + 50  # at most the one that each was killed over before it could say so
    assert len(rows) <= len(finished) + 50
    assert not (folder / "damaged").exists()


async def test_killed_while_it_writes_every_event_counts_once(tmp_path):
    """Each child adopts what the one before has left, half written or not."""
    folder, data, recorded, chance = tmp_path / "journal", tmp_path / "data", [], random.Random(11)
    for life in range(8):
        recorded += killed_life(WRITING, data, folder, life * 100_000, after_s=chance.uniform(0, 0.3))
    async with opened(StoreConfig(folder=str(data), deadline_s=DEADLINE_S), folder) as (database, ledger):
        await ledger.replay()
        rows = await stored(database)
    finished = [row["id"] for row in rows if row["outcome"] == "finished"]
    assert len(recorded) > 100
    assert set(recorded) <= set(finished)
    assert len(finished) <= len(recorded) + 8
    assert len(rows) <= len(finished) + 8

import asyncio

import pytest

from maitred.core.errors import StoreUnavailable
from maitred.core.tenancy import DirectoryChanges, Tenant
from maitred.identity.directory import Directory
from maitred.identity.identity import DirectoryRefresher
from tests.support.clock import FakeClock


class Source:
    """Answers with what it was given, in order; the last one again and again."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def changes(self, since):
        self.asked.append(since)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer


FIRST = DirectoryChanges(3, [Tenant(id="acme")])


def parts(*answers, **settings):
    directory, clock, source = Directory(), FakeClock(), Source(*answers)
    return directory, clock, source, DirectoryRefresher(source, directory, clock, **settings)


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")


async def test_nothing_may_be_used_before_it_is_loaded():
    directory, _, _, refresher = parts(FIRST)
    with pytest.raises(StoreUnavailable):
        refresher.check()
    await refresher.load()
    refresher.check()
    assert refresher.age_s == 0
    assert directory.tenant("acme") is not None


async def test_each_question_begins_where_the_last_answer_ended():
    directory, _, source, refresher = parts(FIRST, DirectoryChanges(3), DirectoryChanges(5, deleted_tenants=["acme"]))
    for _ in range(4):
        await refresher.load()
    assert source.asked == [0, 3, 3, 5]
    assert directory.tenant("acme") is None


async def test_the_age_counts_from_the_question():
    directory, clock, source, refresher = parts(FIRST)

    def slow():
        clock.now_s += 2.0
        return FIRST

    source.answers = [slow]
    await refresher.load()
    assert refresher.age_s == 2.0
    assert directory.version == 3


async def test_while_the_store_is_away_what_is_known_holds_until_it_is_too_old():
    directory, clock, source, refresher = parts(FIRST, max_stale_s=60.0)
    await refresher.load()
    source.answers = [StoreUnavailable()]
    clock.now_s += 60.0
    with pytest.raises(StoreUnavailable):
        await refresher.load()
    assert refresher.away
    assert refresher.age_s == 60.0
    refresher.check()
    clock.now_s += 0.1
    with pytest.raises(StoreUnavailable, match="too long"):
        refresher.check()
    assert directory.tenant("acme") is not None
    source.answers = [DirectoryChanges(3)]
    await refresher.load()
    assert not refresher.away
    refresher.check()


async def test_it_goes_on_asking_whatever_happens(caplog):
    directory, _, source, refresher = parts(FIRST, every_s=0.0)
    await refresher.load()
    source.answers = [StoreUnavailable(), StoreUnavailable(), ValueError("odd"), DirectoryChanges(4, [Tenant(id="b")])]
    caplog.set_level("INFO")
    running = asyncio.create_task(refresher.run())
    await until(lambda: directory.tenant("b") is not None and not refresher.away)
    running.cancel()
    await asyncio.wait([running])
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_watchers_are_notified_after_every_refresh_whatever_it_brought():
    directory, _, _, refresher = parts(StoreUnavailable(), FIRST, DirectoryChanges(3), every_s=0.0)
    seen = []
    refresher.watch(lambda: seen.append(directory.version))
    running = asyncio.create_task(refresher.run())
    await until(lambda: len(seen) >= 3)
    running.cancel()
    await asyncio.wait([running])
    assert seen[:3] == [0, 3, 3]


async def test_an_unexpected_fault_is_logged_once(caplog):
    _, _, source, refresher = parts(ValueError("odd"), every_s=0.0)
    running = asyncio.create_task(refresher.run())
    await until(lambda: len(source.asked) > 3)
    assert refresher.away
    running.cancel()
    await asyncio.wait([running])
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]


async def test_an_older_store_is_read_from_the_start():
    directory, _, source, refresher = parts(FIRST)
    await refresher.load()
    source.answers = [DirectoryChanges(2), DirectoryChanges(2, [Tenant(id="restored")])]
    await refresher.load()
    assert source.asked == [0, 3, 0]
    assert directory.tenant("acme") is None
    assert directory.tenant("restored") is not None
    assert directory.version == 2


async def test_a_store_that_never_answers_is_away(monkeypatch):
    monkeypatch.setattr("maitred.identity.identity._POLL_TIMEOUT_S", 0.0)

    class Silent:
        async def changes(self, since):
            await asyncio.Event().wait()

    refresher = DirectoryRefresher(Silent(), Directory(), FakeClock())
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await refresher.load()
    assert refresher.away


async def test_answers_are_applied_one_after_the_other():
    directory = Directory()
    gates = [asyncio.Event(), asyncio.Event()]
    asked = []

    class Slow:
        async def changes(self, since):
            asked.append(since)
            await gates[len(asked) - 1].wait()
            return DirectoryChanges(len(asked), [Tenant(id=f"t{len(asked)}")])

    refresher = DirectoryRefresher(Slow(), directory, FakeClock())
    both = asyncio.gather(refresher.load(), refresher.load())
    await until(lambda: asked == [0])
    gates[1].set()
    await asyncio.sleep(0)
    assert asked == [0]
    gates[0].set()
    await both
    assert asked == [0, 1]
    assert directory.version == 2

"""One state for all viewers, made only while there are some."""

import asyncio
from contextlib import ExitStack, suppress

import pytest

from maitred.console.pulse import LiveFeed
from maitred.core.errors import Saturated
from tests.support.clock import FakeClock


class Source:
    def __init__(self):
        self.beats = self.made = 0

    def beat(self):
        self.beats += 1

    async def make(self):
        self.made += 1
        await asyncio.sleep(0)
        return [self.made]


def pulse(most_viewers=3):
    source, clock = Source(), FakeClock()
    return source, clock, LiveFeed(source.beat, source.make, clock, most_viewers)


async def test_a_state_is_made_once_for_all_who_ask_at_once_and_again_when_it_is_old():
    source, clock, beating = pulse()
    first = await asyncio.gather(*(beating.now() for _ in range(5)))
    assert {id(state) for state in first} == {id(first[0])}
    clock.now_s += 0.9
    assert await beating.now() is first[0]
    clock.now_s += 0.1
    assert await beating.now() == [2]
    assert source.made == 2


async def test_a_slow_viewer_gets_the_newest_state_and_holds_up_nobody():
    _, clock, beating = pulse()
    with beating.watching() as quick, beating.watching() as slow:
        assert await anext(quick) == await anext(slow) == [1]
        for number in (2, 3, 4):
            clock.now_s += 1
            await beating.now()
            assert await anext(quick) == [number]
        assert await anext(slow) == [4]
    assert beating.viewers == 0


async def test_it_waits_for_news():
    _, clock, beating = pulse()
    with beating.watching() as states:
        await anext(states)
        waiting = asyncio.ensure_future(anext(states))
        await asyncio.sleep(0)
        assert not waiting.done()
        clock.now_s += 1
        await beating.now()
        assert await waiting == [2]


async def test_the_number_of_viewers_is_limited():
    _, _, beating = pulse(most_viewers=2)
    with beating.watching(), beating.watching():
        with pytest.raises(Saturated) as refused, beating.watching():
            pass
        assert refused.value.retry_after_s
        assert beating.viewers == 2
    with beating.watching():
        assert beating.viewers == 1


async def test_one_key_cannot_watch_alone_and_operators_have_a_reserve():
    _, _, beating = pulse(most_viewers=16)
    with ExitStack() as watching:

        def watch_all(key, **rights):
            count = 0
            with suppress(Saturated):
                while True:
                    watching.enter_context(beating.watching(key, **rights))
                    count += 1
            return count

        assert watch_all("greedy") == 8
        assert watch_all("other") == 4
        assert [watch_all(key) for key in ("third", "fourth")] == [2, 0]
        assert watch_all("admin", is_operator=True) == 2
        assert beating.viewers == 16
    assert beating.viewers == 0


async def test_it_beats_without_viewers_and_makes_nothing():
    source, _, beating = pulse()
    running = asyncio.ensure_future(beating.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert (source.beats, source.made) == (1, 0)


async def test_a_state_that_cannot_be_made_does_not_end_the_beat(caplog, monkeypatch):
    source, clock, beating = pulse()
    monkeypatch.setattr("maitred.console.pulse.EVERY_S", 0.0)
    with beating.watching() as states:
        await anext(states)
        monkeypatch.setattr(beating, "_make", _failing)
        running = asyncio.ensure_future(beating.run())
        while source.beats < 3:
            clock.now_s += 1
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
    assert "The live state could not be made." in caplog.text


async def _failing():
    raise ValueError

import asyncio

from maitred.load.play.doors import StartGate

LATE_S = 5.0


def doors(*, duration_s=None, requests=None, stop=None):
    """At five seconds into the run."""
    return StartGate(lambda: LATE_S, duration_s=duration_s, requests=requests, stop=stop or asyncio.Event())


async def test_time_keeps_out_what_is_due_later_and_lets_in_what_is_late():
    async with doors(duration_s=1.0) as door:
        await door.wait_closed()
        assert await door.admit(0.9)
        assert await door.admit(1.0)
        assert not await door.admit(1.1)


async def test_nobody_comes_after_the_last_request():
    async with doors(requests=2, duration_s=10.0) as door:
        assert [await door.admit(0.0) for _ in range(3)] == [True, True, False]
        await door.wait_closed()


async def test_nobody_comes_after_a_stop():
    stop = asyncio.Event()
    async with doors(duration_s=1.0, stop=stop) as door:
        assert await door.admit(0.0)
        stop.set()
        await asyncio.sleep(0)
        assert not await door.admit(0.0)

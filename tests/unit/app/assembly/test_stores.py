"""Background tasks of the gateway: how they end."""

import asyncio

import pytest

from maitred.app.assembly.stores import running


async def test_a_background_task_that_fails_is_logged_at_once(caplog):
    async def fail():
        raise ValueError("a bug")

    block = running(fail(), "cleaning")
    await asyncio.wait({await block.__aenter__()})
    await asyncio.sleep(0)
    assert "The background task 'cleaning' has ended by an error." in caplog.text
    assert "ValueError: a bug" in caplog.text
    with pytest.raises(ValueError, match="a bug"):
        await block.__aexit__(None, None, None)


async def test_a_background_task_that_is_cancelled_at_the_end_is_no_failure(caplog):
    async with running(asyncio.sleep(3600), "cleaning"):
        await asyncio.sleep(0)
    assert not caplog.records

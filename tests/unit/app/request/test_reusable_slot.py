"""A place for one context."""

from contextlib import asynccontextmanager

import pytest

from maitred.app.request.resources import ReusableSlot


class Rooms:
    """Notes who enters and leaves, and with what."""

    def __init__(self):
        self.seen = []

    @asynccontextmanager
    async def at(self, name, failure=None):
        self.seen.append(f"into {name}")
        if failure is not None:
            raise failure
        try:
            yield name
        except Exception as error:
            self.seen.append(f"{type(error).__name__} in {name}")
            raise
        finally:
            self.seen.append(f"out of {name}")


async def test_what_was_entered_last_is_left_with_the_place():
    rooms = Rooms()
    async with ReusableSlot() as slot:
        assert await slot.enter(rooms.at("a")) == "a"
        await slot.__aexit__(None, None, None)
        assert await slot.enter(rooms.at("b")) == "b"
    assert rooms.seen == ["into a", "out of a", "into b", "out of b"]


async def test_it_hears_what_it_is_left_with():
    rooms, slot = Rooms(), ReusableSlot()
    await slot.enter(rooms.at("a"))
    await slot.__aexit__(KeyError, KeyError(), None)
    assert rooms.seen == ["into a", "KeyError in a", "out of a"]


async def test_what_could_not_be_entered_is_not_left():
    rooms = Rooms()
    async with ReusableSlot() as slot:
        with pytest.raises(KeyError):
            await slot.enter(rooms.at("a", KeyError()))
    assert rooms.seen == ["into a"]

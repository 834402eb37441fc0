"""Calls that are written down once and played without the interpreter."""

import ctypes
from functools import cache

import numpy as np
import pytest
from numba import carray

from maitred.engine.kernels.job import COUNT, NEXT, SLOT, CompiledEntry, longs, take
from maitred.engine.kernels.tape import ALONE, Tape


@cache
def counting() -> CompiledEntry:
    """Adds a number to every one of so many places, which threads take one by one; counts the threads that came."""
    address, addend, threads = COUNT + 1, COUNT + 2, COUNT + 3

    def count(job_at):
        job = carray(job_at, threads + 1)
        places = carray(longs(job[address]), job[COUNT])
        if take(job, SLOT, 1) == 0:
            carray(longs(job[threads]), 1)[0] += 1
        place = take(job, NEXT, 1)
        while place < job[COUNT]:
            places[place] += job[addend]
            place = take(job, NEXT, 1)

    return CompiledEntry(count)


def played(threads: int, worth: int, counts: list[int]) -> tuple[list[int], int]:
    """What is in the places after two calls were played for every count, and how often one was made."""
    places, calls, counter = np.zeros(100, np.int64), np.zeros(1, np.int64), ctypes.c_int64()
    tape = Tape(threads)
    for addend in (1, 10):
        fields = [places.ctypes.data, addend, calls.ctypes.data]
        tape.add(counting(), fields, ctypes.addressof(counter), worth)
    for count in counts:
        counter.value = count
        tape.play()
    return places.tolist(), int(calls[0])


@pytest.mark.parametrize("worth", [0, 1, 8, ALONE])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_call_does_every_part_once(threads, worth):
    places, calls = played(threads, worth, [100, 3, 100])
    assert places == [33] * 3 + [22] * 97
    assert calls == 6


def test_a_call_without_parts_is_left_out():
    places, calls = played(2, 1, [0, 5, 0])
    assert places == [11] * 5 + [0] * 95
    assert calls == 2


def test_calls_can_be_added_after_it_was_played():
    places, calls, counter = np.zeros(4, np.int64), np.zeros(1, np.int64), ctypes.c_int64(4)
    tape = Tape(1)
    for _ in range(3):
        tape.add(counting(), [places.ctypes.data, 1, calls.ctypes.data], ctypes.addressof(counter), 0)
        tape.play()
    assert places.tolist() == [6] * 4

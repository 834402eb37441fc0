import os
import threading

import pytest

from maitred.engine.weights_cache.store import WeightsCacheStore


class Time:
    """Passes only where somebody sleeps."""

    def __init__(self):
        self.now_s = 0.0

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def shelf(tmp_path, time):
    return WeightsCacheStore(tmp_path / "weights", 3 << 20, lambda: time.now_s, time.sleep)


def put(shelf, key, size=1 << 20, age_s=0):
    with shelf.writing(key) as file:
        file.write(b"x" * size)
    os.utime(shelf.path(key), (1e9 - age_s, 1e9 - age_s))


def names(shelf):
    return sorted(path.name for path in shelf.folder.iterdir())


def test_a_file_appears_when_it_is_whole(shelf):
    with shelf.writing("a") as file:
        file.write(b"all")
        assert not shelf.path("a").exists()
    assert shelf.path("a").read_bytes() == b"all"
    assert names(shelf) == ["a.weights"]


def test_nothing_is_left_of_a_file_whose_writing_failed(shelf):
    def write_half():
        with shelf.writing("a") as file:
            file.write(b"half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert names(shelf) == []
    put(shelf, "a")


def test_who_comes_while_another_writes_waits_and_finds_the_file_there(tmp_path):
    shelf = WeightsCacheStore(tmp_path / "weights", 1 << 20)
    waits = threading.Event()
    second_sees = []

    def second():
        with WeightsCacheStore(shelf.folder, 1 << 20, sleep=lambda seconds: waits.set()).writing("a") as file:
            second_sees.append(file)

    with shelf.writing("a") as file:
        other = threading.Thread(target=second)
        other.start()
        assert waits.wait(10)
        file.write(b"mine")
    other.join(10)
    assert second_sees == [None]
    assert shelf.path("a").read_bytes() == b"mine"
    assert names(shelf) == ["a.weights"]


def test_who_waits_for_one_that_fails_writes_the_file_himself(tmp_path):
    shelf = WeightsCacheStore(tmp_path / "weights", 1 << 20)
    waits = threading.Event()

    def second():
        with WeightsCacheStore(shelf.folder, 1 << 20, sleep=lambda seconds: waits.set()).writing("a") as file:
            file.write(b"second")

    other = threading.Thread(target=second)

    def first():
        with shelf.writing("a") as file:
            file.write(b"first, and longer")
            other.start()
            assert waits.wait(10)
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        first()
    other.join(10)
    assert shelf.path("a").read_bytes() == b"second"


def test_nobody_waits_for_ever(shelf, time):
    with shelf.writing("a"), pytest.raises(TimeoutError), shelf.writing("a", wait_s=20):
        raise AssertionError("two write at once")
    assert 20 < time.now_s < 21


def test_what_a_writer_that_was_killed_has_left_is_written_over(shelf):
    shelf.folder.mkdir()
    (shelf.folder / "a.unfinished").write_bytes(b"much more than what comes")
    put(shelf, "a", 4)
    assert shelf.path("a").read_bytes() == b"xxxx"


def test_a_file_is_written_anew_while_others_have_the_old_one(shelf):
    put(shelf, "a", 4)
    with shelf.path("a").open("rb") as old:
        put(shelf, "a", 2)
        assert old.read() == b"xxxx"
    assert shelf.path("a").read_bytes() == b"xx"


def test_what_was_not_used_for_longest_goes_first(shelf):
    for age_s, key in enumerate("abcde"):
        put(shelf, key, age_s=age_s)
    shelf.touch("e")
    shelf.tidy("d")
    assert names(shelf) == ["a.weights", "d.weights", "e.weights"]


def test_the_one_in_use_stays_however_large_it_is(shelf):
    put(shelf, "a", 5 << 20, age_s=9)
    put(shelf, "b")
    shelf.tidy("a")
    assert names(shelf) == ["a.weights"]


def test_tidying_leaves_what_others_are_writing_and_takes_what_nobody_is(shelf):
    put(shelf, "a")
    (shelf.folder / "dead.unfinished").write_bytes(b"")
    with shelf.writing("b"):
        shelf.tidy("a")
        assert names(shelf) == ["a.weights", "b.unfinished"]

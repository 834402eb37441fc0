"""Answers in memory: what is found, what is removed, and that an operator's listing delays nobody."""

import asyncio

import pytest

from maitred.cache.answer_key import AnswerKey, answer_digest
from maitred.cache.backend import AnswerSelection, CachedAnswers, MemoryBackend, StoredAnswer
from tests.support.clock import FakeClock


def key(question, tenant="acme", model="chat", server="", epoch=""):
    return AnswerKey(answer_digest([str(question), tenant, model, epoch]), tenant, "org", model, server, epoch)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def backend(clock):
    return MemoryBackend(1 << 20, clock)


async def test_an_answer_is_found_until_its_time_is_over(backend, clock):
    assert await backend.get(key("q")) is None
    backend.put(key("q"), b"first", 60.0, "")
    backend.put(key("q"), b"second", 60.0, "")
    assert await backend.get(key("q")) == StoredAnswer(b"second", "")
    assert await backend.get(key("other")) is None
    clock.now_s += 59.9
    assert await backend.get(key("q")) is not None
    clock.now_s += 0.1
    assert await backend.get(key("q")) is None
    state = backend.state()
    assert (state.answers, state.bytes, state.stores, state.evictions) == (0, 0, 2, 0)


async def test_what_a_server_says_last_comes_with_all_of_its_answers(backend):
    backend.put(key(1, server="s"), b"x", 60.0, "fp_1")
    backend.put(key(2, server="s"), b"x", 60.0, "fp_2")
    backend.put(key(3, server="t"), b"x", 60.0, "")
    assert [
        (await backend.get(key(1, server="s"))).fingerprint,
        (await backend.get(key(3, server="t"))).fingerprint,
    ] == [
        "fp_2",
        "",
    ]


async def test_a_full_memory_evicts_and_says_so(backend):
    for n in range(100):
        backend.put(key(n), b"x" * 20_000, 60.0, "")
    state = backend.state()
    assert state.bytes <= state.max_bytes
    assert (state.stores, state.evictions) == (100, 100 - state.answers)
    assert state.evictions > 0


KEPT = [
    CachedAnswers("acme", "chat", "", 3, 30),
    CachedAnswers("acme", "chat", "2", 2, 20),
    CachedAnswers("acme", "code", "", 2, 20),
    CachedAnswers("other", "chat", "2", 1, 10),
]


@pytest.mark.parametrize(
    ("selection", "left"),
    [
        (AnswerSelection(), []),
        (AnswerSelection(tenant="acme"), KEPT[3:]),
        (AnswerSelection(model="chat"), KEPT[2:3]),
        (AnswerSelection(tenant="acme", model="code"), [*KEPT[:2], KEPT[3]]),
        (AnswerSelection(tenant="nobody"), KEPT),
        (AnswerSelection(epoch="2"), [KEPT[0], KEPT[2]]),
        (AnswerSelection(epoch=""), [KEPT[1], KEPT[3]]),
        (AnswerSelection(epoch="2", tenant="acme"), [KEPT[0], *KEPT[2:]]),
        (AnswerSelection(epoch="3"), KEPT),
        (AnswerSelection(name=key(1).name), [CachedAnswers("acme", "chat", "", 2, 20), *KEPT[1:]]),
        (AnswerSelection(name=key(1).name, tenant="other"), KEPT),
    ],
)
async def test_removes_what_is_selected_and_nothing_else(backend, selection, left):
    for group in KEPT:
        for n in range(group.answers):
            backend.put(key(n, group.tenant, group.model, epoch=group.epoch), b"x" * 10, 60.0, "")
    assert await backend.describe() == KEPT
    assert await backend.remove(selection) == 8 - sum(group.answers for group in left)
    assert await backend.describe() == left


@pytest.mark.parametrize("work", ["describe", "remove"])
async def test_other_tasks_run_while_an_operator_looks_at_many_answers(clock, work):
    backend = MemoryBackend(1 << 30, clock)
    for n in range(5000):
        backend.put(key(n), b"x", 60.0, "")
    call = backend.describe() if work == "describe" else backend.remove(AnswerSelection())
    operator, turns = asyncio.create_task(call), 0
    while not operator.done():
        turns += 1
        if turns == 2:  # while it works
            backend.put(key("new"), b"x", 60.0, "")
        await asyncio.sleep(0)
    assert turns >= 5
    assert operator.result() == ([CachedAnswers("acme", "chat", "", 5000, 5000)] if work == "describe" else 5000)
    assert await backend.get(key("new")) is not None

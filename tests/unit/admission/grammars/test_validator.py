"""Grammars are tried once, within bounds, and nobody's hold up anybody else's."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from maitred.admission.grammars import workers as pool
from maitred.admission.grammars.config import GrammarsConfig
from maitred.admission.grammars.validator import GrammarValidator
from maitred.admission.grammars.workers import GrammarWorkers
from maitred.core.errors import InvalidRequest, Saturated
from maitred.core.flow import FlowLevel
from maitred.core.grammar import Constraint, Grammar, GrammarResult
from maitred.core.tenancy import Principal, Scope

GRAMMAR = Grammar("regex", "a")


class Slow:
    """Tries grammars, each until it is let go."""

    def __init__(self):
        self.asked = []

    async def compile(self, question):
        done = asyncio.get_running_loop().create_future()
        self.asked.append(done)
        return await done

    async def close(self):
        self.asked.clear()


def stop(process):
    """Stops it. On a busy machine its other threads run on until one of them has a core, to stop them all."""
    process.send_signal(signal.SIGSTOP)
    threads = [*Path(f"/proc/{process.pid}/task").glob("*/stat")]
    while any(thread.read_text().rpartition(")")[2].split()[0] != "T" for thread in threads):
        time.sleep(0.01)


def principal(organisation, key="key"):
    path = (FlowLevel(organisation), FlowLevel("team"), FlowLevel(key))
    tenants = (f"{organisation}/team", organisation)
    return Principal(key=key, tenants=tenants, scopes=frozenset({Scope.INFERENCE}), shares=path)


def threads_of(process):
    return [int(thread.name) for thread in Path(f"/proc/{process}/task").iterdir()]


def regex(text):
    return Constraint("regex", text, "guided_regex")


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_organisation_has_its_part_of_the_work_only():
    workers = Slow()
    validator = GrammarValidator(GrammarsConfig(per_organisation=1, waiting_per_organisation=1), workers)
    first, second = (asyncio.create_task(validator.validate(principal("greedy"), regex(text))) for text in "ab")
    await settle()
    assert len(workers.asked) == 1
    with pytest.raises(Saturated):
        await validator.validate(principal("greedy"), regex("c"))
    other = asyncio.create_task(validator.validate(principal("modest"), regex("d")))
    await settle()
    assert len(workers.asked) == 2
    workers.asked[1].set_result(GrammarResult(GRAMMAR))
    assert await other == GRAMMAR
    workers.asked[0].set_result(GrammarResult(fault="It is wrong."))
    with pytest.raises(InvalidRequest, match=r"guided_regex cannot be used\. It is wrong\.") as refusal:
        await first
    assert refusal.value.param == "guided_regex"
    await settle()
    workers.asked[2].set_result(GrammarResult(GRAMMAR))
    assert await second == GRAMMAR


async def test_a_key_waits_only_for_the_grammar_in_progress_of_another_of_its_team():
    workers = Slow()
    validator = GrammarValidator(GrammarsConfig(), workers)
    hostile = [
        asyncio.create_task(validator.validate(principal("one", "hostile"), regex(f"a{number}")))
        for number in range(100)
    ]
    await settle()
    assert 0 < sum(task.done() for task in hostile) < 100
    honest = asyncio.create_task(validator.validate(principal("one", "honest"), regex("b")))
    await settle()
    assert len(workers.asked) == 1
    for place in range(2):
        assert not honest.done()
        workers.asked[place].set_result(GrammarResult(GRAMMAR))
        await settle()
    assert await honest == GRAMMAR
    with pytest.raises(Saturated, match="of your key wait"):
        [await task for task in hostile if task.done()]
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)
    assert not validator._organisations


async def test_equal_grammars_are_validated_once_until_the_cache_is_full():
    workers = Slow()
    validator = GrammarValidator(GrammarsConfig(cache_bytes=100), workers)
    same = [asyncio.create_task(validator.validate(principal("one"), regex("a"))) for _ in range(3)]
    await settle()
    workers.asked[0].set_result(GrammarResult(GRAMMAR))
    assert await asyncio.gather(*same) == [GRAMMAR] * 3
    assert len(workers.asked) == 1
    large = asyncio.create_task(validator.validate(principal("one"), regex("b" * 80)))
    await settle()
    workers.asked[1].set_result(GrammarResult(GRAMMAR))
    await large
    again = asyncio.create_task(validator.validate(principal("one"), regex("a")))
    await settle()
    assert len(workers.asked) == 3
    again.cancel()


async def test_what_is_too_large_is_not_tried():
    validator = GrammarValidator(GrammarsConfig(most_bytes=64), Slow())
    with pytest.raises(InvalidRequest, match="64 are allowed"):
        await validator.validate(principal("one"), regex("a" * 65))


async def test_a_process_that_breaks_down_is_replaced():
    async with GrammarValidator(GrammarsConfig(workers=1), workers=GrammarWorkers(1, compile_s=30.0)) as validator:
        chain = "start: r0\n" + "\n".join(f'r{n}: r{n + 1} "a"' for n in range(3000)) + '\nr3000: "b"'
        assert (await validator.validate(principal("one"), regex("[ab]"))).kind == "regex"
        with pytest.raises(InvalidRequest, match="too deeply nested, or too large"):
            await validator.validate(principal("one"), Constraint("grammar", chain, "guided_grammar"))
        assert await validator.validate(principal("one"), regex("d")) == Grammar("regex", "d")


async def test_a_process_is_ended_and_replaced_once_a_grammar_has_used_its_processor_time():
    slow = {"anyOf": [{"type": "integer", "multipleOf": multiple} for multiple in range(49_000, 49_100)]}
    workers = GrammarWorkers(1, compile_s=0.5)
    async with GrammarValidator(GrammarsConfig(workers=1), workers=workers) as validator:
        assert await validator.validate(principal("one"), regex("a")) == Grammar("regex", "a")
        with pytest.raises(InvalidRequest, match=r"takes more than 0\.5 s"):
            await validator.validate(principal("one"), Constraint("json_schema", {"items": slow}, "p"))
        assert await validator.validate(principal("one"), regex("d")) == Grammar("regex", "d")


async def test_a_process_that_waits_for_a_core_is_not_ended():
    workers = GrammarWorkers(1, compile_s=0.5)
    async with GrammarValidator(GrammarsConfig(workers=1), workers=workers) as validator:
        await validator.validate(principal("one"), regex("a"))
        (process,) = workers._processes
        stop(process)
        waiting = asyncio.create_task(validator.validate(principal("one"), regex("b")))
        assert not (await asyncio.wait({waiting}, timeout=1.0))[0]
        process.send_signal(signal.SIGCONT)
        assert await waiting == Grammar("regex", "b")
        assert workers._processes == {process}


async def test_what_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(pool, "_MIN_HANG_S", 0.01)
    workers = GrammarWorkers(1, compile_s=0.001)
    async with GrammarValidator(GrammarsConfig(workers=1), workers=workers) as validator:
        process = await workers._start()
        workers._idle.get_nowait()
        workers._idle.put_nowait(process)
        stop(process)
        with pytest.raises(InvalidRequest, match="takes more than"):
            await validator.validate(principal("one"), regex("b"))
        assert await process.wait() == -signal.SIGKILL


async def test_processes_have_a_low_priority_once_they_are_ready_and_at_once_if_they_replace_others():
    workers = GrammarWorkers(1, compile_s=30.0)
    async with GrammarValidator(GrammarsConfig(workers=1), workers=workers) as validator:
        await validator.validate(principal("one"), regex("a"))
        (process,) = workers._processes
        assert max(os.getpriority(os.PRIO_PROCESS, thread) for thread in threads_of(process.pid)) >= 10
        replacement = await workers._start()
        assert os.getpriority(os.PRIO_PROCESS, replacement.pid) >= 10


async def test_whole_numbers_of_any_size_are_compiled():
    async with GrammarValidator(GrammarsConfig(workers=1), workers=GrammarWorkers(1, compile_s=30.0)) as validator:
        large = Constraint("json_schema", {"type": "integer", "maximum": 2**70}, "guided_json")
        assert (await validator.validate(principal("one"), large)).kind == "json_schema"

"""The process that puts answers to schemas: whatever it is sent, nobody waits for it for long."""

import asyncio
import os
import signal

from maitred.routing.escalation.schema import SchemaResult
from maitred.routing.escalation.schemas import SchemaChecker

WORDS = {"type": "array", "items": {"type": "string"}}
ENDLESS = {"type": "string", "pattern": "^(a+)+$"}
"""It takes twice as long for each further letter."""


LIMIT_S = 300.0
"""What takes longer hangs."""


def patient_checker():
    return SchemaChecker(LIMIT_S, total_timeout_s=LIMIT_S)


async def test_it_tells_what_follows_a_schema_and_survives_what_takes_for_ever():
    async with patient_checker() as schemas:
        assert await schemas.check(WORDS, '["a"]') is SchemaResult.VALID
        assert await schemas.check(WORDS, "[1]") is SchemaResult.INVALID
        schemas._check_timeout_s = 1.0
        check = asyncio.create_task(schemas.check(ENDLESS, f'"{"a" * 64}!"'))
        turns = 0
        while not check.done():
            turns += 1
            await asyncio.sleep(0.01)
        assert await check is SchemaResult.UNKNOWN
        assert turns > 1, "everybody else goes on"
        schemas._check_timeout_s = LIMIT_S
        assert await schemas.check(WORDS, '["a"]') is SchemaResult.VALID, "in a new process"


async def test_checks_beside_each_other_get_their_own_verdicts():
    async with patient_checker() as schemas:
        texts = ['["a"]', "[1]", "{", "[]"] * 8
        verdicts = await asyncio.gather(*(schemas.check(WORDS, text) for text in texts))
        assert verdicts == [SchemaResult.VALID, SchemaResult.INVALID, SchemaResult.INVALID, SchemaResult.VALID] * 8


async def test_who_leaves_during_a_check_takes_nobody_elses_verdict_along():
    async with patient_checker() as schemas:
        check = asyncio.create_task(schemas.check(ENDLESS, f'"{"a" * 64}!"'))
        await asyncio.sleep(0.1)
        check.cancel()
        await asyncio.wait([check])
        assert await schemas.check(WORDS, "[1]") is SchemaResult.INVALID


async def test_a_process_that_dies_is_followed_by_another():
    async with patient_checker() as schemas:
        process = schemas._process
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert await schemas.check(WORDS, "[1]") is SchemaResult.UNKNOWN
        assert await schemas.check(WORDS, "[1]") is SchemaResult.INVALID
        last = schemas._process
    assert last.returncode is not None, "it goes with its owner"


async def test_what_is_too_long_is_not_looked_at():
    async with patient_checker() as schemas:
        assert await schemas.check(WORDS, "[" + '"a",' * 500_000 + '"a"]') is SchemaResult.UNKNOWN

"""Puts answers to their schemas without holding up anybody: asks a process that is ended when it takes too long."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from types import TracebackType
from typing import Self

import msgspec

from maitred.routing.escalation.schema import SchemaResult
from maitred.routing.escalation.worker import LENGTH_BYTES

_MOST_BYTES = 1 << 20
"""Of a schema and an answer. It is about as much as a window of 256k tokens holds."""
_CHECK_S = 1.0
_PATIENCE_S = 3.0
"""For a check with its wait for others' checks, and for a new process where the last one was ended."""
_START_S = 30.0


class Schemas:
    """One process, one check at a time. A context, in which the process runs.

    Args:
        check_s: A check that takes longer ends with the process.
        waits: Whether the process is started for the first check only, which then takes longer.
    """

    def __init__(self, check_s: float = _CHECK_S, *, waits: bool = False) -> None:
        self._check_s = check_s
        self._waits = waits
        self._lock = asyncio.Lock()
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        if not self._waits:
            async with asyncio.timeout(_START_S):
                self._process = await _started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def check(self, schema: object, text: str) -> SchemaResult:
        """Whether a text follows a schema, as far as that can be told in a second or so."""
        question = msgspec.msgpack.encode([schema, text])
        if len(question) > _MOST_BYTES:
            return SchemaResult.UNKNOWN
        try:
            async with asyncio.timeout(_PATIENCE_S), self._lock:
                return await self._ask(question)
        except TimeoutError:
            return SchemaResult.UNKNOWN

    async def _ask(self, question: bytes) -> SchemaResult:
        process = self._process = self._process or await _started()
        assert process.stdin is not None
        assert process.stdout is not None
        answered = False
        try:
            async with asyncio.timeout(self._check_s):
                process.stdin.write(len(question).to_bytes(LENGTH_BYTES) + question)
                verdict = SchemaResult(await process.stdout.readexactly(1))
                answered = True
                return verdict
        except (asyncio.IncompleteReadError, OSError):
            return SchemaResult.UNKNOWN
        finally:
            if not answered:
                await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _started() -> Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "maitred.routing.escalation.worker"), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )
    assert process.stdout is not None
    try:
        await process.stdout.readexactly(1)
    except BaseException:
        if process.returncode is None:
            process.kill()
        raise
    return process

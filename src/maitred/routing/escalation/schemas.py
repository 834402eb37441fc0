"""Schema checker: validates answers in a worker process, which is killed when a check takes too long."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from types import TracebackType
from typing import Self

import msgspec

from maitred.routing.escalation.schema import SchemaResult
from maitred.routing.escalation.worker import LENGTH_BYTES

_MAX_REQUEST_BYTES = 1 << 20
"""Largest request to the worker, which is the schema and the answer together.

This is about the size of a context window of 256k tokens.
"""
_CHECK_TIMEOUT_S = 1.0
_TOTAL_TIMEOUT_S = 3.0
_START_TIMEOUT_S = 30.0


class SchemaChecker:
    """Checker of answers against schemas: one worker process, one check at a time.

    The object is a context manager, and the process runs inside its context.

    Args:
        check_timeout_s: Time limit of one check; the process is killed when it expires.
        total_timeout_s: Time limit of one check with its wait for other checks and for a new process.
        start_lazily: Whether the first check starts the process, and therefore takes longer.
    """

    def __init__(
        self,
        check_timeout_s: float = _CHECK_TIMEOUT_S,
        *,
        total_timeout_s: float = _TOTAL_TIMEOUT_S,
        start_lazily: bool = False,
    ) -> None:
        self._check_timeout_s = check_timeout_s
        self._total_timeout_s = total_timeout_s
        self._start_lazily = start_lazily
        self._lock = asyncio.Lock()
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        if not self._start_lazily:
            async with asyncio.timeout(_START_TIMEOUT_S):
                self._process = await _start_process()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_process()

    async def check(self, schema: object, text: str) -> SchemaResult:
        """Returns whether a text matches a schema, or UNKNOWN if the check takes longer than about a second."""
        request = msgspec.msgpack.encode([schema, text])
        if len(request) > _MAX_REQUEST_BYTES:
            return SchemaResult.UNKNOWN
        try:
            async with asyncio.timeout(self._total_timeout_s), self._lock:
                return await self._send_request(request)
        except TimeoutError:
            return SchemaResult.UNKNOWN

    async def _send_request(self, request: bytes) -> SchemaResult:
        process = self._process = self._process or await _start_process()
        assert process.stdin is not None
        assert process.stdout is not None
        completed = False
        try:
            async with asyncio.timeout(self._check_timeout_s):
                process.stdin.write(len(request).to_bytes(LENGTH_BYTES) + request)
                result = SchemaResult(await process.stdout.readexactly(1))
                completed = True
                return result
        except (asyncio.IncompleteReadError, OSError):
            return SchemaResult.UNKNOWN
        finally:
            if not completed:
                await self._stop_process()

    async def _stop_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _start_process() -> Process:
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

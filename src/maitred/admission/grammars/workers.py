"""Pool of worker processes that compile grammars within a limit of processor time."""

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

import msgspec

from maitred.admission.grammars.priority import lower_priority
from maitred.core.grammar import GRAMMAR_LENGTH_BYTES, GrammarResult

_START_S = 120.0
_HANG_FACTOR = 15
"""How many times its processor time a question may take while other processes use the cores."""
_MIN_HANG_S = 30.0
_CRASHED = "It is too deeply nested, or too large, to compile. Send a simpler one."


class GrammarWorkers:
    """Pool of processes that compile grammars, started when they are needed.

    Args:
        most: Maximum number of processes.
        compile_s: Processor time in seconds that one question may take; then the process ends. Time in which it waits
            for a core does not count, up to a multiple of this time, which only ends what hangs.
    """

    def __init__(self, most: int, compile_s: float) -> None:
        self._compile_s = compile_s
        self._idle: asyncio.Queue[Process | None] = asyncio.Queue()
        self._processes: set[Process] = set()
        self._most = most
        self._started = 0
        for _ in range(most):
            self._idle.put_nowait(None)

    async def compile(self, question: bytes) -> GrammarResult:
        """Compiles a constraint in the first process that is idle."""
        process = await self._idle.get()
        answered = False
        try:
            if process is None:
                async with asyncio.timeout(_START_S):
                    process = await self._start()
            async with asyncio.timeout(max(_MIN_HANG_S, _HANG_FACTOR * self._compile_s)):
                try:
                    answer = await _ask(process, question)
                except (asyncio.IncompleteReadError, OSError):
                    if await process.wait() == -signal.SIGPROF:
                        raise TimeoutError from None
                    return GrammarResult(fault=_CRASHED)
            answered = True
            return msgspec.msgpack.decode(answer, type=GrammarResult)
        except TimeoutError:
            return GrammarResult(fault=f"It takes more than {self._compile_s:g} s to compile. Send a simpler one.")
        except (asyncio.IncompleteReadError, OSError):
            return GrammarResult(fault=_CRASHED)
        finally:
            if process is not None and not answered:
                self._kill(process)
                process = None
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """Ends all worker processes."""
        processes, self._processes = self._processes, set()
        for process in processes:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in processes))

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "maitred.admission.grammars.worker", str(self._compile_s)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
        )
        self._processes.add(process)
        self._started += 1
        if self._started > self._most:
            # It replaces one that a grammar has ended, and grammars may do so without end.
            lower_priority(process.pid)
        try:
            await _answer(process)
        except BaseException:
            self._kill(process)
            raise
        return process

    def _kill(self, process: Process) -> None:
        """Kills one process; `close` waits for it if it has not exited by then."""
        if process.returncode is None:
            process.kill()
        self._processes = {other for other in self._processes if other is process or other.returncode is None}


async def _ask(process: Process, question: bytes) -> bytes:
    assert process.stdin is not None
    process.stdin.write(len(question).to_bytes(GRAMMAR_LENGTH_BYTES) + question)
    return await _answer(process)


async def _answer(process: Process) -> bytes:
    assert process.stdout is not None
    length = int.from_bytes(await process.stdout.readexactly(GRAMMAR_LENGTH_BYTES))
    return await process.stdout.readexactly(length)

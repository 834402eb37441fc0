"""Trouble by a seeded schedule: what befalls the engines and the upstream servers of a chaos run, and that it ends.

Nothing stays broken: whatever a trouble has stopped goes on when its time is over, also if the run is broken off.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec
import psutil

from maitred.testing.scripted_openai import (
    DelayDistribution,
    FaultKind,
    ScriptedFault,
    ScriptedOpenAI,
    ServerScript,
    scripted_openai,
)
from maitred.testing.server_process import free_port

SLOW_PERIOD_S, SLOW_RUNS = 0.2, 0.25
"""A slow process runs for this share of every period and stands still for the rest."""
DOWN_S = 0.7
"""Between two stops of a server that flaps; an engine that flaps is killed as soon as it is back."""
FLAPS = 3
BACK_WITHIN_S = 8.0

ENGINE_KINDS = ("kill", "hang", "slow", "flap")
UPSTREAM_KINDS = ("kill", "hang", "slow", "flap", "faults", "stale")

SOUND = ServerScript(ttft=DelayDistribution(mean_s=0.03), itl=DelayDistribution(mean_s=0.03))
FAULTY = msgspec.structs.replace(
    SOUND,
    faults=[
        ScriptedFault(kind=FaultKind.STATUS, share=0.05, status=503),
        ScriptedFault(kind=FaultKind.STATUS, share=0.05, status=429, headers={"retry-after": "1"}),
        *(ScriptedFault(kind=kind, share=0.04) for kind in (FaultKind.CLOSE, FaultKind.ABORT, FaultKind.SILENT)),
        *(ScriptedFault(kind=kind, share=0.04) for kind in (FaultKind.HTML, FaultKind.EMPTY, FaultKind.ERROR_BODY)),
        *(
            ScriptedFault(kind=kind, share=0.04, after=3)
            for kind in (FaultKind.CUT, FaultKind.RESET, FaultKind.HALF_EVENT)
        ),
        *(ScriptedFault(kind=kind, share=0.04, after=3) for kind in (FaultKind.ERROR_EVENT, FaultKind.NO_DONE)),
        *(ScriptedFault(kind=kind, share=0.04, after=2) for kind in (FaultKind.GARBAGE, FaultKind.STALL)),
    ],
)
_LOAD = "sglang:num_running_reqs {}\nsglang:num_queue_reqs {}\nsglang:token_usage {}\n"
STALE_IDLE, STALE_FULL = _LOAD.format(0, 0, 0.0), _LOAD.format(500, 200, 0.99)


@dataclass(frozen=True)
class Trouble:
    """One of them.

    Attributes:
        at_s: When it begins, in seconds of the run; later, if the one before lasts longer.
        victim: Which of several is hit.
        for_s: How long it lasts, where it has no end of its own.
    """

    at_s: float
    kind: str
    victim: int
    for_s: float


def schedule(
    rng: random.Random, kinds: Sequence[str], victims: int, seconds: float, pause_s: tuple[float, float] = (0.5, 2.0)
) -> list[Trouble]:
    """Every kind once, in a random order, and again in another, until the time is over.

    Args:
        rng: Decides all.
        kinds: Of trouble.
        victims: How many there are to hit.
        seconds: Of the run. The last ones of it are left to come back.
        pause_s: From one to the next, least and most.
    """
    troubles: list[Trouble] = []
    at_s = 2.0
    for kind in _rounds(rng, kinds):
        for_s = rng.uniform(1.0, 5.0)
        if at_s + for_s > seconds - 3.0:
            return troubles
        troubles.append(Trouble(round(at_s, 2), kind, rng.randrange(victims), round(for_s, 2)))
        at_s += for_s + rng.uniform(*pause_s)
    return troubles


def _rounds(rng: random.Random, kinds: Sequence[str]) -> Iterator[str]:
    while True:
        yield from rng.sample(kinds, len(kinds))


class EngineTrouble:
    """Hits the engines, which are children of the gateway.

    Args:
        gateway_pid: Its process.
    """

    def __init__(self, gateway_pid: int) -> None:
        self._gateway = psutil.Process(gateway_pid)

    async def play(self, trouble: Trouble) -> None:
        """One trouble, to its end."""
        engines = await self._engines(1, trouble.for_s)
        if not engines:
            return
        engine = engines[trouble.victim % len(engines)]
        match trouble.kind:
            case "kill":
                _kill(engine)
                await asyncio.sleep(trouble.for_s)
            case "hang":
                async with _hung(engine):
                    await asyncio.sleep(trouble.for_s)
            case "slow":
                await _slow(engine, trouble.for_s)
            case _:
                for _ in range(FLAPS):
                    _kill(engine)
                    born = {engine.pid for engine in await self._engines(len(engines), BACK_WITHIN_S)}
                    new = born - {engine.pid for engine in engines}
                    engine = psutil.Process(new.pop()) if new else engine
                    await asyncio.sleep(DOWN_S)

    async def _engines(self, least: int, within_s: float) -> list[psutil.Process]:
        """Those that run, once there are so many, or the time is over."""
        until_s = time.monotonic() + within_s
        while True:
            running = [child for child in self._gateway.children() if _runs(child)]
            if len(running) >= least or time.monotonic() > until_s:
                return sorted(running, key=lambda child: child.pid)
            await asyncio.sleep(0.1)


class Upstream:
    """A scripted server at one port, over any number of lives, each with a script of its own.

    Attributes:
        url: Of all its lives.
        server: Its present life.
    """

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._life = ExitStack()
        self.server: ScriptedOpenAI | None = None

    async def start(self, script: ServerScript) -> None:
        """A new life."""
        self.server = await asyncio.to_thread(self._life.enter_context, scripted_openai(script, port=self._port))

    async def stop(self) -> None:
        """Its end: every connection is closed, whatever was under way."""
        await asyncio.to_thread(self._life.close)

    async def play(self, trouble: Trouble) -> None:
        """One trouble, to its end; then it is as sound as before."""
        assert self.server is not None
        process = psutil.Process(self.server.process.pid)
        match trouble.kind:
            case "hang":
                async with _hung(process):
                    await asyncio.sleep(trouble.for_s)
            case "slow":
                await _slow(process, trouble.for_s)
            case "kill":
                await self._again(SOUND, trouble.for_s)
            case "flap":
                for _ in range(FLAPS):
                    await self._again(SOUND, DOWN_S)
                    await asyncio.sleep(DOWN_S)
            case "faults":
                await self._for_a_while(FAULTY, trouble.for_s)
            case _:
                page = STALE_FULL if trouble.victim else STALE_IDLE
                await self._for_a_while(msgspec.structs.replace(SOUND, metrics=page), trouble.for_s)

    async def _for_a_while(self, script: ServerScript, for_s: float) -> None:
        await self._again(script, 0.0)
        await asyncio.sleep(for_s)
        await self._again(SOUND, 0.0)

    async def _again(self, script: ServerScript, down_s: float) -> None:
        await self.stop()
        await asyncio.sleep(down_s)
        await self.start(script)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


@asynccontextmanager
async def _hung(process: psutil.Process) -> AsyncIterator[None]:
    """SIGSTOP, and SIGCONT; its owner may have killed it meanwhile."""
    try:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


async def _slow(process: psutil.Process, for_s: float) -> None:
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        async with _hung(process):
            await asyncio.sleep((1 - SLOW_RUNS) * SLOW_PERIOD_S)
        await asyncio.sleep(SLOW_RUNS * SLOW_PERIOD_S)

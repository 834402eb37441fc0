"""Who competes, what they are asked, and how a turn of theirs is measured."""

import asyncio
import itertools
import os
import resource
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.support.canned_upstream import INSTANT, CannedUpstream
from benchmarks.support.connection_rounds import Turn, take
from benchmarks.support.gateways.contenders import KEY, Contender, Running
from benchmarks.support.lean_connections import NUMBER

START_S = 90.0
BODY_BYTES = 1024
WHOLE_TOKENS, STREAM_TOKENS = 16, 64
DIRECT = "direct"
_SENTENCE = "A guest asks for a table by the window, and how long the wait will be. "


@dataclass(frozen=True)
class Scale:
    """How much of everything.

    Attributes:
        rounds: Of all gateways in turn.
        turn_s: About so long a turn takes, whoever's it is.
        paced_streams: To try, fewest first; after the first number that is not held no more are tried.
        paced_tokens: Of each of these streams.
        prompt_tokens: Of a long prompt, about.
    """

    rounds: int = 7
    turn_s: float = 1.5
    paced_streams: Sequence[int] = (100, 300, 1_000, 2_000, 3_000)
    paced_tokens: int = 100
    prompt_tokens: int = 100_000


@dataclass
class Runner:
    """One that is asked: a gateway, or the upstream itself.

    Attributes:
        name: Its name.
        port: Where.
        gateway: Its processes; None: it is the upstream.
    """

    name: str
    port: int
    gateway: Running | None = None

    def cpu_s(self) -> float:
        """CPU time up to now; of the upstream none is counted."""
        return self.gateway.cpu_s() if self.gateway else 0.0

    def memory_mib(self) -> float:
        """What it holds now; of the upstream none is counted."""
        return self.gateway.memory_mib() if self.gateway else 0.0

    def request(
        self, model: str = INSTANT, *, tokens: int = WHOLE_TOKENS, stream: bool = False, key: str = KEY, text: str = ""
    ) -> bytes:
        """A chat request of 1 KB as it goes over the wire, or of the text that is given."""
        body = {"model": model, "max_tokens": tokens, "messages": [{"role": "user", "content": text}]}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if not text:
            left = BODY_BYTES - len(msgspec.json.encode(body))
            text = NUMBER + _SENTENCE * (left // len(_SENTENCE) + 1)
            body["messages"] = [{"role": "user", "content": text[:left]}]
        content = msgspec.json.encode(body)
        more = self.gateway.headers.items() if self.gateway else ()
        lines = [
            *("POST /v1/chat/completions HTTP/1.1", f"host: 127.0.0.1:{self.port}", "accept: */*"),
            *("content-type: application/json", f"authorization: Bearer {key}", f"content-length: {len(content)}"),
            *(f"{name}: {value}" for name, value in more),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + content


@dataclass(frozen=True)
class Taken:
    """A turn, and what it cost.

    Attributes:
        turn: What came back.
        cpu_s: Of the gateway's processes.
    """

    turn: Turn
    cpu_s: float

    @property
    def per_s(self) -> float:
        """Answers per second, or none when any failed."""
        return self.turn.requests / self.turn.seconds if not self.turn.failures else 0.0

    @property
    def cpu_us(self) -> float:
        """Of each request."""
        return self.cpu_s / max(1, self.turn.requests) * 1e6


class Field:
    """Everybody who takes part in a run.

    Args:
        runners: In the order of the tables; the first is the upstream itself.
        upstream: Behind all of them.
        scale: How much they get to do.
    """

    def __init__(self, runners: Sequence[Runner], upstream: CannedUpstream, scale: Scale) -> None:
        self.runners = runners
        self.upstream = upstream
        self.scale = scale

    @property
    def gateways(self) -> Sequence[Runner]:
        """All but the upstream itself."""
        return [runner for runner in self.runners if runner.gateway]

    async def rounds(
        self, request: Callable[[Runner], Iterator[bytes]], lanes: int, runners: Sequence[Runner] | None = None
    ) -> dict[str, list[Taken]]:
        """Everybody's turns; each has about the same length, found in a turn before the first that is not counted.

        Args:
            request: What one is asked, without end.
            lanes: Connections.
            runners: Who; None: all.
        """
        runners = list(self.runners if runners is None else runners)
        counts = {runner.name: await self._count(runner, request, lanes) for runner in runners}
        taken: dict[str, list[Taken]] = {runner.name: [] for runner in runners}
        for number in range(self.scale.rounds):
            for runner in runners if number % 2 else reversed(runners):
                requests = itertools.islice(request(runner), counts[runner.name])
                taken[runner.name].append(await turn_of(runner, requests, lanes=lanes))
        return taken

    async def _count(self, runner: Runner, request: Callable[[Runner], Iterator[bytes]], lanes: int) -> int:
        """Requests that fill a turn."""
        count, rate = lanes, 0.0
        for _ in range(4):
            turn = await take(runner.port, itertools.islice(request(runner), count), lanes=lanes)
            rate = turn.requests / turn.seconds
            count = max(lanes, int(rate * self.scale.turn_s))
            if turn.seconds > self.scale.turn_s / 3:
                break
        return count


async def turn_of(runner: Runner, requests: Iterator[bytes], *, lanes: int, spread_s: float = 0.0) -> Taken:
    """One turn, with its CPU time."""
    before_s = runner.cpu_s()
    turn = await take(runner.port, requests, lanes=lanes, spread_s=spread_s)
    return Taken(turn, runner.cpu_s() - before_s)


@asynccontextmanager
async def everybody(
    contenders: Sequence[Contender], folder: Path, scale: Scale, failed: dict[str, str]
) -> AsyncIterator[Field]:
    """Starts all gateways before one upstream, and ends them.

    Args:
        contenders: Who.
        folder: For what they write.
        scale: How much they get to do.
        failed: Gets those that did not start, and what they printed last.
    """
    cores = sorted(os.sched_getaffinity(0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # Thousands of connections, on both of their sides.
    with ExitStack() as stack:
        async with CannedUpstream() as upstream:
            runners = [Runner(DIRECT, upstream.port)]
            for contender in contenders:
                running = stack.enter_context(Running(contender, folder / contender.name, upstream.port))
                runner = Runner(contender.name, running.port, running)
                if await _ready(runner):
                    runners.append(runner)
                else:
                    failed[contender.name] = running.last_words()
                    print(f"{contender.name} did not start:\n{failed[contender.name]}", flush=True)
            os.sched_setaffinity(0, cores[1:] or cores)
            try:
                yield Field(runners, upstream, scale)
            finally:
                os.sched_setaffinity(0, cores)


async def _ready(runner: Runner) -> bool:
    """Waits until it answers."""
    assert runner.gateway is not None
    loop = asyncio.get_running_loop()
    until_s = loop.time() + START_S
    while loop.time() < until_s and not runner.gateway.ended:
        try:
            if not (await take(runner.port, iter([runner.request()]), lanes=1)).failures:
                return True
        except OSError:
            pass
        await asyncio.sleep(0.1)
    return False


def median(values: Sequence[float], digits: int = 1) -> float:
    """Of rounds."""
    return round(statistics.median(values), digits)

"""What is measured of every gateway: one function for each part of `benchmarks.gateway.gateways`."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import numpy as np

from benchmarks.support.canned_upstream import INSTANT, PACE_S, PACED
from benchmarks.support.connection_rounds import take
from benchmarks.support.gateways.gateway_field import DIRECT, STREAM_TOKENS, Field, Runner, Taken, median, turn_of
from benchmarks.support.lean_connections import NUMBER, distinct
from maitred.identity.keys import make_key

Figures = dict[str, dict[str, float]]
"""Gateway -> figure -> value."""
WHOLE_LANES, STREAM_LANES, FLOOD_LANES = 32, 32, 32
ADDED_ITL_MS = 20.0
"""Over direct streams, of the p99 of those that count as held."""
SPREAD_S = 2.0
"""In which paced streams begin."""
IDLE_S = 3.0
SMALL_LANES = 4
"""Who ask beside a long prompt."""


async def whole(field: Field) -> Figures:
    """Requests of 1 KB and whole answers, one core busy: rate and CPU."""
    taken = await field.rounds(lambda runner: distinct(runner.request()), WHOLE_LANES)
    return {
        name: {
            "per_s": median([sample.per_s for sample in turns]),
            "cpu_us": median([sample.cpu_us for sample in turns]),
            "failures": sum(sample.turn.failures for sample in turns),
        }
        for name, turns in taken.items()
    }


async def streams(field: Field) -> Figures:
    """Streams of 64 tokens that come at once: rate, CPU, and what of it each event takes."""
    taken = await field.rounds(_streams_of(STREAM_TOKENS), STREAM_LANES)
    short = await field.rounds(_streams_of(2), STREAM_LANES)
    figures = {}
    for name, turns in taken.items():
        pairs = zip(turns, short[name], strict=True)
        figures[name] = {
            "per_s": median([sample.per_s for sample in turns]),
            "cpu_us": median([sample.cpu_us for sample in turns]),
            "cpu_us_per_event": median([(one.cpu_us - two.cpu_us) / (STREAM_TOKENS - 2) for one, two in pairs], 2),
            "failures": sum(sample.turn.failures for sample in turns),
            "lost_tokens": sum(sample.turn.requests * STREAM_TOKENS - sample.turn.words for sample in turns),
            "cut": sum(sample.turn.requests - sample.turn.whole for sample in turns),
        }
    return figures


async def latency(field: Field) -> Figures:
    """Whole answers and first tokens, with one caller and with 64: what is added to asking the upstream directly."""
    figures: Figures = {runner.name: {} for runner in field.runners}
    for lanes in (1, 64):
        taken = await field.rounds(lambda runner: distinct(runner.request()), lanes)
        _note_added(figures, taken, f"c{lanes}", lambda one: one.turn.latencies_s)
    taken = await field.rounds(_streams_of(STREAM_TOKENS), 1)
    _note_added(figures, taken, "ttft", lambda one: one.turn.first_s)
    return figures


async def paced(field: Field) -> Figures:
    """More and more streams of 20 tokens a second at once, until a token is lost or late; memory of each."""
    figures: Figures = {runner.name: {"held": 0} for runner in field.runners}
    idle_mib = {runner.name: runner.memory_mib() for runner in field.runners}
    trying = list(field.runners)
    for count in field.scale.paced_streams:
        direct_ms = 0.0
        for runner in list(trying):
            tried = await _try(runner, count, field.scale.paced_tokens, idle_mib[runner.name])
            if runner.gateway is None:
                direct_ms = tried["itl_p99_ms"]
            tried["itl_added_p99_ms"] = round(tried["itl_p99_ms"] - direct_ms, 2)
            good = not (tried["lost_tokens"] or tried["cut"]) and tried["itl_added_p99_ms"] <= ADDED_ITL_MS
            print(f"  {runner.name:10} {tried} {'held' if good else 'not held'}", flush=True)
            if good:
                figures[runner.name] = {"held": count, **tried}
            else:
                figures[runner.name] |= {f"beyond_{key}": value for key, value in tried.items()}
                trying.remove(runner)
    return figures


async def _try(runner: Runner, count: int, tokens: int, idle_mib: float) -> dict[str, float]:
    """So many paced streams at once."""
    requests = itertools.islice(distinct(runner.request(PACED, tokens=tokens, stream=True)), count)
    turning = asyncio.ensure_future(turn_of(runner, requests, lanes=count, spread_s=SPREAD_S))
    await asyncio.sleep(SPREAD_S + tokens * PACE_S / 2)
    used_mib = runner.memory_mib()
    taken = await turning
    turn = taken.turn
    return {
        "streams": count,
        "lost_tokens": count * tokens - turn.words,
        "cut": count - turn.whole,
        "itl_p50_ms": _ms([_percentile(turn.gaps_s, 50)]),
        "itl_p99_ms": _ms([_percentile(turn.gaps_s, 99)]),
        "core": round(taken.cpu_s / turn.seconds, 3),
        "kib_per_stream": round((used_mib - idle_mib) * 1024 / count, 1),
    }


async def idle(field: Field) -> Figures:
    """Memory and CPU while nobody asks for anything."""
    before_s = {runner.name: runner.cpu_s() for runner in field.gateways}
    await asyncio.sleep(IDLE_S)
    return {
        runner.name: {
            "memory_mib": round(runner.memory_mib(), 1),
            "cpu_ms_per_s": round(1e3 * (runner.cpu_s() - before_s[runner.name]) / IDLE_S, 2),
        }
        for runner in field.gateways
    }


async def flood(field: Field) -> Figures:
    """Keys that do not exist: how many are refused in a second, and what one costs."""
    keys = [make_key().plaintext for _ in range(1_000)]
    who = [runner for runner in field.gateways if runner.gateway and runner.gateway.contender.checks_keys]

    def unknown(runner: Runner) -> Iterator[bytes]:
        return itertools.cycle([runner.request(key=key) for key in keys])

    taken = await field.rounds(unknown, FLOOD_LANES, who)
    return {
        name: {
            "rejects_per_s": median([sample.turn.requests / sample.turn.seconds for sample in turns]),
            "cpu_us": median([sample.cpu_us for sample in turns]),
            "let_in": sum(sample.turn.statuses[200] for sample in turns),
        }
        for name, turns in taken.items()
    }


async def long(field: Field) -> Figures:
    """Small requests of four callers, alone and while a fifth sends prompts of 100,000 tokens without a pause."""
    text = NUMBER + "word " * field.scale.prompt_tokens
    alone = await field.rounds(lambda runner: distinct(runner.request()), SMALL_LANES)
    figures: Figures = {}
    for runner in field.runners:
        prompt, over = runner.request(text=text), asyncio.Event()

        def prompts(prompt: bytes = prompt, over: asyncio.Event = over) -> Iterator[bytes]:
            for request in distinct(prompt):
                if over.is_set():
                    return
                yield request

        beside = asyncio.ensure_future(take(runner.port, prompts(), lanes=1))
        count = sum(sample.turn.requests for sample in alone[runner.name]) // field.scale.rounds
        small = await turn_of(runner, itertools.islice(distinct(runner.request()), count), lanes=SMALL_LANES)
        over.set()
        big = await beside
        figures[runner.name] = {
            "small_alone_p99_ms": _ms([_percentile(sample.turn.latencies_s, 99) for sample in alone[runner.name]]),
            "small_beside_p50_ms": _ms([_percentile(small.turn.latencies_s, 50)]),
            "small_beside_p99_ms": _ms([_percentile(small.turn.latencies_s, 99)]),
            "long_p50_ms": _ms([_percentile(big.latencies_s, 50)]),
            "long_ones": big.requests,
            "failures": small.turn.failures + big.failures,
        }
    return figures


PARTS: Mapping[str, Callable[[Field], Awaitable[Figures]]] = {
    "idle": idle,
    "whole": whole,
    "streams": streams,
    "latency": latency,
    "paced": paced,
    "flood": flood,
    "long": long,
}


def _streams_of(tokens: int) -> Callable[[Runner], Iterator[bytes]]:
    return lambda runner: distinct(runner.request(INSTANT, tokens=tokens, stream=True))


def _note_added(
    figures: Figures, taken: dict[str, list[Taken]], what: str, times: Callable[[Taken], Sequence[float]]
) -> None:
    """Puts each gateway's percentiles in, and by how much they are above those of the same round's direct turn."""
    for percent in (50, 99):
        direct = [_percentile(times(sample), percent) for sample in taken[DIRECT]]
        for name, turns in taken.items():
            own = [_percentile(times(sample), percent) for sample in turns]
            figures[name][f"{what}_p{percent}_ms"] = _ms(own)
            if name != DIRECT:
                figures[name][f"{what}_added_p{percent}_ms"] = _ms(
                    [this - that for this, that in zip(own, direct, strict=True)]
                )


def _percentile(values_s: Sequence[float], percent: int) -> float:
    return float(np.percentile(np.asarray(values_s), percent)) if len(values_s) else float("nan")


def _ms(values_s: Sequence[float]) -> float:
    return median([value * 1e3 for value in values_s], 3)

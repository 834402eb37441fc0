"""What hints save: the official client against a key that is used up, with our hints and without them.

    callers -> openai SDK, default retries -> wire (counts; may take the hints out) -> gateway -> scripted engine

Several callers share one key whose limit lets through less than they want. Each calls again and again until it has its
answers, at once after a call that failed. The same is played twice at the same time, with two keys that are limited
alike: once as it is, once with ``retry-after``, ``retry-after-ms``, ``x-should-retry`` and ``x-ratelimit-*`` taken out
of every answer before the SDK sees it, as a gateway without them would leave it. Then keys whose budget is used up.

Counted are the requests that reach the gateway for every answer, the calls that the SDK gave up, and how long a caller
needed for all of its answers.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import uvloop

from benchmarks.support.installation import MODEL, Gateway, Key, Organisation, Plan, installed
from benchmarks.support.report import Report, percentiles
from maitred.testing.script import EngineScript, ScriptedAnswer

SEED = 0
"""Nothing is drawn here; the SDK and the gateway draw their own jitter."""
PROMPT, OUTPUT_TOKENS = "one two three four", 60
HINTS = ("retry-after", "retry-after-ms", "x-should-retry")
STANDING = "x-ratelimit-"
PATIENCE_S = 120.0
"""A group that has not got its answers by then is stopped; full runs end in less."""
QUOTA_CALLS = 20
ANSWERS, QUICK_ANSWERS = (4, 8), (2, 3)
"""Of each caller whose key allows few, and of each whose key allows many."""


@dataclass(frozen=True)
class CallerGroup:
    """Callers who share one key.

    Attributes:
        callers: How many there are.
        answers: What each of them wants.
        limits: Of the key.
    """

    callers: int
    answers: int
    limits: Mapping[str, Any]


def caller_groups(*, quick: bool) -> dict[str, CallerGroup]:
    """Who is played; all of them at the same time."""
    few, many = QUICK_ANSWERS if quick else ANSWERS
    return {
        "12 requests a minute, 2 callers": CallerGroup(2, few, _requests(12)),
        "60 requests a minute, 8 callers": CallerGroup(8, many // 2 if quick else many, _requests(60)),
        "4,000 tokens a minute, 8 callers": CallerGroup(
            8, many // 2 if quick else many, {"tokens_per_minute": 4000, "burst": {"tokens_per_minute": 200}}
        ),
        "600 requests a minute, 16 callers": CallerGroup(16, many * 4, _requests(600)),
    }


def _requests(rate: int) -> dict[str, Any]:
    return {"requests_per_minute": rate, "burst": {"requests_per_minute": 2}}


class Wire(httpx2.AsyncHTTPTransport):
    """Carries requests, counts them, and takes the hints out of the answers if asked for."""

    def __init__(self, *, hints: bool) -> None:
        super().__init__()
        self._hints = hints
        self.carried = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """See httpx2, which the SDK stands on."""
        self.carried += 1
        response = await super().handle_async_request(request)
        if not self._hints:
            for name in [name for name in response.headers if name in HINTS or name.startswith(STANDING)]:
                del response.headers[name]
        return response


@dataclass
class Seen:
    """What a group of callers went through."""

    answers: int = 0
    given_up: int = 0
    requests: int = 0
    caller_s: list[float] = field(default_factory=list)

    @property
    def requests_per_answer(self) -> float:
        """Requests that reached the gateway, for every answer."""
        return self.requests / self.answers if self.answers else float("inf")

    @property
    def answered_share(self) -> float:
        """Calls of the SDK that ended with an answer."""
        return self.answers / (self.answers + self.given_up)

    def figures(self) -> dict[str, Any]:
        """For the report."""
        return {
            "answers": self.answers,
            "calls_given_up": self.given_up,
            "requests": self.requests,
            "requests_per_answer": round(self.requests_per_answer, 2),
            "answered_share": round(self.answered_share, 3),
            "caller_s": percentiles(self.caller_s),
        }


def main() -> int:
    """Runs the benchmark; the exit code says whether hints keep what they promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer answers")
    arguments = parser.parse_args()
    report = Report("retries", seed=SEED, quick=arguments.quick)
    uvloop.run(play(caller_groups(quick=arguments.quick), report))
    return report.finish()


async def play(played: Mapping[str, CallerGroup], report: Report) -> None:
    """Starts all groups, and then those without a budget."""
    sides = [(name, hints) for name in played for hints in (True, False)]
    keys = {side: Key(limits=played[side[0]].limits) for side in sides}
    spenders = {hints: Key(limits={"usd_total": 0.000001}) for hints in (True, False)}
    declared = {f"k{number}": key for number, key in enumerate([*keys.values(), *spenders.values()])}
    plan = Plan(
        organisations={"callers": Organisation(declared)},
        settings={
            "admission": {"prices": {MODEL: {"prompt": 1, "output": 1}}},
            "server": {"allow_unauthenticated": True},  # for the metrics
        },
        script=EngineScript(answers=[ScriptedAnswer(tokens_per_step=OUTPUT_TOKENS)]),
    )
    async with installed(plan) as installation:
        (gateway,) = installation.gateways
        seen = await asyncio.gather(
            *(_play_group(gateway, keys[side], played[side[0]], hints=side[1]) for side in sides)
        )
        refused = {hints: await _without_money(gateway, key, hints=hints) for hints, key in spenders.items()}
        metrics = await asyncio.to_thread(gateway.metrics)
    by_side = dict(zip(sides, seen, strict=True))
    _judge(by_side, refused, report)
    counted = sum(count for sample, count in metrics.items() if _is_a_completion(sample))
    sent = sum(group.requests for group in seen) + sum(refused.values())
    report.require("requests that client and gateway count differently", abs(counted - sent), at_most=0)


def _is_a_completion(sample: str) -> bool:
    return sample.startswith("maitred_requests_total") and 'route="/v1/completions"' in sample


def _judge(by_side: Mapping[tuple[str, bool], Seen], refused: Mapping[bool, int], report: Report) -> None:
    """Figures and bars: each group with hints against the same without."""
    for name in dict.fromkeys(name for name, _ in by_side):
        hinted, left_alone = by_side[name, True], by_side[name, False]
        report.figures[name] = {"with_hints": hinted.figures(), "without": left_alone.figures()}
        ratio = hinted.requests_per_answer / left_alone.requests_per_answer
        report.require(f"{name}: requests per answer, with hints / without", ratio, at_most=1)
        more = hinted.answered_share / left_alone.answered_share
        report.require(f"{name}: share of calls answered, with hints / without", more, at_least=1)
        print(f"{name}: {report.figures[name]}")
    per_call = {hints: count / QUOTA_CALLS for hints, count in refused.items()}
    report.figures["budget used up"] = {
        "with_hints": {"requests_per_call": per_call[True]},
        "without": {"requests_per_call": per_call[False]},
    }
    report.require("budget used up: requests per call, with hints", per_call[True], at_most=1)
    print(f"budget used up: {report.figures['budget used up']}")


async def _play_group(gateway: Gateway, key: Key, group: CallerGroup, *, hints: bool) -> Seen:
    """All callers of one key, until each has its answers."""
    seen, wire = Seen(), Wire(hints=hints)
    async with _client(gateway, key, wire) as client:
        began_s = time.monotonic()

        async def caller() -> None:
            answers = 0
            while answers < group.answers and time.monotonic() < began_s + PATIENCE_S:
                try:
                    await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=OUTPUT_TOKENS)
                except openai.RateLimitError:
                    seen.given_up += 1
                else:
                    answers += 1
                    seen.answers += 1
            seen.caller_s.append(time.monotonic() - began_s)

        await asyncio.gather(*(caller() for _ in range(group.callers)))
    seen.requests = wire.carried
    return seen


async def _without_money(gateway: Gateway, key: Key, *, hints: bool) -> int:
    """Requests that some calls cause whose budget is used up."""
    wire = Wire(hints=hints)
    async with _client(gateway, key, wire) as client:

        async def call() -> None:
            try:
                await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=OUTPUT_TOKENS)
            except openai.RateLimitError as error:
                if error.code != "insufficient_quota":
                    raise
            else:
                raise RuntimeError("A budget of nothing has paid for an answer.")

        await asyncio.gather(*(call() for _ in range(QUOTA_CALLS)))
    return wire.carried


def _client(gateway: Gateway, key: Key, wire: Wire) -> openai.AsyncOpenAI:
    """The official client as it comes, but for the wire."""
    return openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=key.secret, http_client=httpx2.AsyncClient(transport=wire, timeout=60)
    )


if __name__ == "__main__":
    sys.exit(main())

"""The exact caches of gateways side by side: what they find, what they mix up, and what a hit takes.

All pass requests on to the same upstream, which answers at once and counts what reaches it (see
`benchmarks.support.canned_upstream`): a second request that does not reach it was answered from the cache. That is
right if it asks the same, and wrong if it asks for something else or comes from another tenant. LiteLLM gets its two
teams from a function, since its own keys need a database. All run on one core and take turns.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.support.canned_upstream import INSTANT
from benchmarks.support.connection_rounds import take
from benchmarks.support.gateways.contenders import KEY, Contender, Place
from benchmarks.support.gateways.gateway_field import Field, Runner, Scale, everybody, turn_of
from benchmarks.support.gateways.gateway_set import CONTENDERS
from benchmarks.support.report import Report, percentiles
from maitred.identity.keys import make_key

OTHER_KEY = make_key().plaintext
"""Of another tenant than `KEY`."""
LANES = 8
CHANGES: Mapping[str, object] = {
    "max_tokens": 5,
    "seed": 2,
    "stop": ["x"],
    "top_p": 0.5,
    "logit_bias": {"5": 10},
    "frequency_penalty": 0.5,
    "response_format": {"type": "json_object"},
    "logprobs": True,
    "reasoning_effort": "low",
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "guided_regex": "x+",
    "chat_template_kwargs": {"enable_thinking": False},
}
"""Field of the second request -> its value; the first request does not have it. Each changes what servers answer."""
_AUTH = """
from litellm.proxy._types import UserAPIKeyAuth

async def by_key(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, team_id=f"team-{api_key[-8:]}", user_id=f"user-{api_key[-8:]}")
"""
_texts = count(1)


async def compare(folder: Path, scale: Scale, requests: int, report: Report) -> None:
    """Runs this part; nothing of it is a bar but that maitred makes no mistake.

    Args:
        folder: For what the gateways write.
        scale: How many rounds.
        requests: Of a turn.
        report: Gets the figures.
    """
    figures: dict[str, Any] = {"how": {}, "failed": {}, "gateways": {}}
    report.figures["rivals"] = figures
    contenders = [one for one in _with_caches() if one.installed()]
    figures["not_installed"] = [one.name for one in _with_caches() if not one.installed()]
    async with AsyncExitStack() as stack:
        field = await stack.enter_async_context(everybody(contenders, folder, scale, figures["failed"]))
        for runner in field.gateways:
            assert runner.gateway is not None
            figures["how"][runner.name] = runner.gateway.contender.how()
            figures["gateways"][runner.name] = await _found_and_mixed_up(field, runner)
        cpu_us: dict[tuple[str, bool], list[float]] = {}
        for number in range(scale.rounds + 1):
            for runner in field.gateways if number % 2 else reversed(field.gateways):
                for stream in (False, True):
                    same = repeat(_request(runner, f"Text {stream}", stream=stream), requests)
                    taken = await turn_of(runner, same, lanes=LANES)
                    if number:
                        cpu_us.setdefault((runner.name, stream), []).append(taken.cpu_us)
        for runner in field.gateways:
            for stream in (False, True):
                before = field.upstream.requests
                turn = await take(
                    runner.port, repeat(_request(runner, f"Text {stream}", stream=stream), requests), lanes=1
                )
                figures["gateways"][runner.name]["stream" if stream else "whole"] = {
                    "cpu_us": round(statistics.median(cpu_us[runner.name, stream]), 1),
                    "latency_ms": {rank: round(1e3 * s, 3) for rank, s in percentiles([*turn.latencies_s]).items()},
                    "failures": turn.failures,
                    "reached_the_upstream": field.upstream.requests - before,
                }
    for name, found in figures["gateways"].items():
        print(f"{name:10} {found}", flush=True)
    ours = figures["gateways"]["maitred"]
    report.require("maitred: answers to other requests", len(ours["mixed_up"]), at_most=0)
    report.require("maitred: equal requests that were not found", len(ours["not_found"]), at_most=0)


async def _found_and_mixed_up(field: Field, runner: Runner) -> dict[str, Any]:
    equal: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "whole after whole": ({}, {}),
        "stream after stream": ({"stream": True}, {"stream": True}),
        "stream after whole": ({}, {"stream": True}),
        "whole after stream": ({"stream": True}, {}),
    }
    other: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        name: ({}, {"more": {name: value}}) for name, value in CHANGES.items()
    }
    other["another tenant"] = ({}, {"key": OTHER_KEY})
    not_found: list[str] = []
    mixed_up: list[str] = []
    refused: list[str] = []
    for pairs, wrong, is_found_right in ((equal, not_found, True), (other, mixed_up, False)):
        for name, (first, second) in pairs.items():
            text = f"Pair {next(_texts)}"
            await take(runner.port, iter([_request(runner, text, **first)]), lanes=1)
            before = field.upstream.requests
            turn = await take(runner.port, iter([_request(runner, text, **second)]), lanes=1)
            if turn.failures:
                refused.append(name)
            elif (field.upstream.requests == before) != is_found_right:
                wrong.append(name)
    return {"not_found": not_found, "mixed_up": mixed_up, "refused": refused}


def _request(
    runner: Runner, text: str, *, stream: bool = False, key: str = KEY, more: Mapping[str, object] | None = None
) -> bytes:
    fields: dict[str, Any] = {"model": INSTANT, "max_tokens": 16, "temperature": 0}
    fields["messages"] = [{"role": "user", "content": text}]
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    content = msgspec.json.encode({**fields, **(more or {})})
    lines = [
        *("POST /v1/chat/completions HTTP/1.1", f"host: 127.0.0.1:{runner.port}", "accept: */*"),
        *("content-type: application/json", f"authorization: Bearer {key}", f"content-length: {len(content)}"),
        *(f"{name}: {value}" for name, value in (runner.gateway.headers if runner.gateway else {}).items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


def _with_caches() -> Sequence[Contender]:
    """The gateways, each with its exact cache in memory."""
    known = {contender.name: contender for contender in CONTENDERS}

    def maitred(place: Place) -> Sequence[str]:
        command = known["maitred"].command(place)
        path = place.folder / "maitred.yaml"
        config = json.loads(path.read_text())
        config["tenants"]["other"] = {"keys": {"one": {"secret": {"env": "BENCH_OTHER_KEY"}}}}
        path.write_text(json.dumps(config))
        return command

    def litellm(place: Place) -> Sequence[str]:
        command = known["litellm"].command(place)
        path = place.folder / "litellm.yaml"
        config = json.loads(path.read_text())
        config["general_settings"]["custom_auth"] = "auth.by_key"
        config["litellm_settings"] |= {"cache": True, "cache_params": {"type": "local", "ttl": 86_400}}
        path.write_text(json.dumps(config))
        (place.folder / "auth.py").write_text(_AUTH)
        return command

    def portkey_headers(place: Place) -> Mapping[str, str]:
        cache = {"x-portkey-config": json.dumps({"cache": {"mode": "simple", "max_age": 86_400}})}
        return {**known["portkey"].headers(place), **cache}

    environment = {"BENCH_OTHER_KEY": OTHER_KEY}
    return (
        replace(known["maitred"], command=maitred, environment=environment),
        replace(known["litellm"], command=litellm),
        replace(known["portkey"], headers=portkey_headers),
    )

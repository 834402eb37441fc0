"""Attacks that a stranger, or a neighbour of the same organisation, can start with nothing but HTTP.

Each runs until it is cancelled. It is as small as it can be and still do its harm: its sender shares the machine with
the server, and what the sender computes is no part of the attack. So bodies are made once, and little is read.

What holds against each is a test without a clock:

- patterns, grammars, schemas: `tests/unit/admission/grammars`, `tests/unit/text/grammar/test_reading.py`
- large and compressed bodies: `tests/unit/api/test_large_body.py`, `tests/unit/api/test_compression.py`
- slow, endless and odd heads, bodies and trailers: `tests/integration/gateway/test_http_protocol.py`, `test_gateway.py`
- many sequences: `tests/unit/dispatch/test_dispatcher.py`, `tests/unit/engine/scheduler/test_overcommit.py`
- requests in flight and waiting, viewers: `tests/unit/api/test_in_flight.py`, `tests/unit/dispatch/test_dispatcher.py`,
  `tests/unit/console/test_pulse.py`
- unknown keys: `tests/unit/identity/test_oidc.py`, `tests/integration/accounts/test_oidc.py`
- streams that are not read, disconnects: `tests/integration/gateway/test_stalled.py`, `test_cancellation.py`
- prompts that fill the window, long lists: `tests/property/engine/test_scheduler_fairness.py`,
  `tests/integration/engine/test_embeddings.py`
"""

import asyncio
import gzip
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.support.chaos.attacker import Attacker
from benchmarks.support.concurrent_callers import PLAIN_TOKENS
from benchmarks.support.installation import MODEL
from benchmarks.support.single_request import CHAT, COMPLETIONS
from benchmarks.support.stalled_readers import StalledReaders
from benchmarks.support.tenant_gateway import SLOTS

EMBEDDINGS, LIVE = "/v1/embeddings", "/admin/v1/live"
ENCODER = "encoder"
WINDOW = 2048
"""Tokens of the bundled model."""
SENDERS = 4
"""Connections at once, of attacks that need no more."""
SLOW_CONNECTIONS, DRIP_S = 100, 0.5
IN_FLIGHT = 400
"""Requests at once of the attack that wants all of `server.max_in_flight`."""
VIEWERS = 80
NEVER_READ = 40
KEYS_PER_S, DISCONNECTS_PER_S = 100, 50
SEQUENCES_TOKENS = 64


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        name: For people.
        run: Attacks until it is cancelled.
        neighbour: Whether the attacker is another team of the victim's organisation.
    """

    name: str
    run: Callable[[Attacker], Awaitable[None]]
    neighbour: bool = False


def chat(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Body of a small chat, with further fields."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **fields}


def encoded(**fields: Any) -> bytes:  # noqa: ANN401 - JSON
    """The same as bytes."""
    return json.dumps(chat(**fields)).encode()


async def regexes(attacker: Attacker) -> None:
    """Short patterns whose automata are huge, or whose first step is; no two alike."""

    def patterns() -> Iterator[str]:
        for number in itertools.count():
            yield f"a{{1000}}{{{1000 - number % 900}}}"
            yield f"((a{{0,{number % 90 + 10}}}){{0,100}}){{0,100}}b"
            yield f"(a+)+(b+)+(c{number}+)+d"
            yield "(x?){400}" + "x" * (number % 300 + 100)
            yield "|".join(f"word{number}-{each}[a-z]{{0,50}}" for each in range(1000))
            yield f"(.*a.{{{number % 400 + 12}}})+"

    await attacker.send_each((chat(structured_outputs={"regex": each}) for each in patterns()), SENDERS)


async def grammars(attacker: Attacker) -> None:
    """Grammars that are ambiguous, deep, or long; no two alike."""

    def texts() -> Iterator[str]:
        for number in itertools.count():
            yield f'start: e\ne: e e | e e e | "a{number}" | ""'
            rules = "\n".join(f"r{each}: r{each + 1} r{each + 1} | r{each + 1}" for each in range(40))
            yield f'start: r0\n{rules}\nr40: "{number}"'
            yield f'start: ("a" | "b{number}"){{1,5000}}'
            yield "start: " + " | ".join(f'"{number}-{each}"' for each in range(4000))

    await attacker.send_each((chat(structured_outputs={"grammar": each}) for each in texts()), SENDERS)


async def schemas(attacker: Attacker) -> None:
    """JSON schemas that are deep, wide, or multiply out; no two alike."""

    def nested(depth: int, name: str) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(depth):
            schema = {"type": "object", "properties": {name: schema}, "required": [name]}
        return schema

    def made() -> Iterator[dict[str, Any]]:
        for number in itertools.count():
            yield nested(200, f"n{number}")
            yield {"type": "object", "properties": {f"p{number}-{each}": {"type": "string"} for each in range(1500)}}
            either = {"anyOf": [{"type": "string", "maxLength": 900 + number % 90}, {"type": "integer"}]}
            yield {"allOf": [{"properties": {f"q{each}": either}} for each in range(60)], "type": "object"}
            yield {"enum": [f"e{number}-{each}" for each in range(5000)]}
            yield {"type": "array", "maxItems": 5000, "minItems": 4000, "items": {"pattern": f"^(a|b{number}){{90}}$"}}
            yield {"$defs": {"t": {"anyOf": [{"items": {"$ref": "#/$defs/t"}}] * 30}}, "$ref": "#/$defs/t"}

    await attacker.send_each((chat(structured_outputs={"json": each}) for each in made()), SENDERS)


async def many_grammars(attacker: Attacker) -> None:
    """Harmless schemas, each a new one, so that no cache helps."""
    bodies = (
        chat(structured_outputs={"json": {"properties": {f"member{number}": {"type": "integer"}}, "type": "object"}})
        for number in itertools.count()
    )
    await attacker.send_each(bodies, SENDERS)


@cache
def large_requests() -> list[tuple[str, bytes]]:
    """Paths and bodies of some MiB each: of messages, parts, keys, tools, tokens, brackets, or one long word."""
    message = {"role": "user", "content": "a"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    return [
        (CHAT, encoded(messages=[message] * 20_000)),
        (CHAT, encoded(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}])),
        (CHAT, encoded(messages=[message] * 200_000)),
        (CHAT, encoded(metadata={str(number): "1" for number in range(40_000)})),
        (CHAT, encoded(metadata={str(number): "1" for number in range(500_000)})),
        (CHAT, encoded(logit_bias={str(number): 1 for number in range(40_000)})),
        (CHAT, encoded(tools=[tool] * 10_000)),
        (CHAT, encoded(messages=[{"role": "user", "content": "a" * 9_000_000}])),
        (COMPLETIONS, json.dumps({"model": MODEL, "prompt": [5] * 1_000_000}).encode()),
        (COMPLETIONS, b'{"model": "' + MODEL.encode() + b'", "prompt": ' + b"[" * 2_000_000),
    ]


@cache
def bomb() -> bytes:
    """Some KiB of gzip, which are 100 MiB once they are decompressed."""
    return gzip.compress(b'{"model": "' + b"a" * (100 << 20))


async def large_bodies(attacker: Attacker) -> None:
    """Some MiB each, of which few are valid."""
    await attacker.send_all(large_requests(), SENDERS)


async def compressed_bodies(attacker: Attacker) -> None:
    """Some KiB each, which are far too large once they are decompressed."""
    await attacker.send_all([(CHAT, bomb())], SENDERS, headers={"Content-Encoding": "gzip"})


async def slow_senders(attacker: Attacker) -> None:
    """Heads and bodies that come byte by byte, over many connections, with and without a key that is known."""
    head = attacker.head(CHAT, length=10_000)

    async def drip(number: int) -> None:
        async with attacker.connection() as (_, writer):
            writer.write(head if number % 2 else head[:20])
            for byte in itertools.cycle(b"a"):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(DRIP_S)

    await attacker.repeat(SLOW_CONNECTIONS, drip, pause_s=DRIP_S)


async def endless_heads(attacker: Attacker) -> None:
    """Heads, trailers and extensions of chunks without end, and heads that are just within the limit."""
    chunked = attacker.head(CHAT, length=None)
    beginnings = [
        (b"POST / HTTP/1.1\r\nHost: x\r\n", b"x: " + b"a" * 200 + b"\r\n"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nx: ", b"a" * 1000),
        (chunked + b"2\r\n{}\r\n0\r\n", b"x: " + b"a" * 200 + b"\r\n"),
        (chunked + b"2\r\n{}\r\n0\r\nx: ", b"a" * 1000),
        (chunked + b"2;", b"a" * 1000),
    ]
    full = attacker.head(CHAT, length=2, headers={f"x-{number}": "a" * 50 for number in range(900)}) + b"{}"

    async def send(number: int) -> None:
        if number % (len(beginnings) + 1) == len(beginnings):
            await attacker.exchange(full)
            return
        beginning, piece = beginnings[number % (len(beginnings) + 1)]
        async with attacker.connection() as (reader, writer):
            writer.write(beginning)
            for _ in range(2000):
                if writer.is_closing() or reader.at_eof():
                    return
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)

    await attacker.repeat(2 * (len(beginnings) + 1), send, pause_s=0.05)


async def sequences(attacker: Attacker) -> None:
    """One request of 2,048 sequences after the other."""
    body = {"model": MODEL, "max_tokens": SEQUENCES_TOKENS, "ignore_eos": True, "n": SLOTS, "temperature": 1}
    prompts = [f"Tell me of river {number}." for number in range(2048 // SLOTS)]
    await attacker.send_all([(COMPLETIONS, json.dumps(body | {"prompt": prompts}).encode())], 1)


async def fill_in_flight(attacker: Attacker) -> None:
    """As many requests at once as the server takes, and more."""
    await attacker.send_all([(CHAT, encoded(max_tokens=500, ignore_eos=True))], IN_FLIGHT, pause_s=1.0)


async def viewers(attacker: Attacker) -> None:
    """More viewers of the live state than there are places."""
    await attacker.get_all(LIVE, VIEWERS, headers={"Accept": "text/event-stream"}, pause_s=1.0)


async def unknown_keys(attacker: Attacker) -> None:
    """Keys that nobody has; no two alike."""
    keys = (f"sk-mtd-{number:016x}-{'x' * 40}" for number in itertools.count())
    body = encoded()

    async def send(_: int) -> None:
        await attacker.exchange(attacker.head(CHAT, length=len(body), key=next(keys)) + body)

    await attacker.repeat(SENDERS, send, pause_s=SENDERS / KEYS_PER_S)


async def never_read(attacker: Attacker) -> None:
    """Streams that are opened, and of which the beginning is read only."""
    readers = StalledReaders(attacker.url, attacker.key)
    try:
        await readers.arrive(NEVER_READ)
        attacker.counts["stalled"] += NEVER_READ
        await asyncio.Event().wait()
    finally:
        readers.leave()


async def disconnects(attacker: Attacker) -> None:
    """Requests whose connections are closed as soon as they are sent, or soon after."""
    rng = random.Random(1)
    bodies = [encoded(max_tokens=200, stream=stream, ignore_eos=True) for stream in (True, False)]

    async def send(number: int) -> None:
        body = bodies[number % 2]
        async with attacker.connection() as (_, writer):
            writer.write(attacker.head(CHAT, length=len(body)) + body)
            await writer.drain()
            attacker.counts["left"] += 1
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.02)))

    await attacker.repeat(SENDERS, send, pause_s=SENDERS / DISCONNECTS_PER_S)


async def embeddings(attacker: Attacker) -> None:
    """Lists of as many texts as are allowed, to the encoder beside the victim's model."""
    texts = [f"The kitchen of house {number} closes at ten." for number in range(2048)]
    body = {"model": ENCODER, "input": texts, "encoding_format": "float"}
    await attacker.send_all([(EMBEDDINGS, json.dumps(body).encode())], 2)


async def log_probabilities(attacker: Attacker) -> None:
    """As many log-probabilities of every token as are allowed, of several choices."""
    prompt = random.Random(2).choices(PLAIN_TOKENS, k=500)
    texts = {"model": MODEL, "prompt": prompt, "max_tokens": 200, "logprobs": 5, "n": 4, "ignore_eos": True}
    bodies = [
        (CHAT, encoded(logprobs=True, top_logprobs=20, n=4, max_tokens=200, ignore_eos=True)),
        (CHAT, encoded(logprobs=True, top_logprobs=20, n=4, max_tokens=200, ignore_eos=True, stream=True)),
        (COMPLETIONS, json.dumps(texts).encode()),
    ]
    await attacker.send_all(bodies, SENDERS)


async def longest_prompts(attacker: Attacker) -> None:
    """Prompts that fill the window, each with other tokens, so that no cache helps."""
    rng = random.Random(3)
    prompts = [rng.choices(PLAIN_TOKENS, k=WINDOW - 4) for _ in range(64)]
    bodies = [json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 4}).encode() for prompt in prompts]
    await attacker.send_all([(COMPLETIONS, body) for body in bodies], SENDERS)


ATTACKS = (
    Attack("hostile patterns", regexes),
    Attack("hostile grammars", grammars),
    Attack("hostile schemas", schemas),
    Attack("a new schema each time", many_grammars),
    Attack("large bodies", large_bodies),
    Attack("compressed bodies", compressed_bodies),
    Attack("slow heads and bodies", slow_senders),
    Attack("heads and trailers without end", endless_heads),
    Attack("2,048 sequences", sequences),
    Attack("2,048 sequences of another team", sequences, neighbour=True),
    Attack("more than max_in_flight", fill_in_flight),
    Attack("viewers of the live state", viewers),
    Attack("unknown keys", unknown_keys),
    Attack("streams that are not read", never_read),
    Attack("immediate disconnects", disconnects),
    Attack("long lists to embed", embeddings),
    Attack("log-probabilities of everything", log_probabilities),
    Attack("prompts that fill the window", longest_prompts),
)

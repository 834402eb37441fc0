"""One streamed chat completion over HTTP, with a time stamp on everything that arrives."""

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from maitred.wire.sse import SSEDecoder


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass
class Answer:
    """What a user saw of one request."""

    sent_s: float
    status: int = 0
    arrivals_s: list[float] = field(default_factory=list)
    """Of every chunk with text."""
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    done: bool = False
    """Whether the stream ended with ``[DONE]``."""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first text."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between two pieces of text."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    def complete(self, expected_tokens: int) -> bool:
        """Whether every token came and the stream said so itself."""
        return (
            self.done
            and self.error is None
            and self.finish_reason == "length"
            and self.completion_tokens == expected_tokens
        )


async def stream_chat(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """Sends the request and reads the answer to its end; failures are in the answer, not raised."""
    answer = Answer(sent_s=time.perf_counter())
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = await response.text()
                return answer
            events = SSEDecoder()
            async for data in response.content.iter_any():
                now_s = time.perf_counter()
                for event in events.feed(data):
                    if event.data == "[DONE]":
                        answer.done = True
                    else:
                        _read(answer, _decoder.decode(event.data), now_s)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def _read(answer: Answer, chunk: _Chunk, now_s: float) -> None:
    if chunk.error is not None:
        answer.error = str(chunk.error)
    if chunk.usage is not None:
        answer.prompt_tokens = chunk.usage.prompt_tokens
        answer.completion_tokens = chunk.usage.completion_tokens
    for choice in chunk.choices:
        if choice.delta.content:
            answer.arrivals_s.append(now_s)
            answer.text.append(choice.delta.content)
        if choice.finish_reason:
            answer.finish_reason = choice.finish_reason

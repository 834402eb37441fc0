"""Who tokenises: the event loop itself, or a thread because it would take long."""

import asyncio
import threading

import pytest

from maitred.app.request.tokenized import _thread_pools, tokenize_prompts
from maitred.config.tree import BUNDLED_MODEL
from maitred.core.inference import Conversation
from maitred.core.tenancy import Principal, Scope
from maitred.routing.catalog import ServedModel
from maitred.text.tokenizer import Tokenizer

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "y" * 10_000}}}


class Watched(Tokenizer):
    threads: set[int]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode(text, add_special_tokens=add_special_tokens)

    def encode_conversation(self, messages, **options):
        self.threads.add(threading.get_ident())
        return super().encode_conversation(messages, **options)


@pytest.mark.parametrize(
    ("prompt", "inline"),
    [
        ("word " * 10, True),
        ("word " * 1_000, False),
        (Conversation([{"role": "user", "content": "Hello"}]), True),
        (Conversation([{"role": "user", "content": ""}] * 1_000), False),
        (
            Conversation(
                [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
            ),
            False,
        ),
    ],
)
def test_what_takes_long_is_tokenised_in_a_thread(prompt: str | Conversation, *, inline: bool) -> None:
    tokenizer = Watched.load(BUNDLED_MODEL)
    assert isinstance(tokenizer, Watched)
    tokenizer.threads = set()
    asyncio.run(tokenize_prompts(ServedModel("m", [None], tokenizer), [prompt]))  # type: ignore[arg-type]
    assert (tokenizer.threads == {threading.get_ident()}) is inline


class Slow(Tokenizer):
    """Begins, and goes on when it is let."""

    begun: threading.Event
    go_on: threading.Event
    encoded: int

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.encoded += 1
        self.begun.set()
        assert self.go_on.wait(5)
        return [1]


async def test_a_thread_stops_at_the_next_prompt_when_nobody_waits_for_it() -> None:
    tokenizer = Slow.load(BUNDLED_MODEL)
    assert isinstance(tokenizer, Slow)
    tokenizer.begun, tokenizer.go_on, tokenizer.encoded = threading.Event(), threading.Event(), 0
    model = ServedModel("m", [None], tokenizer)  # type: ignore[arg-type]
    reading = asyncio.create_task(tokenize_prompts(model, ["word " * 1_000] * 1_000))
    assert await asyncio.to_thread(tokenizer.begun.wait, 5)
    reading.cancel()
    await asyncio.wait([reading])
    tokenizer.go_on.set()
    await asyncio.to_thread(_thread_pools[asyncio.get_running_loop()]._pool.shutdown)
    assert tokenizer.encoded == 1


async def test_whoever_has_many_long_prompts_waits_behind_them_alone() -> None:
    tokenizer = Slow.load(BUNDLED_MODEL)
    assert isinstance(tokenizer, Slow)
    tokenizer.begun, tokenizer.go_on, tokenizer.encoded = threading.Event(), threading.Event(), 0
    model = ServedModel("m", [None], tokenizer)  # type: ignore[arg-type]
    order: list[str] = []

    async def read(organisation: str) -> None:
        caller = Principal(key=organisation, tenants=(organisation,), scopes=frozenset({Scope.INFERENCE}))
        await tokenize_prompts(model, ["word " * 100_000], principal=caller)
        order.append(organisation)

    readings = [asyncio.create_task(read("greedy")) for _ in range(60)]
    await asyncio.to_thread(tokenizer.begun.wait, 5)
    readings.append(asyncio.create_task(read("victim")))
    await asyncio.sleep(0)
    tokenizer.go_on.set()
    await asyncio.gather(*readings)
    assert order.index("victim") < 30

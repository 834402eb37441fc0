"""The same questions through four APIs, and their answers in one form, so that all of them can be compared.

Every fifth question has a system text of its tenant's own, and those of no two tenants are equally long. So the prompt
tokens of an answer tell for which tenant it was computed, whatever a header says.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.support.installation import MODEL
from maitred.wire.sse import SSESplitter

PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "completions": "/v1/completions",
}
CANARY_EVERY = 5
_LEAST_TOKENS, _MOST_TOKENS = 8, 24
_WORDS = (
    "table",
    "guest",
    "window",
    "soup",
    "evening",
    "bread",
    "garden",
    "winter",
    "music",
    "river",
    "letter",
    "clock",
)
_VOLATILE = frozenset({"id", "item_id", "created", "created_at", "completed_at", "sequence_number"})
"""Fields that are another answer's own: its names, its times, and the number of pieces in which it came."""
_FINISHES = {"end_turn": "stop", "stop_sequence": "stop", "completed": "stop"}
_FINISHES |= {"max_tokens": "length", "max_output_tokens": "length"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        tenant: Number of the tenant.
        question: Number of the question.
        api: One of `PATHS`.
        streamed: Whether the answer comes as a stream.
    """

    tenant: int
    question: int
    api: str
    streamed: bool

    @property
    def place(self) -> tuple[int, int, bool]:
        """What all requests share that may get one answer: completions have no template, so their prompts differ."""
        return self.tenant, self.question, self.api == "completions"

    @property
    def is_canary(self) -> bool:
        """Whether the prompt has the system text of its tenant."""
        return self.question % CANARY_EVERY == 0

    def body(self, tokens: int | None = None) -> bytes:
        """The request's body.

        Args:
            tokens: Output tokens, neither fewer nor more, in chat; None: no more than what the question wants.
        """
        text, system = _text(self.question), f"You serve {'guest ' * (self.tenant + 1)}well." if self.is_canary else ""
        exact = {"ignore_eos": True} if tokens else {}
        tokens = tokens or _LEAST_TOKENS + self.question % (_MOST_TOKENS - _LEAST_TOKENS + 1)
        fields: dict[str, Any] = {"model": MODEL, "temperature": 0, **exact}
        if self.streamed:
            fields["stream"] = True
        told = [{"role": "user", "content": text}]
        match self.api:
            case "messages":
                fields |= {"messages": told, "max_tokens": tokens} | ({"system": system} if system else {})
            case "responses":
                fields |= {"input": text, "max_output_tokens": tokens} | ({"instructions": system} if system else {})
            case _:
                if self.api == "chat":
                    fields["messages"] = [*([{"role": "system", "content": system}] if system else []), *told]
                else:
                    fields["prompt"] = f"{system} {text}"
                fields["max_tokens"] = tokens
                if self.streamed:
                    fields["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(fields)


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What an answer says, in whichever API.

    Attributes:
        text: Of the only choice.
        finish: ``stop`` or ``length``; empty: the answer has no end.
    """

    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def asked_at_random(seed: int, requests: int, questions: int, tenants: int) -> Iterator[Asked]:
    """Requests of tenants that are all the same in how much they ask; the question of rank r has a weight of 1/r."""
    rng = random.Random(seed)
    weights = [1 / rank for rank in range(1, questions + 1)]
    for question in rng.choices(range(questions), weights, k=requests):
        yield Asked(rng.randrange(tenants), question, rng.choice([*PATHS]), rng.random() < 0.5)


def read_answer(api: str, body: bytes, *, streamed: bool) -> tuple[Answer, bytes]:
    """Reads an answer.

    Returns:
        What it says; and a digest of all its fields but those that are its own (of a stream: of its last event).

    Raises:
        ValueError: It is cut, or no answer.
    """
    if not streamed:
        whole = msgspec.json.decode(body)
        return _READERS[api]([whole]), _digest(whole)
    pieces = SSESplitter().feed(body)
    done = bool(pieces) and pieces[-1] == b"[DONE]"
    events = [msgspec.json.decode(piece) for piece in pieces if piece != b"[DONE]"]
    if not events or (api in ("chat", "completions") and not done):
        raise ValueError("The stream has no end.")
    return _READERS[api](events), _digest(events[-1])


def _openai(events: Sequence[dict[str, Any]]) -> Answer:
    text, finish, usage = "", "", None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            said = choice.get("message") or choice.get("delta") or {}
            text += choice.get("text") or said.get("content") or ""
            finish = choice.get("finish_reason") or finish
    if usage is None:
        raise ValueError("There is no usage.")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(text, finish, usage["prompt_tokens"], cached, usage["completion_tokens"])


def _messages(events: Sequence[dict[str, Any]]) -> Answer:
    text, finish, usage = "", "", {}
    for event in events:
        match event["type"]:
            case "message":
                text = "".join(part["text"] for part in event["content"])
                finish, usage = event["stop_reason"], event["usage"]
            case "content_block_delta":
                text += event["delta"]["text"]
            case "message_delta":
                finish, usage = event["delta"]["stop_reason"], usage | event["usage"]
            case "message_start":
                usage = event["message"]["usage"]
    if events[-1]["type"] not in ("message", "message_stop"):
        raise ValueError("The stream has no end.")
    cached = usage.get("cache_read_input_tokens") or 0
    prompt = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
    return Answer(text, _FINISHES[finish], prompt, cached, usage["output_tokens"])


def _responses(events: Sequence[dict[str, Any]]) -> Answer:
    if len(events) > 1 and events[-1]["type"] not in ("response.completed", "response.incomplete"):
        raise ValueError("The stream has no end.")
    whole = events[-1].get("response") or events[-1]
    text = "".join(part["text"] for item in whole["output"] for part in item.get("content", ()))
    if len(events) > 1:
        came = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        if came != text:
            raise ValueError("The deltas are not the text.")
    finish = (whole.get("incomplete_details") or {}).get("reason") or whole["status"]
    usage = whole["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Answer(text, _FINISHES[finish], usage["input_tokens"], cached, usage["output_tokens"])


_READERS = {"chat": _openai, "completions": _openai, "messages": _messages, "responses": _responses}


def _digest(value: object) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(_lasting(value), order="sorted"), digest_size=16).digest()


def _lasting(value: object) -> object:
    """Returns the value without the fields that are an answer's own."""
    if isinstance(value, dict):
        return {name: _lasting(part) for name, part in value.items() if name not in _VOLATILE}
    if isinstance(value, list):
        return [_lasting(part) for part in value]
    return value


def _text(question: int) -> str:
    rng = random.Random(question)
    return f"Question {question}: " + " ".join(rng.choices(_WORDS, k=12)) + "?"

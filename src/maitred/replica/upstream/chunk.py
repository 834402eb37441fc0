"""Reads the events of OpenAI's streams: their JSON, the content of a message, and log-probabilities.

Events are read as plain values, so nothing that a server sends is lost. `PlainChunk` is the form of chunks that have
nothing beside what the gateway decides; the decoder alone reads them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from maitred.core.inference import TokenLogprob, TokenScore
from maitred.replica.upstream.errors import make_replica_lost
from maitred.wire.reported_usage import is_empty
from maitred.wire.sse import encode_text

_STRING = re.compile(rb' *("(?:[^"\\]|\\.)*")', re.DOTALL)
"""A JSON string."""


def parse_index(value: object) -> int | None:
    """Returns the index of a choice, which some servers write as text or as a float; None: it is none."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


class MessageParts(msgspec.Struct):
    """Content of a message that came as a list of parts."""

    text: str = ""
    thought: str = ""
    refusal: str = ""
    images: list[Any] = []
    others: list[Any] = []
    """Parts that are neither text nor image, as the server sent them."""

    def add(self, content: Any) -> None:  # noqa: ANN401 - whatever JSON can be
        """Adds a part, or a list of parts.

        Raises:
            ReplicaLost: It is neither.
        """
        match content:
            case str():
                self.text += content
            case list():
                for part in content:
                    self.add(part)
            case {"type": "thinking" | "reasoning" | "reasoning_text" | "summary_text" as kind}:
                inner = next(
                    (content[name] for name in (kind, "thinking", "reasoning", "text", "content") if name in content),
                    "",
                )
                parts = MessageParts()
                parts.add(inner)
                self.thought += parts.all_text
                self.images += parts.images
                self.others += parts.others
                self._add_rest(content, (kind, "thinking", "reasoning", "text", "content"))
            case {"text": str() as text}:
                self.text += text
                self._add_rest(content, ("text",))
            case {"type": "refusal", "refusal": str() as text}:
                self.refusal += text
            case {"type": "image_url" | "image"}:
                self.images.append(content)
            case dict():
                if content:
                    self.others.append(content)
            case None:
                pass
            case _:
                raise make_replica_lost("it sent a content that is neither text nor a list of parts")

    @property
    def all_text(self) -> str:
        """All texts, for a member that has but one kind of them."""
        return self.thought + self.text + self.refusal

    def _add_rest(self, part: Mapping[str, Any], read: Sequence[str]) -> None:
        """Keeps what a part of text has beside its text, such as its annotations."""
        rest = {
            name: value for name, value in part.items() if name not in (*read, "type", "index") and not is_empty(value)
        }
        if rest:
            self.others.append({"type": part.get("type", "text"), **rest})


class _PlainDelta(msgspec.Struct, forbid_unknown_fields=True):
    content: str | None = None
    role: str | None = None
    tool_calls: None = None
    refusal: None = None
    reasoning_content: None = None
    reasoning: None = None
    function_call: None = None


class _PlainChoice(msgspec.Struct, forbid_unknown_fields=True):
    delta: _PlainDelta
    index: Annotated[int, msgspec.Meta(ge=0, le=0)] | None = None
    finish_reason: str | None = None
    logprobs: None = None
    stop_reason: None = None
    token_ids: None = None
    matched_stop: None = None


class PlainChunk(msgspec.Struct, forbid_unknown_fields=True):
    """Chunk that has nothing but a role, a text and the end of one choice, and a usage, beside an id and a time.

    Whatever else a chunk has makes its decoding fail, so no member is missed.
    """

    choices: Annotated[list[_PlainChoice], msgspec.Meta(max_length=1)]
    usage: dict[str, Any] | None = None
    id: msgspec.Raw = msgspec.Raw()
    object: msgspec.Raw = msgspec.Raw()
    created: msgspec.Raw = msgspec.Raw()
    model: msgspec.Raw = msgspec.Raw()
    system_fingerprint: None = None
    service_tier: None = None
    prompt_logprobs: None = None
    prompt_token_ids: None = None


decode_plain_chunk = msgspec.json.Decoder(PlainChunk).decode
"""Decodes a chunk that is a `PlainChunk`; raises `msgspec.MsgspecError` for any other."""
decode_text = msgspec.json.Decoder(str).decode
"""Decodes a JSON string."""


def strip_padding(event: bytes) -> bytes:
    """Returns a chunk without `obfuscation` at its end, which hides the length of the text on the connection."""
    at = event.rfind(b',"obfuscation":"')
    if at < 0 or event.find(b'"', at + 16) != len(event) - 2:
        return event
    return event[:at] + b"}"


def split_at_text(event: bytes, member: bytes, text: str) -> tuple[bytes, bytes] | None:
    """Returns what stands before and behind the text of a chunk; None if its place is not certain.

    Each event with the same bytes before and behind its text has the same members with the same values.

    Args:
        event: Data of an event.
        member: Name of the member that has the text.
        text: The text.
    """
    key = b'"%b":' % member
    if event.count(key) != 1:
        return None
    begin = event.index(key) + len(key)
    if event.startswith(b" ", begin):
        begin += 1
    try:
        usual = encode_text(text)
        if event.startswith(usual, begin):  # most servers write a text as it is written here
            return event[:begin], event[begin + len(usual) :]
        string = _STRING.match(event, begin)
        if string is None or decode_text(string.group(1)) != text:
            return None
    except (msgspec.MsgspecError, UnicodeError):
        return None
    return event[: string.start(1)], event[string.end(1) :]


_READ_OF_TOKEN = frozenset({"token", "logprob", "bytes", "top_logprobs"})


class _TopLogprob(msgspec.Struct):
    token: str
    logprob: float | None = None
    bytes: list[Annotated[int, msgspec.Meta(ge=0, le=255)]] | None = None

    def to_logprob(self, sent: Mapping[str, Any]) -> TokenLogprob:
        """Returns the log-probability with the other members of the entry that was sent."""
        members = {name: value for name, value in sent.items() if name not in _READ_OF_TOKEN} or None
        raw = bytes(self.bytes) if self.bytes is not None else self.token.encode()
        return TokenLogprob(self.token, raw, self.logprob, members)


class _TokenLogprobs(_TopLogprob):
    top_logprobs: list[_TopLogprob] | None = None


class Logprobs(msgspec.Struct):
    """Log-probabilities: of a chat chunk in `content`, of a completions chunk in the other fields."""

    content: list[_TokenLogprobs] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None
    text_offset: list[int] | None = None


def parse_scores(fields: Any, offset: int) -> list[TokenScore] | None:  # noqa: ANN401 - whatever JSON can be
    """Returns the log-probabilities of each token; None if the chunk has none, or none that can be read.

    Args:
        fields: Decoded log-probabilities of a chunk.
        offset: Number of characters of the choice's text before this chunk.
    """
    if is_empty(fields):
        return None
    try:
        logprobs = msgspec.convert(fields, Logprobs)
    except msgspec.ValidationError:
        return None
    scores: list[TokenScore] = []
    if logprobs.content is not None:
        for token, sent in zip(logprobs.content, fields["content"], strict=True):
            entries = zip(token.top_logprobs or (), sent.get("top_logprobs") or (), strict=True)
            others = [other.to_logprob(entry) for other, entry in entries]
            scores.append(TokenScore(token.to_logprob(sent), others, offset))
            offset += len(token.token)
        return scores
    if logprobs.tokens is None:
        return None
    token_logprobs, tops = logprobs.token_logprobs or (), logprobs.top_logprobs or ()
    offsets = logprobs.text_offset or ()
    for position, text in enumerate(logprobs.tokens):
        value = token_logprobs[position] if position < len(token_logprobs) else None
        top = (tops[position] if position < len(tops) else None) or {}
        scores.append(
            TokenScore(
                TokenLogprob(text, text.encode(), value),
                [TokenLogprob(other, other.encode(), logprob) for other, logprob in top.items()],
                offsets[position] if position < len(offsets) else offset,
            )
        )
        offset += len(text)
    return scores

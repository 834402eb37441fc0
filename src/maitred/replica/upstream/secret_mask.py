"""Masks of the gateway's credentials in what a server sends.

A server may repeat the credential that it was sent: in an error, or in an answer of a model that sees its own request.
Whatever it says is masked before it is parsed, so the credential is in no answer and in no log line. A model writes it
in pieces, so the texts of an answer are masked once more, across their deltas.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, AnyStr

from msgspec.structs import replace

from maitred.core.inference import ChunkMetadata, TextDelta, TokenScore
from maitred.core.text_replica import TextBatch
from maitred.wire.openai.responses import REASONING_FIELDS, TEXT_FIELDS

_MIN_SECRET_CHARACTERS = 8
"""Shorter values, such as ``EMPTY``, are no secrets but words."""
_CALL_MEMBERS = (("function", "arguments"), ("custom", "input"))
_CONTENT, _REFUSAL, _CALLS = ("content",), ("refusal",), ("tool_calls",)
_MEMBERS = (REASONING_FIELDS, ("thinking_blocks",), _CONTENT, _REFUSAL, _CALLS, ("images",))
"""Members of a delta in the order in which readers of an answer in blocks tell them; a thought has two names."""


class SecretMask:
    """Mask of some secrets. The masked data has the same length, so that JSON and lengths stay valid.

    Args:
        secrets: The secrets; those that are too short to be any are ignored.

    Attributes:
        secrets: The secrets that are masked.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        self.secrets = tuple({secret for secret in secrets if len(secret) >= _MIN_SECRET_CHARACTERS})
        values = {secret.encode() for secret in self.secrets}
        values |= {value.replace(b"/", b"\\/") for value in values}  # the same in JSON
        self._values = tuple(values)

    def apply(self, data: bytes) -> bytes:
        """Returns the data with all secrets masked."""
        for value in self._values:
            if value in data:
                data = data.replace(value, b"*" * len(value))
        return data

    def split(self, data: bytes, *, body_over: bool) -> tuple[bytes, bytes]:
        """Masks the data of a stream.

        Args:
            data: The data that has come.
            body_over: Whether no more data comes.

        Returns:
            The masked data, and the bytes at its end that may begin a secret: they belong before the next data.
        """
        data = self.apply(data)
        if body_over or not data:
            return data, b""
        held = _held_length(data, self._values)
        return data[: len(data) - held], data[len(data) - held :]


class DeltaMask:
    """Mask of secrets in the texts of one answer, which come in pieces.

    The end of a text that may begin a secret is held back until the next piece of the same text, until something else
    of the choice comes, or until its end. Nothing that comes later overtakes it: in an answer of blocks, a text would
    else end in the next block. So it is not held back where its own delta goes on with something else. Where the same
    text goes on after all, a secret that spans both is masked from there on.

    Args:
        secrets: The secrets.

    Attributes:
        held: Ends of texts that may begin a secret, by choice and text, with the scores of their tokens.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        self.held: dict[tuple[int, object], tuple[str, list[TokenScore]]] = {}
        self._told: dict[tuple[int, object], str] = {}
        """Ends of texts that may begin a secret and have been told, by choice and text."""
        self._secrets = secrets
        self._first_characters = tuple({secret[0] for secret in secrets})
        """Without one of them, a text begins no secret."""
        self._beginnings = tuple({secret[:length] for secret in secrets for length in range(1, len(secret))})

    def is_concerned(self, batch: TextBatch) -> bool:
        """Returns whether a batch may have a part of a secret."""
        if self.held or self._told:
            return True
        for part in batch.parts:
            if part.extra is not None or part.metadata is not None or part.block is not None:
                return True
            text = part.text
            for character in self._first_characters:
                if character in text and (text.endswith(self._beginnings) or self._mask_text(text) != text):
                    return True
        return False

    def apply(self, batch: TextBatch) -> TextBatch | None:
        """Returns a batch with all secrets masked; None if all of it is held back."""
        parts = [delta for part in batch.parts for delta in self._read(part)]
        if not parts and batch.usage is None and not batch.whole:
            return None
        return TextBatch(parts, batch.usage, batch.chunks, batch.whole)

    def _read(self, part: TextDelta) -> list[TextDelta]:
        """Returns what a delta becomes: what was held back of other texts, and itself without what is held back now."""
        is_last = part.finish is not None
        members = _members_of(part)
        deltas: list[TextDelta] = []
        if members or is_last or part.block is not None:
            deltas += self._release(part.index, {*_texts_of(part, members[0])} if members else set())
        text, scores = part.text, part.scores
        last = () if is_last or not members else members[-1]
        if text or scores is not None:
            text, scores = self._mask((part.index, "content"), text, scores, is_last=last != _CONTENT)
        extra: dict[str, Any] = {}
        for name, value in (part.extra or {}).items():
            if name in TEXT_FIELDS and isinstance(value, str):
                masked, _ = self._mask((part.index, name), value, None, is_last=name not in last)
                extra |= {name: masked} if masked or not value else {}
            elif name == "tool_calls" and isinstance(value, list):
                extra[name] = [self._mask_call(part.index, call, is_last=last != _CALLS) for call in value]
            else:
                extra[name] = self._mask_value(value)
        metadata = part.metadata
        if metadata is not None:
            metadata = ChunkMetadata(self._mask_value(metadata.chunk), self._mask_value(metadata.choice))
        block = self._mask_value(part.block)
        if text or scores or extra or is_last or metadata is not None or block is not None or not members:
            deltas.append(replace(part, text=text, scores=scores, extra=extra or None, metadata=metadata, block=block))
        return deltas

    def _release(self, index: int, kept: Set[tuple[int, object]]) -> list[TextDelta]:
        """Returns what was held back of the other texts of a choice.

        The two names of a thought stay in one delta, because readers of both take it for one thought.
        """
        deltas = []
        thought: dict[str, Any] = {}
        for place in [place for place in self.held if place[0] == index and place not in kept]:
            text, scores = self.held.pop(place)
            self._told[place] = self._told.get(place, "") + text
            match place[1]:
                case "content":
                    deltas.append(TextDelta(index, text, scores=scores or None))
                case str() as name if name in REASONING_FIELDS:
                    if not thought:
                        deltas.append(TextDelta(index, "", extra=thought))
                    thought[name] = text
                case str() as name:
                    deltas.append(TextDelta(index, "", extra={name: text}))
                case (field, written, number):
                    deltas.append(
                        TextDelta(index, "", extra={"tool_calls": [{"index": number, field: {written: text}}]})
                    )
        return deltas

    def _mask(
        self, place: tuple[int, object], text: str, scores: list[TokenScore] | None, *, is_last: bool
    ) -> tuple[str, list[TokenScore] | None]:
        """Masks a text with what was held back of it, and holds its end back if that may begin a secret.

        The scores of its tokens spell a secret, too: they wait with their text, and are left out where it is masked.
        """
        held_text, held_scores = self.held.pop(place, ("", []))
        scores = [*held_scores, *(scores or ())]
        told = self._told.pop(place, "")
        whole = told + held_text + text
        masked = self._mask_text(whole)
        if masked != whole:
            scores = []
        beginning = _held_length(masked, self._secrets)
        held = 0 if is_last else min(beginning, len(masked) - len(told))
        if beginning > held:
            self._told[place] = masked[len(masked) - beginning : len(masked) - held]
        masked = masked[len(told) :]
        if held:
            held = len(masked) if scores else held
            masked, rest = masked[: len(masked) - held], masked[len(masked) - held :]
            self.held[place] = rest, scores
            scores = []
        return masked, scores or None

    def _mask_call(self, index: int, call: Any, *, is_last: bool) -> Any:  # noqa: ANN401 - whatever JSON can be
        """Masks a piece of a tool call."""
        masked = self._mask_value(call)
        for field, written in _CALL_MEMBERS:
            if isinstance(body := masked.get(field), dict) and isinstance(text := body.get(written), str):
                place = (index, (field, written, call.get("index")))
                body[written], _ = self._mask(place, text, None, is_last=is_last)
        return masked

    def _mask_text(self, text: str) -> str:
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, "*" * len(secret))
        return text

    def _mask_value(self, value: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
        """Masks each text of a value."""
        match value:
            case str():
                return self._mask_text(value)
            case list():
                return [self._mask_value(entry) for entry in value]
            case {"logprobs": [_, *_] as tokens} if self._spell_secret(tokens):
                return self._mask_value({**value, "logprobs": []})
            case dict():
                return {name: self._mask_value(entry) for name, entry in value.items()}
        return value

    def _spell_secret(self, tokens: Sequence[object]) -> bool:
        """Returns whether the tokens of log-probabilities spell a secret together."""
        texts = [token.get("token") for token in tokens if isinstance(token, dict)]
        spelt = "".join(text for text in texts if isinstance(text, str))
        return self._mask_text(spelt) != spelt


def _held_length(text: AnyStr, secrets: Sequence[AnyStr]) -> int:
    """Returns the length of the longest end of a text that may begin a secret."""
    held = 0
    for secret in secrets:
        if text[-1:] not in secret:
            continue  # the common case: data of a stream ends with a line break
        longest = min(len(secret) - 1, len(text))
        held = max(held, next((size for size in range(longest, 0, -1) if text.endswith(secret[:size])), 0))
    return held


def _members_of(part: TextDelta) -> list[tuple[str, ...]]:
    """Returns the members that a delta has, in the order in which its readers tell them; names of one text together."""
    extra = part.extra or {}
    has_content = bool(part.text or part.scores)
    return [names for names in _MEMBERS if (has_content if names == _CONTENT else not extra.keys().isdisjoint(names))]


def _texts_of(part: TextDelta, names: Sequence[str]) -> Iterator[tuple[int, object]]:
    """Yields the places of the texts that a delta goes on with in these members."""
    extra = part.extra or {}
    if names == _CALLS:
        calls = extra.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            for field, written in _CALL_MEMBERS:
                if field in call:
                    yield part.index, (field, written, call.get("index"))
    else:
        yield from ((part.index, name) for name in names)

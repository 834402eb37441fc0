"""Answers as the cache keeps them: parsed, so that every API can write them, whole or as a stream.

`AnswerRecorder` makes one from the deltas of an answer while its client reads them.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason, Usage

_SEAL_BYTES = 16
_FORMAT = b"a1"
"""Version of the encoded form; an answer of another version is not found."""
_MOST_NEW = 512
"""Deltas after which their text is joined."""
_INCOMPLETE = frozenset({FinishReason.CANCELLED, FinishReason.DEADLINE})


class CachedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A complete answer with all its choices."""

    deltas: list[TextDelta]
    """Deltas of all choices, in order for each choice. Text of successive deltas is joined."""
    usage: Usage
    finish_reasons: list[FinishReason]
    stored_s: float
    """Wall time at which the answer was complete."""
    ignored_fields: list[str] = []
    """Fields of the request that the model was not given."""
    is_passthrough: bool = False
    """Whether the server was given the request as its client wrote it."""
    fingerprint: str = ""
    """What the server said that it runs (``system_fingerprint``); empty: nothing."""


_DECODER = msgspec.msgpack.Decoder(CachedAnswer)
_ENCODER = msgspec.msgpack.Encoder()


def encode_answer(answer: CachedAnswer, seal: bytes) -> bytes:
    """Encodes an answer, with a digest that only who knows the seal of its key can make."""
    return add_seal(_FORMAT, msgspec.msgpack.encode(answer), seal)


def decode_answer(data: bytes, seal: bytes) -> CachedAnswer | None:
    """Decodes an answer; None: it is truncated, of another version, or was not stored under this key."""
    body = remove_seal(_FORMAT, data, seal)
    if body is None:
        return None
    try:
        return _DECODER.decode(body)
    except msgspec.MsgspecError:
        return None


def add_seal(form: bytes, body: bytes, seal: bytes) -> bytes:
    """Returns an encoded body behind its form and a digest that only who knows the seal can make."""
    return form + blake2b(body, key=seal, digest_size=_SEAL_BYTES).digest() + body


def remove_seal(form: bytes, data: bytes, seal: bytes) -> bytes | None:
    """Returns the body of what `add_seal` has made; None: it is truncated, of another form, or of another seal."""
    begin = len(form) + _SEAL_BYTES
    body = data[begin:]
    if (
        not data.startswith(form)
        or blake2b(body, key=seal, digest_size=_SEAL_BYTES).digest() != data[len(form) : begin]
    ):
        return None
    return body


class AnswerRecorder:
    """Records the deltas of one answer.

    Text of successive deltas is joined only now and then, because an answer has as many deltas as tokens.

    Args:
        most_bytes: Size at which the recording is given up: of its text, and of the encoded deltas that have more.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._size = 0
        self._deltas: list[TextDelta] = []
        self._texts: dict[int, list[str]] = {}
        """Choice -> texts of its last deltas, which have nothing else."""
        self._new: list[TextDelta] = []
        """Deltas that have come since others were joined."""
        self._is_given_up = False

    def add(self, parts: Sequence[TextDelta]) -> None:
        """Records deltas; the recorder keeps them, so nobody may change them."""
        self._new += parts
        if len(self._new) >= _MOST_NEW:
            self._join()

    @property
    def given_up(self) -> bool:
        """Whether the deltas are not kept: they are too many, or the end of the answer is not that of one model."""
        if self._new:
            self._join()
        return self._is_given_up

    def deltas(self) -> list[TextDelta]:
        """Returns the deltas so far, text of successive deltas joined; empty if they were given up."""
        if self._new:
            self._join()
        for index in [*self._texts]:
            self._flush(index)
        return [*self._deltas]

    def _join(self) -> None:
        """Joins the text of the deltas that have come last."""
        new, self._new = self._new, []
        if self._is_given_up:
            return
        for part in new:
            if part.plain:
                self._size += len(part.text)
                self._texts.setdefault(part.index, []).append(part.text)
            else:
                self._flush(part.index)
                self._deltas.append(part)
                try:
                    self._size += len(_ENCODER.encode(part))
                except (TypeError, ValueError, OverflowError):
                    self._is_given_up = True  # it has a number or a character that has no place in a store
                if part.continued or part.finish in _INCOMPLETE:
                    self._is_given_up = True
        if self._size > self._most_bytes or self._is_given_up:
            self._is_given_up = True
            self._deltas, self._texts = [], {}

    def _flush(self, index: int) -> None:
        texts = self._texts.pop(index, None)
        if texts is not None:
            self._deltas.append(TextDelta(index, "".join(texts)))


def fingerprint_in(deltas: Sequence[TextDelta]) -> str:
    """Returns what the server said that it runs, from the metadata of its answer; empty: nothing."""
    fingerprint: Any = ""
    for delta in deltas:
        if delta.metadata is not None:
            fingerprint = delta.metadata.chunk.get("system_fingerprint", fingerprint)
    return fingerprint if isinstance(fingerprint, str) else ""

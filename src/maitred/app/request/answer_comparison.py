"""Comparison of an answer that is computed again with what its readers have of it already.

A choice is compared by its *parts*: its text, its reasoning, each tool call, the tokens of its log-probabilities, its
end. Each of them only grows, however the answer is cut into deltas. What has come of a choice between two batches says
how many of its tokens were read, so in every batch either all parts are behind what was sent, or none is.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from maitred.core.errors import ReplicaLost
from maitred.core.inference import TextDelta
from maitred.wire.openai.responses import TEXT_FIELDS


class AnswerComparison:
    """Leaves out of an answer what its readers have, and finds out if it is another one.

    Args:
        sent: Deltas that the readers have.

    Raises:
        ReplicaLost: They have something that cannot be compared, such as events of the client's own API.
    """

    def __init__(self, sent: Sequence[TextDelta]) -> None:
        self._sent: dict[int, dict[str, Any]] = {}
        """Choice -> text or list of each part, without what has come again."""
        self._calls: set[tuple[int, object]] = set()
        """Choice and number of the tool calls that the readers know."""
        self._has_prompt_scores: set[int] = set()
        for delta in sent:
            self._add(delta)
        self._has_come: dict[tuple[int, str], int] = {}
        """Choice and part -> length of what has come again."""

    @property
    def is_over(self) -> bool:
        """Whether all that was sent has come again."""
        return not self._sent

    def rest(self, deltas: Sequence[TextDelta]) -> list[TextDelta]:
        """Returns what is new in the next deltas.

        Raises:
            ReplicaLost: They differ from what the readers have.
        """
        rest = [new for delta in deltas if (new := self._rest_of(delta)) is not None]
        grown = {delta.index for delta in rest} | {delta.index for delta in deltas if delta.finish is not None}
        for index in {delta.index for delta in deltas}.intersection(self._sent):
            if all(self._has_come.get((index, part), 0) == len(value) for part, value in self._sent[index].items()):
                del self._sent[index]
            elif index in grown:
                raise ReplicaLost
        return rest

    def _add(self, delta: TextDelta) -> None:
        parts = _parts_of(delta)
        if parts is None or delta.continued:
            raise ReplicaLost
        for part, value in parts.items():
            sent = self._sent.setdefault(delta.index, {})
            sent[part] = sent[part] + value if part in sent else value
        self._calls.update((delta.index, call.get("index")) for call in (delta.extra or {}).get("tool_calls", ()))
        if delta.prompt_scores is not None:
            self._has_prompt_scores.add(delta.index)

    def _rest_of(self, delta: TextDelta) -> TextDelta | None:
        """Returns what is new in a delta; None: nothing."""
        index = delta.index
        if index not in self._sent:
            return delta
        parts = _parts_of(delta)
        if parts is None:
            raise ReplicaLost
        come = {part: self._come(index, part, value) for part, value in parts.items()}
        extra: dict[str, Any] = {}
        for name, value in (delta.extra or {}).items():
            new = self._new_calls(index, value, come) if name == "tool_calls" else value[come.get(name, 0) :]
            if new:
                extra[name] = new
        scores, token_ids = delta.scores, delta.token_ids
        rest = replace(
            delta,
            text=delta.text[come.get("text", 0) :],
            finish=None if come.get("finish") else delta.finish,
            scores=(scores and scores[come.get("scores", 0) :]) or None,
            token_ids=(token_ids and token_ids[come.get("token_ids", 0) :]) or None,
            extra=extra or None,
            stop=None if come.get("finish") else delta.stop,
            metadata=None,
            prompt_scores=None if index in self._has_prompt_scores else delta.prompt_scores,
        )
        return rest if rest != TextDelta(index, "") else None

    def _come(self, index: int, part: str, value: Any) -> int:  # noqa: ANN401 - a text or a list
        """Returns how much of what comes the readers have."""
        sent = self._sent[index].get(part)
        if sent is None:
            return 0
        position = self._has_come.get((index, part), 0)
        length = min(len(value), len(sent) - position)
        if value[:length] != sent[position : position + length]:
            raise ReplicaLost
        self._has_come[index, part] = position + length
        return length

    def _new_calls(self, index: int, calls: Sequence[dict[str, Any]], come: dict[str, int]) -> list[dict[str, Any]]:
        """Returns what is new in tool calls; known ones keep the id that the readers have."""
        new = []
        for call in calls:
            number = call.get("index")
            if (index, number) not in self._calls:
                new.append(call)
                continue
            arguments = (call.get("function") or {}).get("arguments") or ""
            part = f"arguments {number}"
            known = min(come.get(part, 0), len(arguments))
            come[part] = come.get(part, 0) - known
            if arguments[known:]:
                new.append({"index": number, "function": {"arguments": arguments[known:]}})
        return new


def _parts_of(delta: TextDelta) -> dict[str, Any] | None:
    """Returns the parts of a delta, each a text or a list; None: it has something that cannot be compared."""
    if delta.block is not None:
        return None
    parts: dict[str, Any] = {"text": delta.text} if delta.text else {}
    if delta.finish is not None:
        parts["finish"] = [delta.finish]
    if delta.scores:
        parts["scores"] = [score.chosen.text for score in delta.scores]
    if delta.token_ids:
        parts["token_ids"] = delta.token_ids
    for name, value in (delta.extra or {}).items():
        if name == "tool_calls":
            for call in value:
                function = call.get("function") or {}
                for field in ("name", "arguments"):
                    if text := function.get(field):
                        part = f"{field} {call.get('index')}"
                        parts[part] = parts.get(part, "") + text
        elif name in TEXT_FIELDS and isinstance(value, str):
            parts[name] = value
        else:
            return None
    return parts

"""Tool calls of an answer in pieces, as OpenAI's API streams them.

OpenAI's servers name the call of each piece by an `index`, and the first piece of a call has its id, its type and its
name. Other servers leave the index out, share one index between all calls, repeat the id or the name with each piece,
send the id after the name, or send whole calls at once. `ToolCallAssembler` finds the call of each piece and numbers
the calls, so everything behind it can rely on the index alone.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from maitred.core.ids import new_object_id

_BODY_FIELDS = {"function": "arguments", "custom": "input"}
"""Field of a call that has the name, and its member that has what the model wrote."""


class ToolCallState:
    """State of one tool call while its pieces arrive.

    Attributes:
        number: Number of the call in its answer, from 0.
        field: Field of the call that has its name and its arguments: ``function`` or ``custom``.
        id: Id of the call; empty: no piece had one yet.
        name: Name of the tool as far as it is known.
        written: Arguments so far, as the model wrote them.
        is_empty: Whether the arguments so far are an empty object, which is held back: some servers begin with it and
            send the arguments behind it.
    """

    __slots__ = ("field", "id", "is_empty", "name", "number", "written")

    def __init__(self, number: int, field: str) -> None:
        self.number = number
        self.field = field
        self.id = ""
        self.name = ""
        self.written = ""
        self.is_empty = False

    @property
    def is_whole(self) -> bool:
        """Whether the arguments so far are a whole JSON object."""
        return self.is_empty or is_json_object(self.written)


class ToolCallAssembler:
    """Assembler of the tool calls of one choice.

    Attributes:
        calls: The calls so far, in the order of their first pieces.
        latest: The call of the latest piece; None: there was none.
    """

    def __init__(self) -> None:
        self.calls: list[ToolCallState] = []
        self._by_index: dict[Any, ToolCallState] = {}
        self._by_id: dict[str, ToolCallState] = {}
        self.latest: ToolCallState | None = None
        self._announced_name = ""
        """Name that came behind a whole call, which may begin another one."""

    def add(self, pieces: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the pieces of one delta with the numbers of their calls as `index`.

        An id, a type, a name or arguments that a server repeats are left out, because clients join the pieces. All
        other members stay as they are.
        """
        named: set[int] = set()
        """Numbers of the calls that this delta has named: a second name is another call."""
        numbered = (self._add(piece, named) for piece in pieces)
        return [piece for piece in numbered if piece is not None]

    def close(self, *, is_cut: bool = False) -> list[dict[str, Any]]:
        """Returns pieces with what calls lack: a new id, because clients answer calls by id, and an empty object.

        Args:
            is_cut: Whether the answer was cut, so that arguments may be missing.
        """
        added: list[dict[str, Any]] = []
        for call in self.calls:
            has_nothing = call.is_empty or not (call.written or is_cut or call.field != "function")
            written = "{}" if has_nothing else ""
            call.is_empty = False
            piece = {"index": call.number, call.field: {_BODY_FIELDS[call.field]: written}}
            if not call.id:
                piece["id"] = call.id = new_object_id("call")
                added.append(piece)
            elif written:
                added.append(piece)
            call.written += written
        return added

    def _add(self, piece: Mapping[str, Any], named: set[int]) -> dict[str, Any] | None:
        piece = _nest_body(piece)
        field, body = _body_of(piece)
        call_id, name = _text(piece.get("id")), _text(body.get("name"))
        written = body.get(_BODY_FIELDS[field])
        text = (
            written if isinstance(written, str) else "" if written is None else json.dumps(written, ensure_ascii=False)
        )
        call = self._find(piece.get("index"), call_id, name, text, named)
        is_first = call is None
        if call is None and not name:
            name = self._announced_name
        if name or text.strip():
            # A name behind a whole call is said again, or begins the next call of the same tool.
            self._announced_name = name if call is not None and call.is_whole and not text.strip() else ""
        if call is None:
            if not (call_id or name or text or any(piece.get(other) for other in piece if other != "index")):
                return None
            call = ToolCallState(len(self.calls), field)
            self.calls.append(call)
        self.latest = call
        if (index := piece.get("index")) is not None:
            self._by_index[_key(index)] = call
        fields = {other: value for other, value in piece.items() if value is not None and other not in _IDENTITY}
        numbered: dict[str, Any] = {"index": call.number}
        if call_id and not call.id:
            numbered["id"] = call.id = call_id
            self._by_id[call_id] = call
        if is_first:
            numbered["type"] = _text(piece.get("type")) or field
        if name:
            named.add(call.number)
        added_name = name.removeprefix(call.name)  # some servers say all of it again with each piece
        call.name += added_name
        if text and call.field == "function":
            text = _new_arguments(call, text)
        call.written += text
        if field not in piece and not is_first:
            field = call.field  # official clients want it in each piece
        shown = {other: value for other, value in body.items() if other not in ("name", _BODY_FIELDS[field])}
        if added_name or is_first:
            shown["name"] = added_name
        return {**numbered, **fields, field: {**shown, _BODY_FIELDS[field]: text}}

    def _find(self, index: Any, call_id: str, name: str, text: str, named: set[int]) -> ToolCallState | None:  # noqa: ANN401 - whatever JSON can be
        """Returns the call of a piece; None: the piece begins a new call."""
        if call_id and (call := self._by_id.get(call_id)) is not None:
            return call
        call = self.latest if index is None else self._by_index.get(_key(index))
        if call is None:
            # The call began with a piece that had no index.
            return None if call_id or name else self.latest
        if call_id and call.id:
            return None
        if not name and not call_id and text.strip() and self._announced_name and text != call.written:
            return None
        if not name or not call.name:
            return call
        if call.number in named:
            return None
        is_other_name = name != call.name
        begins_new_call = is_other_name or bool(text.strip()) if call.is_whole else is_other_name and index is None
        return None if begins_new_call else call


_IDENTITY = frozenset({"index", "id", "type", "function", "custom"})


def _new_arguments(call: ToolCallState, text: str) -> str:
    """Returns what a piece adds to the arguments of a call of a function, which are a JSON object."""
    if not call.written and (text == "{}" or (call.is_empty and not text.strip())):
        call.is_empty = True
        return ""
    if call.is_empty:
        call.is_empty = False
        return text if text.lstrip().startswith("{") else "{}" + text
    return "" if text == call.written and call.is_whole else text  # some servers repeat them once they are whole


def _body_of(piece: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the field of a piece that has the name and the arguments, and its value."""
    field = "custom" if isinstance(piece.get("custom"), dict) or piece.get("type") == "custom" else "function"
    body = piece.get(field)
    return field, body if isinstance(body, dict) else {}


def _nest_body(piece: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a piece with its name and arguments in `function`; some servers write them beside the id."""
    written = piece.get("arguments", piece.get("input"))
    if any(piece.get(field) is not None for field in _BODY_FIELDS) or (piece.get("name") is None and written is None):
        return piece
    rest = {name: value for name, value in piece.items() if name not in ("name", "arguments", "input", "type")}
    return {**rest, "function": {"name": piece.get("name"), "arguments": written}}


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _key(index: object) -> object:
    """Returns an index as a key; servers write it as a number or as text."""
    return str(index)


def is_json_object(text: str) -> bool:
    """Returns whether a text is one whole JSON object."""
    if not text[-64:].rstrip().endswith("}"):
        return False  # the usual case, without a copy of the whole text
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False

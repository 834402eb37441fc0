"""Recorded workloads: our own format for a workload that is played again, here or elsewhere.

The format is JSON lines: first ``{"format": "maitred-trace/1", "block_tokens": ..., "description": ...}``, then one
`LoadSession` per line. It contains lengths, times and block ids, never text. The JSON result of a run can be read too:
its requests become sessions, without their shared prefixes.
"""

import itertools
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from maitred.core.errors import InvalidRequest
from maitred.load.workload.files import open_text
from maitred.load.workload.session import LoadSession, SessionTurn, Workload
from maitred.load.workload.tables import fault

FORMAT = "maitred-trace/1"
RESULT_FORMAT = "maitred-load/1"


class _Header(msgspec.Struct, kw_only=True):
    format: str
    block_tokens: Annotated[int, Meta(ge=1)] = 16
    description: str = ""


class RecordedRequest(NamedTuple):
    """Recorded request of a run, with the values that a replay needs.

    Attributes:
        ended_s: When its answer had ended; the pause before the next turn begins then.
        prompt_tokens: Length of the whole prompt by the server's count, including earlier turns; 0: there was no count.
        output_tokens: Length of the answer.
        asked_tokens: Requested length of the answer, which the replay requests again.
    """

    session: int
    turn: int
    tenant: str
    intended_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    asked_tokens: int


def read_recorded(path: Path) -> Workload:
    """Reads a trace that `write_recorded` wrote, or the result of a run.

    Raises:
        InvalidRequest: The file is neither; or, during reading, a line is not a session.
    """
    header = _header(path)
    if header.format == FORMAT:
        return Workload(_sessions(path), header.block_tokens, header.description)
    if header.format == RESULT_FORMAT:
        return Workload(_of_result(path), description=f"recorded {path.name}")
    raise _foreign(path)


def write_recorded(path: Path, workload: Workload) -> int:
    """Writes a finite workload, and returns the number of its sessions.

    The file appears only when it is complete.

    Raises:
        OSError: The file cannot be written.
    """
    count = 0
    unfinished = path.with_name(f"{path.name}.part")
    header = _Header(format=FORMAT, block_tokens=workload.block_tokens, description=workload.description)
    with unfinished.open("wb") as file:
        file.write(msgspec.json.encode(header) + b"\n")
        for session in workload.sessions:
            file.write(msgspec.json.encode(session) + b"\n")
            count += 1
    unfinished.replace(path)
    return count


def recorded_sessions(requests: Iterable[RecordedRequest]) -> Iterator[LoadSession]:
    """Converts the requests of a run to sessions, in the order in which they begin.

    Servers count the whole prompt. So the message of a turn is the length of the prompt minus the earlier prompt and
    its answer. A request that was refused or broke off has no count. Its message gets the median length of the others,
    so that a replay requests as much as the run did.

    Raises:
        InvalidRequest: None of the requests has a count.
    """
    ordered = sorted(requests, key=lambda asked: (asked.session, asked.turn))
    conversations = [list(turns) for _, turns in itertools.groupby(ordered, key=lambda asked: asked.session)]
    conversations.sort(key=lambda turns: turns[0].intended_s)
    messages = [tokens for turns in conversations for tokens in _message_tokens(turns) if tokens]
    if not messages:
        raise InvalidRequest("None of the recorded requests has a count of its prompt's tokens. Record another run.")
    usual_tokens = round(statistics.median(messages))
    for number, turns in enumerate(conversations):
        first = turns[0]
        yield LoadSession(
            id=number, turns=tuple(_turns(turns, usual_tokens)), tenant=first.tenant, at_s=first.intended_s
        )


def _message_tokens(conversation: list[RecordedRequest]) -> Iterator[int]:
    """Returns the message length of each turn; 0 if there is no count."""
    history_tokens = 0
    for asked in conversation:
        yield max(1, asked.prompt_tokens - history_tokens) if asked.prompt_tokens else 0
        history_tokens = asked.prompt_tokens + asked.output_tokens


def _turns(conversation: list[RecordedRequest], usual_tokens: int) -> Iterator[SessionTurn]:
    free_s = conversation[0].intended_s
    for asked, message_tokens in zip(conversation, _message_tokens(conversation), strict=True):
        yield SessionTurn(
            prompt_tokens=message_tokens or usual_tokens,
            output_tokens=max(1, asked.asked_tokens),
            think_s=max(0.0, asked.intended_s - free_s),
        )
        free_s = asked.ended_s


class _Columns(msgspec.Struct):
    session: list[int]
    turn: list[int]
    tenant: list[str]
    intended_s: list[float]
    ended_s: list[float | None]
    prompt_tokens: list[int]
    output_tokens: list[int]
    asked_tokens: list[int]


class _Result(msgspec.Struct):
    requests: _Columns


def _of_result(path: Path) -> Iterator[LoadSession]:
    try:
        with open_text(path) as file:
            columns = msgspec.json.decode(file.read(), type=_Result).requests
        rows = zip(*(getattr(columns, name) for name in columns.__struct_fields__), strict=True)
        requests = [
            RecordedRequest(
                session,
                turn,
                tenant,
                intended_s=due_s,
                ended_s=due_s if ended_s is None else ended_s,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                asked_tokens=asked_tokens,
            )
            for session, turn, tenant, due_s, ended_s, prompt_tokens, output_tokens, asked_tokens in rows
        ]
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"{path} is a damaged result: {error}. Run the test again.") from None
    return recorded_sessions(requests)


def _header(path: Path) -> _Header:
    """Reads the first line of a trace, or a whole result, of which it ignores the rest."""
    with open_text(path) as file:
        start = file.readline()
        try:
            return msgspec.json.decode(start, type=_Header)
        except msgspec.MsgspecError:
            try:  # The file is an indented result.
                return msgspec.json.decode(start + file.read(), type=_Header)
            except msgspec.MsgspecError:
                raise _foreign(path) from None


def _foreign(path: Path) -> InvalidRequest:
    return InvalidRequest(
        f"{path} is neither a recorded trace ({FORMAT}) nor the result of a load run ({RESULT_FORMAT}). "
        "Name its format before the path, such as `mooncake:`."
    )


def _sessions(path: Path) -> Iterator[LoadSession]:
    decoder = msgspec.json.Decoder(LoadSession)
    last_s = 0.0
    with open_text(path) as lines:
        next(lines)
        for number, line in enumerate(lines, 2):
            if line.isspace():
                continue
            try:
                session = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise fault(path, number, str(error)) from None
            if reason := _wrong(session, last_s):
                raise fault(path, number, reason)
            last_s = session.at_s or last_s
            yield session


def _wrong(session: LoadSession, last_s: float) -> str:
    """Returns the error of a session beyond wrong types, in a few words."""
    if not session.turns:
        return "the session has no turns"
    if session.at_s is not None and session.at_s < last_s:
        return "at_s is before that of the session above"
    if any(turn.prompt_tokens < 1 or turn.output_tokens < 1 or turn.think_s < 0 for turn in session.turns):
        return "a length is below 1, or a pause below 0"
    return ""

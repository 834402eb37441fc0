"""Sessions of coding agents, as published with kv-cache-tester: growing prompts, mostly shared.

The format is JSON lines, one session each, with ``block_size`` and ``requests``. A request has ``in`` and ``out``
(tokens), ``think_time`` (seconds since the answer before) and ``h``: the ids of its prompt's full blocks as runs
``[first, count]``. Ids are valid within the session (``hash_id_scope`` ``local``) unless the scope says otherwise. The
requests of a sub-agent become turns of the session, in their place and one after the other. The format has no arrival
times: the arrivals of the spec set them.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from maitred.load.workload.files import read_lines
from maitred.load.workload.session import LoadSession, SessionTurn, Workload
from maitred.load.workload.tables import fault

DEFAULT_BLOCK_TOKENS = 64
LOCAL_IDS = 1 << 32
"""Range of ids that one session can use."""


class _Request(msgspec.Struct, rename={"prompt_tokens": "in", "output_tokens": "out", "runs": "h"}):
    """Request of a session; or a sub-agent, which has requests instead of lengths."""

    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    output_tokens: Annotated[int, Meta(ge=0)] = 0
    runs: list[tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]] = []
    think_time: Annotated[float, Meta(ge=0)] = 0.0
    requests: list["_Request"] = []


class _Row(msgspec.Struct):
    requests: list[_Request]
    block_size: Annotated[int, Meta(ge=1)] = DEFAULT_BLOCK_TOKENS
    hash_id_scope: str = "local"


def read_agentic(path: Path) -> Workload:
    """Reads a session from every line; each request is a turn with the blocks of its whole prompt.

    Raises:
        InvalidRequest: The file cannot be read; or, during reading, a line is not valid.
    """
    first = next(read_lines(path, _Row), None)
    block_tokens = first[1].block_size if first else DEFAULT_BLOCK_TOKENS
    return Workload(_sessions(path, block_tokens), block_tokens, "agentic")


def _sessions(path: Path, block_tokens: int) -> Iterator[LoadSession]:
    numbers, tails = itertools.count(), itertools.count(-1, -1)
    for line, row in read_lines(path, _Row):
        if row.block_size != block_tokens:
            raise fault(path, line, f"block_size is {row.block_size}, and {block_tokens} above")
        requests = list(_flat(row.requests))
        if not requests:
            continue
        number = next(numbers)
        base = number * LOCAL_IDS if row.hash_id_scope == "local" else 0
        yield LoadSession(id=number, turns=tuple(_turn(request, base, block_tokens, tails) for request in requests))


def _flat(requests: list[_Request]) -> Iterator[_Request]:
    for request in requests:
        if request.requests:
            yield from _flat(request.requests)
        elif request.prompt_tokens:
            yield request


def _turn(request: _Request, base: int, block_tokens: int, tails: Iterator[int]) -> SessionTurn:
    blocks: list[int] = []
    for first, count in request.runs:
        blocks += range(base + first, base + first + count)
    missing_tokens = request.prompt_tokens - len(blocks) * block_tokens
    # The end of a prompt does not fill a block, so the trace has no id for it and it is never shared.
    blocks += itertools.islice(tails, -(-max(0, missing_tokens) // block_tokens))
    return SessionTurn(
        prompt_tokens=request.prompt_tokens,
        output_tokens=max(1, request.output_tokens),
        think_s=request.think_time,
        blocks=tuple(blocks),
    )

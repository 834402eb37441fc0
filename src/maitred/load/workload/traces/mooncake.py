"""Mooncake's traces (Qin et al., *Mooncake: Trading More Storage for Less Computation*, FAST 2025).

The format is JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``. There is one id
per 512 tokens of the prompt; two ids are equal if the prompts are equal up to there. So the trace shows which prefixes
could have been shared.

The time stamps have a resolution of three seconds, so all requests of a step have the same time. The requests of a step
are spread evenly until the next step, in the order of the file, because bursts from a rounded clock are not real. The
first arrival of every step keeps its time, so the counts per step and the order are as published.
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

BLOCK_TOKENS = 512
STEP_S = 3.0


class _Row(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: tuple[int, ...] = ()


def read_mooncake(path: Path) -> Workload:
    """Reads every request as a session of one turn with blocks.

    Raises:
        InvalidRequest: The file or a line is not valid; raised during reading.
    """
    return Workload(_sessions(path), BLOCK_TOKENS, "mooncake")


def _sessions(path: Path) -> Iterator[LoadSession]:
    ids = itertools.count()
    steps = (list(step) for _, step in itertools.groupby(_rows(path), key=lambda row: row.timestamp))
    for step, after in itertools.pairwise(itertools.chain(steps, [None])):
        if step is None:
            return
        begin_s = step[0].timestamp / 1000
        step_s = min(STEP_S, after[0].timestamp / 1000 - begin_s) if after else STEP_S
        for place, row in enumerate(step):
            turn = SessionTurn(prompt_tokens=row.input_length, output_tokens=row.output_length, blocks=row.hash_ids)
            yield LoadSession(id=next(ids), turns=(turn,), at_s=begin_s + step_s * place / len(step))


def _rows(path: Path) -> Iterator[_Row]:
    last = 0.0
    for line, row in read_lines(path, _Row):
        if row.timestamp < last:
            raise fault(path, line, "the timestamp is before that of the line above")
        if row.input_length > len(row.hash_ids) * BLOCK_TOKENS:
            raise fault(path, line, f"input_length is more than the hash_ids hold, {BLOCK_TOKENS} tokens each")
        last = row.timestamp
        yield row

"""BurstGPT (Wang et al., *BurstGPT: A Real-World Workload Dataset to Optimize LLM Serving Systems*, KDD 2025).

CSV with ``Timestamp`` (seconds), ``Model``, ``Request tokens``, ``Response tokens``, ``Total tokens`` and ``Log Type``;
a version of it has ``Session ID`` as well. A response of 0 tokens is a request that failed.
"""

from collections.abc import Iterator
from pathlib import Path

from maitred.load.workload.files import open_text
from maitred.load.workload.session import LoadSession, SessionTurn, Workload
from maitred.load.workload.tables import TableRows

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
"""What is read. ``Model`` and ``Log Type`` say where a request came from, which changes nothing about its load."""


def read_burstgpt(path: Path) -> Workload:
    """Every request is a session of one turn, at its own time; failed ones are left out.

    The turns of a conversation are not put together even where there is a ``Session ID``: each row counts the history
    in its request tokens and has a time of its own, and a session's later turns would begin relative to our answers.

    Raises:
        InvalidRequest: On reading, where the file or a row is not as it should be.
    """
    return Workload(_sessions(path), description="burstgpt")


def _sessions(path: Path) -> Iterator[LoadSession]:
    with open_text(path) as lines:
        rows = TableRows(path, lines, COLUMNS)
        first_s: float | None = None
        last_s = 0.0
        number = 0
        for timestamp, request, response in rows:
            at_s, output_tokens = rows.number(timestamp), rows.tokens(response)
            if at_s < last_s:
                raise rows.fault("Timestamp is before that of the row above")
            last_s = at_s
            if output_tokens == 0:
                continue
            first_s = at_s if first_s is None else first_s
            turn = SessionTurn(prompt_tokens=rows.tokens(request), output_tokens=output_tokens)
            yield LoadSession(id=number, turns=(turn,), at_s=at_s - first_s)
            number += 1

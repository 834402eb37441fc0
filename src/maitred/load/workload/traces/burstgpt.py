"""BurstGPT (Wang et al., *BurstGPT: A Real-World Workload Dataset to Optimize LLM Serving Systems*, KDD 2025).

The format is CSV with ``Timestamp`` (seconds), ``Model``, ``Request tokens``, ``Response tokens``, ``Total tokens`` and
``Log Type``; one version also has ``Session ID``. A response of 0 tokens means that the request failed.
"""

from collections.abc import Iterator
from pathlib import Path

from maitred.load.workload.files import open_text
from maitred.load.workload.session import LoadSession, SessionTurn, Workload
from maitred.load.workload.tables import TableRows

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
"""Columns that are read; ``Model`` and ``Log Type`` name the source, which does not affect the load."""


def read_burstgpt(path: Path) -> Workload:
    """Reads every request as a session of one turn, at its own time; failed requests are left out.

    Rows with the same ``Session ID`` stay separate sessions. Each row counts the history in its request tokens and has
    its own time, and the later turns of a session would begin relative to our answers.

    Raises:
        InvalidRequest: The file or a row is not valid; raised during reading.
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

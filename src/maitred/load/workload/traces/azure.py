"""Azure's inference traces (Patel et al., *Splitwise*, ISCA 2024): AzurePublicDataset, 2023 and 2024.

The format is CSV with ``TIMESTAMP`` (date and time, to 100 ns), ``ContextTokens`` and ``GeneratedTokens``, without
sessions and prefixes.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from maitred.load.workload.files import open_text
from maitred.load.workload.session import LoadSession, SessionTurn, Workload
from maitred.load.workload.tables import TableRows

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOST_FRACTION_DIGITS = 6
"""Most digits of a fraction of a second that `datetime` accepts."""


def read_azure(path: Path) -> Workload:
    """Reads every request as a session of one turn; time starts with the first.

    Raises:
        InvalidRequest: The file or a row is not valid; raised during reading.
    """
    return Workload(_sessions(path), description="azure")


def _sessions(path: Path) -> Iterator[LoadSession]:
    with open_text(path) as lines:
        rows = TableRows(path, lines, COLUMNS)
        first_s = last_s = None
        for number, (moment, context, generated) in enumerate(rows):
            at_s = _unix_s(rows, moment)
            if last_s is not None and at_s < last_s:
                raise rows.fault("TIMESTAMP is before that of the row above")
            first_s, last_s = at_s if first_s is None else first_s, at_s
            turn = SessionTurn(prompt_tokens=rows.tokens(context), output_tokens=rows.tokens(generated))
            yield LoadSession(id=number, turns=(turn,), at_s=at_s - first_s)


def _unix_s(rows: TableRows, moment: str) -> float:
    """Converts a date to seconds since 1970; without a time zone it is UTC."""
    whole, _, rest = moment.partition(".")
    digits = rest[:MOST_FRACTION_DIGITS]
    zone = rest.lstrip("0123456789")
    try:
        read = datetime.fromisoformat(whole + zone)
        fraction_s = int(digits) / 10 ** len(digits) if digits.isdecimal() else 0.0
    except ValueError:
        raise rows.fault(f"{moment!r} is no date and time") from None
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp() + fraction_s

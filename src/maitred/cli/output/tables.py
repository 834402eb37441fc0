"""Output of the admin commands: tables for people, JSON for programs."""

from collections.abc import Iterable, Sequence

import typer

_NATURAL = 100_000
"""Wide enough for any row: a terminal breaks a long line by itself, and ids can still be copied."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = ()) -> None:
    """Prints rows as a table.

    Args:
        columns: Their titles.
        rows: One cell per column; None is shown as a dash.
        numbers: The columns that are aligned to the right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right" if column in numbers else "left")
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    Console(width=_NATURAL).print(table)


def print_json(value: object) -> None:
    """Prints what a program reads, with two blanks for each level."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def amount(value: float) -> str:
    """A number of tokens or dollars, as people read it."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.9f}".rstrip("0").rstrip(".")


def cell(value: object) -> str:
    """A value as text that a terminal only shows."""
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return amount(value)
        case list() | tuple():
            return ", ".join(map(cell, value)) or "-"
        case _:
            # A name may hold anything; a terminal must not obey it.
            return "".join(character if character.isprintable() else " " for character in str(value))

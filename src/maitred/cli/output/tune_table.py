"""The table of batch sizes in the terminal, which is its plot as well: bars in its columns."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from maitred.tune.session import TuningResult

WIDTH = 24
"""Characters of the longest bar."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(part: float, width: int = WIDTH) -> str:
    """A bar over that part of the width, to an eighth of a character."""
    eighths = round(max(0.0, min(part, 1.0)) * width * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def print_table(console: "Console", tuning: "TuningResult") -> None:
    """The sizes, the smallest first; the chosen one stands out, and those beyond the objective are red."""
    from rich.table import Table

    from maitred.load.report.quantity import duration, exact, significant

    objective_s = tuning.wishes.objective_s
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("Sequences", justify="right")
    table.add_column("Tokens/s", justify="right")
    table.add_column("", min_width=WIDTH, no_wrap=True)
    table.add_column("ITL p95", justify="right")
    table.add_column(f"│ objective: {exact(duration(objective_s))}", min_width=WIDTH, no_wrap=True)
    most = max((size.tokens_per_s for size in tuning.sizes), default=1.0)
    longest_s = max([objective_s, *(size.itl_s for size in tuning.sizes)])
    mark = min(WIDTH - 1, round(objective_s / longest_s * WIDTH))
    for size in tuning.sizes:
        chosen = tuning.chosen is not None and size.sequences == tuning.chosen.sequences
        waits = bar(size.itl_s / longest_s).ljust(WIDTH)
        if waits[mark] == " ":
            waits = f"{waits[:mark]}│{waits[mark + 1 :]}"
        table.add_row(
            f"{'→ ' if chosen else ''}{size.sequences:,}",
            significant(size.tokens_per_s),
            bar(size.tokens_per_s / most),
            duration(size.itl_s).replace(" ", "\u00a0"),
            waits.rstrip(),
            style="bold green" if chosen else "red" if size.itl_s > objective_s else None,
        )
    console.print(table)

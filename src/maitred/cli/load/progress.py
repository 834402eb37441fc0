"""A load run as it goes, on standard error: a live block in a terminal, a line every few seconds anywhere else."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import typer

from maitred.load.measure.record import RunProgress, UserOutcome
from maitred.load.report.quantity import count, duration, significant

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

LINE_EVERY_S = 5.0
"""Between two plain lines."""


class RunWatcher(Protocol):
    """Callback of a run, called about once a second."""

    def __call__(self, progress: RunProgress) -> None:
        """Shows where the run stands."""

    def show(self, line: str) -> None:
        """Shows something that has happened, and leaves it there."""


@contextmanager
def showing(title: str) -> Iterator[RunWatcher]:
    """A display that is there while the run lasts.

    Args:
        title: What is running, such as the target.
    """
    if not sys.stderr.isatty():
        typer.echo(title, err=True)
        yield PlainLines()
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    # Redrawn with each report rather than by a thread of rich's, which would take turns with the run's event loop.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveBlock(title, live, console)


class PlainLines:
    """One line every few seconds, for logs."""

    def __init__(self) -> None:
        self._next_s = self._last_s = 0.0

    def __call__(self, progress: RunProgress) -> None:
        """Prints a line about the progress, now and then."""
        if progress.at_s >= self._next_s or progress.at_s < self._last_s:  # due, or another run
            self._next_s = progress.at_s - progress.at_s % LINE_EVERY_S + LINE_EVERY_S
            share = "" if progress.share is None else f"  {progress.share:4.0%}"
            typer.echo(f"{progress.at_s:6.0f} s{share}  {_requests(progress)}  |  {_figures(progress)}", err=True)
        self._last_s = progress.at_s

    def show(self, line: str) -> None:
        """Prints a line to the error output."""
        typer.echo(line, err=True)


class LiveBlock:
    """A bar and two lines that are redrawn in place."""

    def __init__(self, title: str, live: "Live", console: "Console") -> None:
        self._title = title
        self._live = live
        self._console = console

    def __call__(self, progress: RunProgress) -> None:
        """Draws the progress in place."""
        self._live.update(self._block(progress), refresh=True)

    def show(self, line: str) -> None:
        """Prints a line above the progress."""
        self._console.print(line, markup=False, highlight=False)

    def _block(self, progress: RunProgress) -> "RenderableType":
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        clock = f"{progress.at_s:.0f} s" + ("" if progress.share is None else f"  {progress.share:.0%}")
        lines: list[RenderableType] = [Text.assemble((self._title, "bold"), f"  {clock}")]
        if progress.share is not None:
            bar = Table.grid()  # which ends its line, as a bar does not
            bar.add_row(ProgressBar(total=1.0, completed=progress.share, width=min(60, self._console.width)))
            lines.append(bar)
        style = "red" if _has_lost(progress) else ""
        return Group(*lines, Text(_requests(progress), style=style), Text(_figures(progress)))


def _requests(progress: RunProgress) -> str:
    """``120 due, 8 open, 110 complete, 2 failed``; outcomes that none had are left out."""
    ended = [
        f"{count(progress.ended[outcome])} {outcome.value.replace('_', ' ')}"
        for outcome in UserOutcome
        if progress.ended.get(outcome)
    ]
    return ", ".join([f"{count(progress.due)} due", f"{count(progress.open)} open", *ended])


def _figures(progress: RunProgress) -> str:
    tokens_per_s = significant(progress.output_tokens_per_s)
    return (
        f"{tokens_per_s} tokens/s, TTFT {duration(progress.ttft_s)}, ITL {duration(progress.itl_s)}, "
        f"tester {progress.cpu_share:.0%} of a core, {duration(progress.lag_s)} late"
    )


def _has_lost(progress: RunProgress) -> bool:
    wanted = {UserOutcome.COMPLETE, UserOutcome.CANCELLED}
    return any(count for outcome, count in progress.ended.items() if outcome not in wanted)

"""Bars on a terminal for what takes long: one for each stage, which stays when it is full."""

from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn


class ProgressBars:
    """Bars for the stages that are under way, below what is logged meanwhile.

    No thread draws them: a bar moves when its stage reports. The terminal's cursor is hidden until all are full, or
    until `stop`.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    @property
    def shown(self) -> bool:
        """Whether a bar is not full yet, so that lines must be printed by `print`."""
        return self._progress is not None

    def show(self, stage: str, fraction: float) -> None:
        """Draws how much of a stage is done, from 0 to 1."""
        if self._progress is None:
            self._progress = Progress(
                *(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()),
                console=self._console,
                auto_refresh=False,
            )
            self._progress.start()
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(stage, total=1.0)
        self._progress.update(self._bars[stage], completed=fraction, refresh=True)
        if self._progress.finished:
            self.stop()

    def print(self, line: str) -> None:
        """Prints a line above the bars."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Leaves the bars as they are, and gives the cursor back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._bars.clear()

"""Progress of a start, told in the log: an engine has no terminal, and the log of whoever starts it may have one."""

import logging
from collections.abc import Iterator

logger = logging.getLogger("maitred.engine")

_REPORTS = 10
"""Most reports of a range, without the last."""


class StageProgress:
    """Progress of one stage of a start, such as the conversion of weights.

    Each report is a record with `progress`. A terminal shows it as a bar, a text file has the stage's beginning alone,
    and collectors get all (see `maitred.observe.logs.LogHandler`).

    Args:
        stage: Text of the stage, such as ``Converting the weights of NAME``; bars are told apart by it.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def report(self, fraction: float) -> None:
        """Logs how much of the stage is done.

        Args:
            fraction: From 0 to 1; each stage begins with 0 and ends with 1.
        """
        logger.info(self._stage, extra={"progress": fraction})

    def range(self, count: int) -> Iterator[int]:
        """Yields 0 to `count` - 1, and reports between them how much of the stage is done."""
        reported = -1
        for index in range(count):
            if (part := _REPORTS * index // count) > reported:
                reported = part
                self.report(part / _REPORTS)
            yield index
        self.report(1.0)

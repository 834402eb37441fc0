"""Progress of a start, told in the log: an engine has no terminal, and the log of whoever starts it may have one."""

import logging
from collections.abc import Iterator

logger = logging.getLogger("maitred.engine")

_REPORTS = 10
"""Most reports of a stage, without the last."""


def report_progress(stage: str, fraction: float) -> None:
    """Logs how much of a stage is done; a terminal shows it as a bar, and a file has the stage's beginning alone.

    Args:
        stage: What is done, such as ``Converting the weights of NAME``; each stage has one text.
        fraction: From 0 to 1; each stage begins with 0 and ends with 1.
    """
    logger.info(stage, extra={"progress": fraction})


def progress_range(stage: str, count: int) -> Iterator[int]:
    """Yields 0 to `count` - 1, and reports between them how much of the stage is done."""
    told = -1
    for index in range(count):
        if (part := _REPORTS * index // count) > told:
            told = part
            report_progress(stage, part / _REPORTS)
        yield index
    report_progress(stage, 1.0)

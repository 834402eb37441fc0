"""Log output of an engine process, forwarded as records of the gateway's own log.

The engine logs in JSON, so a line keeps its level, its logger, and the ids of its request. Output that is printed and
not logged, such as a final traceback or a library's warning, becomes a record at the level *info*.
"""

import logging
from typing import Literal

import msgspec

_log = logging.getLogger("maitred.engine")


class _LogEntry(msgspec.Struct):
    """One line of the engine's log (see `maitred.observe.logs.JsonFormatter`)."""

    level: Literal["debug", "info", "warning", "error", "critical"]
    logger: str
    message: str
    request_id: str = ""
    trace_id: str = ""
    exception: str = ""
    progress: float | None = None


_decoder = msgspec.json.Decoder(_LogEntry)


def log_line(pid: int, line: bytes) -> str:
    """Writes one line of an engine's output to the gateway's log.

    Args:
        pid: Process id of the engine.
        line: The line without its end; not empty.

    Returns:
        The text of the line, for the report when the engine has died.
    """
    try:
        entry = _decoder.decode(line)
    except msgspec.MsgspecError:
        text = line.decode(errors="replace").rstrip()
        _log.info("engine %d: %s", pid, text)
        return text
    text = f"{entry.message}\n{entry.exception}" if entry.exception else entry.message
    logger, level = logging.getLogger(entry.logger), logging.getLevelNamesMapping()[entry.level.upper()]
    if logger.isEnabledFor(level):
        # The text is complete and has no arguments: the engine has limited similar records already.
        record = logger.makeRecord(entry.logger, level, "", 0, f"engine {pid}: {text}", (), None)
        if entry.request_id:
            record.request_id = entry.request_id
        if entry.trace_id:
            record.trace_id = entry.trace_id
        if entry.progress is not None:
            record.progress = entry.progress
        logger.handle(record)
    return text

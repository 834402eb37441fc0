"""What an engine that we have started prints, as records of our own log.

It logs in JSON, so a line keeps its level, its logger, and the ids of the request that it is about. What is not logged
but printed, such as the traceback that it dies with or a library's warning, is a line at the level *info*.
"""

import logging
from typing import Literal

import msgspec

_log = logging.getLogger("maitred.engine")


class _Line(msgspec.Struct):
    """One line of its log (see `maitred.observe.logs.JsonFormatter`)."""

    level: Literal["debug", "info", "warning", "error", "critical"]
    logger: str
    message: str
    request_id: str = ""
    trace_id: str = ""
    exception: str = ""


_decoder = msgspec.json.Decoder(_Line)


def log_line(pid: int, line: bytes) -> str:
    """Writes one to our log.

    Args:
        pid: Of the engine.
        line: Without its end; not empty.

    Returns:
        Its text, as it is told when the engine has died.
    """
    try:
        said = _decoder.decode(line)
    except msgspec.MsgspecError:
        text = line.decode(errors="replace").rstrip()
        _log.info("engine %d: %s", pid, text)
        return text
    text = f"{said.message}\n{said.exception}" if said.exception else said.message
    logger, level = logging.getLogger(said.logger), logging.getLevelNamesMapping()[said.level.upper()]
    if logger.isEnabledFor(level):
        # As a text without values: of what is alike the engine has let some through already.
        record = logger.makeRecord(said.logger, level, "", 0, f"engine {pid}: {text}", (), None)
        if said.request_id:
            record.request_id = said.request_id
        if said.trace_id:
            record.trace_id = said.trace_id
        logger.handle(record)
    return text

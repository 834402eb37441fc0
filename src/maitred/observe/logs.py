"""Logging for a server: one line per event, for people or for a collector; never a prompt, never an answer.

What is logged of a request are ids, counts and times. Its text is the user's and stays out of the log at every level.
"""

import logging
import sys
import time

import msgspec

from maitred.core.answer import Outcome, Tally
from maitred.observe.config import LogConfig

_TEXT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s  %(message)s"
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}

log = logging.getLogger(__name__)


def set_up(config: LogConfig) -> None:
    """Sends all log records of this process to standard error, in the configured shape."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if config.format == "json" else logging.Formatter(_TEXT, datefmt="%Y-%m-%d %H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    for library in ("asyncio", "uvicorn", "uvicorn.error", "alembic", "sqlalchemy", "aiosqlite"):
        # They log each connection and each step; what we need to know of one we log ourselves.
        logging.getLogger(library).setLevel(max(logging.WARNING, root.level))


class JsonFormatter(logging.Formatter):
    """One JSON object per line; what a caller passes as ``extra`` becomes fields."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class RequestLog:
    """One line per ended request. Implements `maitred.core.answer.Observer`.

    What went well is said at debug level: at thousands of requests a second it is the metrics that tell the story.
    """

    def ended(self, tally: Tally) -> None:
        """Logs one."""
        level = logging.WARNING if tally.outcome is Outcome.FAILED else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        duration_s = tally.ended_s - tally.started_s
        log.log(
            level,
            "request %s on %s %s: status %d, %d prompt + %d output tokens, %.3f s",
            tally.request_id,
            tally.route,
            tally.outcome,
            tally.status,
            tally.prompt_tokens,
            tally.completion_tokens,
            duration_s,
            extra={
                "request_id": tally.request_id,
                "route": tally.route,
                "model": tally.model,
                "chosen": None if tally.chosen is None else msgspec.structs.asdict(tally.chosen),
                "outcome": str(tally.outcome),
                "status": tally.status,
                "prompt_tokens": tally.prompt_tokens,
                "cached_tokens": tally.cached_tokens,
                "completion_tokens": tally.completion_tokens,
                "estimated": tally.estimated,
                "duration_s": round(duration_s, 6),
                "released_after_s": None if tally.released_s is None else round(tally.released_s - tally.started_s, 6),
                "priority": tally.priority,
                "waited_ms": {cause: round(waited_ms, 3) for cause, waited_ms in tally.waited_ms.items()},
                "degraded": tally.degraded,
                "fallbacks": tally.fallbacks,
                "escalated": [f"{failed.model}={failed.reason}" for failed in tally.failed],
                "recoveries": tally.recoveries,
                "continued": tally.continued,
            },
        )

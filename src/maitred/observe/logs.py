"""Logging for a server: one line per event, for people or for a collector; never a prompt, never an answer.

What is logged of a request are ids, counts and times. Its text is the user's and stays out of the log at every level.
What is logged in the middle of one says for which (`core.in_hand`), and of a flood of messages that are alike a few are
written and the others counted (`flood`).
"""

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TextIO

import msgspec

from maitred.core.answer import Outcome, RequestContext
from maitred.core.log_context import LOG_CONTEXT
from maitred.observe.config import LogConfig
from maitred.observe.log_limit import Kind, LogRateLimiter

_TEXT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s  %(message)s"
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}

log = logging.getLogger(__name__)


def set_up(config: LogConfig) -> None:
    """Sends all log records of this process to standard error, in the configured shape."""
    handler = LogHandler(config.burst)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    for library in ("asyncio", "uvicorn", "uvicorn.error", "alembic", "sqlalchemy", "aiosqlite"):
        # They log each connection and each step; what we need to know of one we log ourselves.
        logging.getLogger(library).setLevel(max(logging.WARNING, root.level))


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error what the flood lets pass, and how much it does not.

    Args:
        burst: Messages of one kind in a second; 0: all.
    """

    def __init__(self, burst: int) -> None:
        super().__init__(sys.stderr)
        self._flood = LogRateLimiter(burst)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`. Called under the handler's lock."""
        self._tell(self._flood.over(record.created))
        if self._flood.passes((record.name, record.levelno, str(record.msg)), record.created):
            _add_request(record)
            super().emit(record)

    def close(self) -> None:
        """The process ends, or logs otherwise from now on."""
        with self.lock or nullcontext():
            self._tell(self._flood.rest())
        super().close()

    def _tell(self, suppressed: Sequence[tuple[Kind, int]]) -> None:
        for (name, level, text), count in suppressed:
            # The values are gone, and of the text only the first line says which kind it is.
            told = f"suppressed {count:,} like this: {text.partition(chr(10))[0]}"
            record = logging.LogRecord(name, level, "", 0, told, None, None)
            record.suppressed = count
            super().emit(record)


def _add_request(record: logging.LogRecord) -> None:
    """Adds the ids of the request that is worked for, if one is."""
    in_hand = LOG_CONTEXT.get()
    if in_hand is None or in_hand.over:
        return
    if not hasattr(record, "request_id"):
        record.request_id = in_hand.request_id
    if in_hand.trace_id:
        record.trace_id = in_hand.trace_id


class TextFormatter(logging.Formatter):
    """One line for people, with the ids of its request at the end unless it names them itself."""

    def __init__(self) -> None:
        super().__init__(_TEXT, datefmt="%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is the library's
        """See `logging.Formatter`."""
        line = super().formatMessage(record)
        ids = [getattr(record, name, "") for name in ("request_id", "trace_id")]
        told = " ".join(one for one in ids if one and one not in record.message)
        return f"{line} [{told}]" if told else line


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
    """One line per ended request. Implements `maitred.core.answer.RequestObserver`.

    What went well is said at debug level: at thousands of requests a second it is the metrics that tell the story.
    """

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Logs each."""
        for context in contexts:
            self._write(context)

    def _write(self, context: RequestContext) -> None:
        level = logging.WARNING if context.outcome is Outcome.FAILED else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        duration_s = context.ended_s - context.started_s
        log.log(
            level,
            "request %s on %s %s: status %d, %d prompt + %d output tokens, %.3f s",
            context.request_id,
            context.route,
            context.outcome,
            context.status,
            context.prompt_tokens,
            context.completion_tokens,
            duration_s,
            extra={
                "request_id": context.request_id,
                "error": context.error or None,
                "route": context.route,
                "model": context.model,
                "chosen": None if context.selection is None else msgspec.structs.asdict(context.selection),
                "outcome": str(context.outcome),
                "status": context.status,
                "prompt_tokens": context.prompt_tokens,
                "cached_tokens": context.cached_tokens,
                "completion_tokens": context.completion_tokens,
                "estimated": context.estimated,
                "duration_s": round(duration_s, 6),
                "released_after_s": None
                if context.dispatched_s is None
                else round(context.dispatched_s - context.started_s, 6),
                "priority": context.priority,
                "waited_ms": {cause: round(waited_ms, 3) for cause, waited_ms in context.waited_ms.items()},
                "degraded": context.degraded,
                "fallbacks": context.fallbacks,
                "escalated": context.escalated,
                "recoveries": context.recoveries,
                "continued": context.continued,
            },
        )

"""Logging for a server: one line per event, for people or for a collector, without prompts or responses.

The log contains ids, counts and times of a request. Its text belongs to the user and stays out of the log at every
level. Messages that are logged while a request is handled carry its ids (`core.context.LogContext`). Of many equal
messages, a few are written and the others are counted (`log_limit`).
"""

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TextIO

import msgspec

from maitred.core.context import LOG_CONTEXT, Outcome, RequestContext
from maitred.observe.config import LogConfig
from maitred.observe.log_limit import LogRateLimiter, MessageKind

if TYPE_CHECKING:
    from maitred.observe.progress_bars import ProgressBars

_TEXT_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s  %(message)s"
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}

log = logging.getLogger(__name__)


def configure_logging(config: LogConfig) -> None:
    """Sends all log records of this process to standard error, in the configured format."""
    handler = LogHandler(config.burst)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    for library in ("asyncio", "uvicorn", "uvicorn.error", "alembic", "sqlalchemy", "aiosqlite"):
        # These libraries log each connection and each step; the important events are logged by maitred itself.
        logging.getLogger(library).setLevel(max(logging.WARNING, root.level))


class LogHandler(logging.StreamHandler[TextIO]):
    """Handler that writes records to standard error under the rate limit, and counts the suppressed ones.

    A record with `progress`, a number from 0 to 1, is drawn as a bar on a terminal. In a text file only the beginning
    of what it tells of is a line; collectors get all.

    Args:
        burst: Messages of one kind in a second; 0: all.
    """

    def __init__(self, burst: int) -> None:
        super().__init__(sys.stderr)
        self._limiter = LogRateLimiter(burst)
        self._bars: ProgressBars | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record unless it is suppressed. Called under the handler's lock."""
        self._write_suppressed(self._limiter.take_expired(record.created))
        progress: float | None = getattr(record, "progress", None)
        if progress is not None and not isinstance(self.formatter, JsonFormatter):
            if self.stream.isatty():
                self._draw(record.getMessage(), progress)
                return
            if progress > 0:
                return
        if self._limiter.allow((record.name, record.levelno, str(record.msg)), record.created):
            _add_request_ids(record)
            if self._bars is not None and self._bars.shown:
                self._bars.print(self.format(record))
            else:
                super().emit(record)

    def _draw(self, stage: str, progress: float) -> None:
        if self._bars is None:
            from maitred.observe.progress_bars import ProgressBars  # slow to import, and few processes draw

            self._bars = ProgressBars(self.stream)
        self._bars.show(stage, progress)

    def close(self) -> None:
        """Writes the remaining counts and closes the handler."""
        with self.lock or nullcontext():
            self._write_suppressed(self._limiter.take_all())
            if self._bars is not None:
                self._bars.stop()
        super().close()

    def _write_suppressed(self, suppressed: Sequence[tuple[MessageKind, int]]) -> None:
        for (name, level, text), count in suppressed:
            # The values are no longer known, and the first line of the text is enough to identify the kind.
            message = f"suppressed {count:,} like this: {text.partition(chr(10))[0]}"
            record = logging.LogRecord(name, level, "", 0, message, None, None)
            record.suppressed = count
            super().emit(record)


def _add_request_ids(record: logging.LogRecord) -> None:
    """Adds the ids of the current request to a record, if there is one."""
    log_context = LOG_CONTEXT.get()
    if log_context is None or log_context.over:
        return
    if not hasattr(record, "request_id"):
        record.request_id = log_context.request_id
    if log_context.trace_id:
        record.trace_id = log_context.trace_id


class TextFormatter(logging.Formatter):
    """Formatter for people: one line, with the ids of its request at the end unless the message names them."""

    def __init__(self) -> None:
        super().__init__(_TEXT_FORMAT, datefmt="%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is the library's
        """Formats a record, as `logging.Formatter` requires."""
        line = super().formatMessage(record)
        ids = [getattr(record, name, "") for name in ("request_id", "trace_id")]
        suffix = " ".join(identifier for identifier in ids if identifier and identifier not in record.message)
        return f"{line} [{suffix}]" if suffix else line


class JsonFormatter(logging.Formatter):
    """Formatter for collectors: one JSON object per line; values passed as ``extra`` become fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record, as `logging.Formatter` requires."""
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
    """Log with one line per ended request. Implements `maitred.core.context.RequestObserver`.

    Successful requests are logged at debug level: at thousands of requests a second the metrics serve better.
    """

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Logs each of the ended requests."""
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
                "cache": None if context.cache is None else str(context.cache.status),
                "recoveries": context.recoveries,
                "continued": context.continued,
            },
        )

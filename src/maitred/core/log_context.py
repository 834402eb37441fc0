"""For which request a task works, so that what is logged in the middle of it can say so.

A task hands it on to those that it starts. Some of these outlive the request; what they do then is no longer for it.
"""

from contextvars import ContextVar


class LogContext:
    """Context of one request for log lines.

    Attributes:
        request_id: What its client was told.
        trace_id: Empty: it is not traced.
        over: Whether it has ended.
    """

    __slots__ = ("over", "request_id", "trace_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.trace_id = ""
        self.over = False


LOG_CONTEXT: ContextVar[LogContext | None] = ContextVar("request in hand", default=None)
"""The request that is worked for; None: none is."""

"""Trace context of a span in a distributed trace: W3C Trace Context, level 1.

https://www.w3.org/TR/trace-context/
"""

import re

from msgspec import Struct
from msgspec.structs import replace

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_MOST_STATE_CHARACTERS = 512
"""Maximum length of a trace state; the standard allows dropping a longer one."""
_MOST_MEMBERS = 32
_KEY, _OURS = "maitred", "maitred=usage"
"""The maitred member of the trace state, for maitred gateways behind this one."""
_RANGE = 1 << 64


class TraceContext(Struct, frozen=True):
    """Reference to a span for other processes."""

    trace_id: str
    """Trace id with 32 hexadecimal digits."""
    span_id: str
    """Span id with 16 hexadecimal digits."""
    sampled: bool = False
    """Whether the trace is recorded, by its starter or by maitred."""
    state: str = ""
    """Trace state of the tracing systems, passed on unchanged except for our member (see `accounting`)."""

    @property
    def accounted(self) -> bool:
        """Whether a maitred gateway above this span reports the usage of the request."""
        return _OURS in self._members()

    def accounting(self) -> "TraceContext":
        """Returns the context for work below that this gateway accounts for."""
        others = [member for member in self._members() if member.partition("=")[0] != _KEY]
        state = ",".join([_OURS, *others[: _MOST_MEMBERS - 1]])
        return replace(self, state=state if len(state) <= _MOST_STATE_CHARACTERS else _OURS)

    def below(self, span_id: str) -> "TraceContext":
        """Returns the context of another span in the same trace."""
        return replace(self, span_id=span_id)

    def headers(self) -> dict[str, str]:
        """Returns the headers for a request that this span sends."""
        parent = f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"
        return {"traceparent": parent, **({"tracestate": self.state} if self.state else {})}

    def _members(self) -> list[str]:
        """Members of the trace state, the latest first."""
        return [member for part in self.state.split(",") if (member := part.strip())]


def context_in(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """Returns the trace context in a request's headers; None if there is none that can be read.

    Newer versions may append fields; only the known fields are read.
    """
    match = _HEADER.fullmatch((traceparent or "").strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = (tracestate or "").strip()
    if len(state) > _MOST_STATE_CHARACTERS or not state.isascii() or not state.isprintable():
        state = ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state)


def falls_within(trace_id: str, ratio: float) -> bool:
    """Whether a trace is in the sampled share; every sampler that uses the id agrees.

    The lower half of the id decides, as in OpenTelemetry's ``TraceIdRatioBased`` sampler.
    """
    return int(trace_id[16:], 16) < round(ratio * _RANGE)

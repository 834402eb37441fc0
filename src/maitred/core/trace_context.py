"""Where a piece of work stands in a trace that goes through many processes: W3C Trace Context, level 1.

https://www.w3.org/TR/trace-context/
"""

import re

from msgspec import Struct
from msgspec.structs import replace

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_MOST_STATE_CHARACTERS = 512
"""What has to be passed on at least; of more we pass on none, which is allowed."""
_MOST_MEMBERS = 32
_KEY, _OURS = "maitred", "maitred=usage"
"""Our member of the state, for gateways of ours behind this one."""
_RANGE = 1 << 64


class TraceContext(Struct, frozen=True):
    """A span, as others are told of it."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 of them."""
    sampled: bool = False
    """Whether whoever began the trace, or we, keep it."""
    state: str = ""
    """What tracing systems tell each other; passed on as it came, but for what we say (see `accounting`)."""

    @property
    def accounted(self) -> bool:
        """Whether a gateway of ours, above this span, tells what the request used."""
        return _OURS in self._members()

    def accounting(self) -> "TraceContext":
        """Returns the context for work below that this gateway accounts for."""
        others = [member for member in self._members() if member.partition("=")[0] != _KEY]
        state = ",".join([_OURS, *others[: _MOST_MEMBERS - 1]])
        return replace(self, state=state if len(state) <= _MOST_STATE_CHARACTERS else _OURS)

    def below(self, span_id: str) -> "TraceContext":
        """Another span of the same trace."""
        return replace(self, span_id=span_id)

    def headers(self) -> dict[str, str]:
        """For a request that is sent on behalf of this span."""
        parent = f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"
        return {"traceparent": parent, **({"tracestate": self.state} if self.state else {})}

    def _members(self) -> list[str]:
        """Members of the trace state, the latest first."""
        return [member for part in self.state.split(",") if (member := part.strip())]


def context_in(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """Returns the trace context in a request's headers; None if there is none that can be read.

    Versions after ours may have more behind what we know, and are read as far as we know them.
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
    """Whether a share of all traces has this one among it: the same for everybody who samples by the id.

    The lower half of the id decides, as OpenTelemetry's ``TraceIdRatioBased`` sampler has it.
    """
    return int(trace_id[16:], 16) < round(ratio * _RANGE)

"""What the tester itself cost: a measurement whose tester was the limit says nothing of the server."""

from typing import Literal

import msgspec

Limit = Literal["none", "tester", "machine"]
"""What bounded the measurement beside the server: nothing, the tester's own event loop, or a machine without a free
core."""


class TesterCost(msgspec.Struct, frozen=True, kw_only=True):
    """The tester's own share of what was measured, and the verdict on it.

    No figure is ever NaN: it is 0 where none was taken.

    Attributes:
        cpu_seconds: Processor time of the tester over the run.
        cpu_share: Mean use of the processor; 1.0 is one core, and one event loop cannot use more.
        cpu_share_max: Of the busiest second.
        starved_share: Share of the run in which the tester was ready to run but no core was free.
        lag_p50_s, lag_p99_s, lag_max_s: Delays of the event loop; a time stamp may be late by so much.
        send_delay_p50_s, send_delay_p99_s, send_delay_max_s: From when a request was due to when the tester had it
            ready to go out; waiting for a connection or for a turn under `max_open` is not in it.
        peak_open: Most requests that were open at once.
        peak_memory_bytes: Resident.
        limit: What bounded the measurement beside the server.
        verdict: The same in a sentence for people, with what to do.
    """

    cpu_seconds: float
    cpu_share: float
    cpu_share_max: float
    starved_share: float
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    send_delay_p50_s: float
    send_delay_p99_s: float
    send_delay_max_s: float
    peak_open: int
    peak_memory_bytes: int
    limit: Limit
    verdict: str

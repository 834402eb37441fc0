"""Cost of the load tester itself, and whether it, not the server, was the limit of what was measured."""

from typing import Literal

import msgspec
import numpy as np

from maitred.load.measure.record import LoadTesterSample, RunData
from maitred.load.measure.times import Floats

Limit = Literal["none", "tester", "machine"]
"""What bounded the measurement beside the server: nothing, the tester's own event loop, or a machine without a free
core."""

BUSY = 0.8
"""Share of a core above which the tester's own work, rather than its neighbours', explains a late probe."""
STARVED = 0.02
"""Share of the time without a core above which the neighbours explain the late probes of a tester that is not busy."""
TOLERATED_S = 0.002
TOLERATED_SHARE = 0.03
"""A figure may be off by the larger of the two before the tester calls itself the limit."""
TOLERATED_SEND_S = 0.02
"""For requests that went out late: a timer's own grain and a burst of simultaneous ones stay below it."""


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


_NOTHING: tuple[Limit, str] = ("none", "The tester kept up: its own delays are too small to show in the figures.")


def judge(data: RunData) -> TesterCost:
    """Returns the cost of the tester, and whether it, or the machine it shared, was the limit of the run.

    A percentile of a latency can be wrong by as much as the event loop's lag at the same rank, so each is held against
    the other: where the lag is more than 3 % of the time that it dates (and more than 2 ms), the figures are not the
    server's alone. The same for requests that went out later than they were due.
    """
    lag = np.frombuffer(data.lag_s, dtype=np.float64) if data.lag_s else np.zeros(1)
    send = np.asarray([record.late_s for record in data.records] or [0.0])
    ttft = np.asarray([r.arrivals_s[0] - r.intended_s for r in data.records if r.arrivals_s])
    gaps = [np.diff(np.frombuffer(record.arrivals_s)) for record in data.records if len(record.arrivals_s) > 1]
    itl = np.concatenate(gaps) if gaps else np.zeros(0)
    shares = np.asarray([s.cpu_share for s in data.samples] or [0.0])
    starved = np.asarray([s.starved_share for s in data.samples] or [0.0])

    late = _worst(lag, {"between tokens": itl, "to the first token": ttft})
    send_p99_s = float(np.quantile(send, 0.99))
    send_bound_s = max(TOLERATED_SEND_S, TOLERATED_SHARE * float(np.quantile(ttft, 0.5)) if ttft.size else 0.0)
    reason = late
    if not reason and send_p99_s > send_bound_s:
        reason = f"one request in a hundred went out {send_p99_s * 1e3:.0f} ms or more after it was due"
    limit, verdict = _cause(data.samples, reason) if reason else _NOTHING
    return TesterCost(
        cpu_seconds=data.cpu_seconds,
        cpu_share=data.cpu_seconds / data.seconds if data.seconds else 0.0,
        cpu_share_max=float(shares.max()),
        starved_share=float(starved.mean()),
        lag_p50_s=float(np.quantile(lag, 0.5)),
        lag_p99_s=float(np.quantile(lag, 0.99)),
        lag_max_s=float(lag.max()),
        send_delay_p50_s=float(np.quantile(send, 0.5)),
        send_delay_p99_s=send_p99_s,
        send_delay_max_s=float(send.max()),
        peak_open=max((s.open_streams for s in data.samples), default=0),
        peak_memory_bytes=data.peak_memory_bytes,
        limit=limit,
        verdict=verdict,
    )


def _cause(samples: list[LoadTesterSample], reason: str) -> tuple[Limit, str]:
    """Returns what took the processor in the seconds with the longest delays, and what to do about it."""
    worst = sorted(samples, key=lambda sample: sample.lag_s)[-max(1, len(samples) // 4) :]
    cpu_share = float(np.mean([sample.cpu_share for sample in worst])) if worst else 0.0
    starved_share = float(np.mean([sample.starved_share for sample in worst])) if worst else 0.0
    if cpu_share < BUSY and starved_share > STARVED:
        return "machine", (
            f"The machine was the limit, not only the server: {reason}, because others had the cores "
            f"({starved_share:.0%} of the time the tester was ready to run and had to wait). Give the tester a core of "
            "its own, or another machine; until then the figures are upper bounds."
        )
    return "tester", (
        f"The tester was the limit, not the server: {reason}, at {cpu_share:.0%} of a core. Use less load per tester; "
        "until then the figures are upper bounds."
    )


def _worst(lag: Floats, times: dict[str, Floats]) -> str:
    """The first percentile of a time that the lag at the same rank may have changed, as words; empty if none."""
    for name, values in times.items():
        for rank in (0.5, 0.95, 0.99):
            if values.size:
                late_s, value_s = float(np.quantile(lag, rank)), float(np.quantile(values, rank))
                if late_s > max(TOLERATED_S, TOLERATED_SHARE * value_s):
                    return (
                        f"p{rank * 100:g} of the time {name} ({value_s * 1e3:.1f} ms) may be {late_s * 1e3:.1f} ms off"
                    )
    return ""

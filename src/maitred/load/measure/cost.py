"""Cost of the load tester itself, and whether the tester was the limit of the measurement."""

from typing import Literal

import msgspec
import numpy as np

from maitred.load.measure.record import LoadTesterSample, RunData
from maitred.load.measure.times import Floats

Limit = Literal["none", "tester", "machine"]
"""Limit of the measurement besides the server: none, the tester's own event loop, or a machine without a free core."""

BUSY = 0.8
"""Share of a core above which the tester's own work explains a late probe."""
STARVED = 0.02
"""Share of time without a core above which other processes explain the late probes of an idle tester."""
TOLERATED_S = 0.002
TOLERATED_SHARE = 0.03
"""Share of a time that a figure may be wrong by before the tester counts as the limit."""
TOLERATED_SEND_S = 0.02
"""Tolerated send delay: the resolution of a timer and a burst of simultaneous requests stay below it."""


class TesterCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of the tester in a run, and the verdict on it.

    A figure is 0 if it was not measured, so no figure is NaN.

    Attributes:
        cpu_seconds: Processor time of the tester over the run.
        cpu_share: Mean use of the processor; 1.0 is one core, and one event loop cannot use more.
        cpu_share_max: Use of the processor in the busiest second.
        starved_share: Share of the run in which the tester was ready to run but no core was free.
        lag_p50_s, lag_p99_s, lag_max_s: Delays of the event loop; a time stamp may be late by this much.
        send_delay_p50_s, send_delay_p99_s, send_delay_max_s: Time from when a request was due to when the tester was
            ready to send it; waits for a connection or because of `max_open` are excluded.
        peak_open: Most requests that were open at once.
        peak_memory_bytes: Most resident memory.
        limit: Limit of the measurement besides the server.
        verdict: Verdict in one sentence for people, with what to do.
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
    server's alone. Requests that were sent later than they were due are judged in the same way.
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
    """Returns what used the processor in the seconds with the longest delays, and what to do about it."""
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
    """Describes the first percentile that the lag at its rank may have changed; empty: none."""
    for name, values in times.items():
        for rank in (0.5, 0.95, 0.99):
            if values.size:
                late_s, value_s = float(np.quantile(lag, rank)), float(np.quantile(values, rank))
                if late_s > max(TOLERATED_S, TOLERATED_SHARE * value_s):
                    return (
                        f"p{rank * 100:g} of the time {name} ({value_s * 1e3:.1f} ms) may be {late_s * 1e3:.1f} ms off"
                    )
    return ""

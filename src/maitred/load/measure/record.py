"""Record of what one user saw of one request: the data of every report."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum


class UserOutcome(StrEnum):
    """Outcome of a request, as its user saw it; every request has exactly one."""

    COMPLETE = "complete"
    """The answer is complete: a finish reason, then the end that the protocol requires."""
    REFUSED = "refused"
    """HTTP 4xx after all retries (429 included)."""
    FAILED = "failed"
    """No answer: HTTP 5xx, or no connection, after all retries."""
    CUT = "cut"
    """The answer began and did not end as it must: an error event, a broken connection, an end without ``[DONE]``."""
    TIMED_OUT = "timed_out"
    """The client's own timeout passed."""
    CANCELLED = "cancelled"
    """The user left on purpose, as the workload wanted."""
    UNFINISHED = "unfinished"
    """The request was still open when the run had to end."""


@dataclass(slots=True)
class RequestRecord:
    """Record of one request; all times are seconds since the start of the run, by one monotonic clock.

    Attributes:
        session: Id of its session in the workload.
        turn: Position within its session.
        tenant: Tenant that the request belongs to.
        intended_s: When the request was due by the workload. Latencies start here, so that a slow server cannot hide
            delays by making the tester late (no coordinated omission).
        late_s: Delay of the tester itself: from when the request was due to when it was ready to be sent, before any
            wait for a connection or because of ``max_open``.
        sent_s: When its first bytes were written; with retries, of the last attempt. NaN: it was never sent.
        headers_s: When the response's head arrived. NaN: it never arrived.
        ended_s: When the outcome was known.
        arrivals_s: When each piece of the answer's text was read from the socket.
        asked_tokens: Requested length of the answer.
        prompt_tokens, cached_tokens, output_tokens: Counts of the server's usage; 0: it sent none.
        attempts: Number of times that it was sent.
        status: Status of the last HTTP response; 0: there was none.
        error: Error message of the server or of the client; empty: the answer is complete.
        text: Pieces of the answer, if the run keeps them (chaos compares them); else None.
    """

    session: int
    turn: int
    tenant: str
    intended_s: float
    asked_tokens: int
    late_s: float = 0.0
    sent_s: float = float("nan")
    headers_s: float = float("nan")
    ended_s: float = float("nan")
    arrivals_s: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    attempts: int = 0
    status: int = 0
    finish_reason: str = ""
    outcome: UserOutcome = UserOutcome.UNFINISHED
    error: str = ""
    text: list[str] | None = None


@dataclass(slots=True)
class LoadTesterSample:
    """Sample of the tester's own state over one interval (about a second).

    Attributes:
        at_s: End of the interval, in seconds since the start of the run.
        cpu_share: Processor time of the tester divided by the length of the interval; 1.0 is one core.
        starved_share: Share of the interval in which the tester was ready to run but no core was free.
        lag_s: Longest delay of the event loop: a time stamp can be late by this much.
        open_streams: Requests being answered at `at_s`.
        memory_bytes: Resident memory.
    """

    at_s: float
    cpu_share: float
    starved_share: float
    lag_s: float
    open_streams: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Progress of a run, for live views.

    Attributes:
        at_s: Seconds since the start of the run.
        share: Share of the run that is done, from 0 to 1; None: its end is not known.
        due, open, ended: Number of requests that were due so far, that are open now, and that have ended by outcome.
        output_tokens_per_s, ttft_s, itl_s: Figures of the last seconds (times are medians); NaN: nothing arrived.
        cpu_share, lag_s: Values of the tester itself.
    """

    at_s: float
    share: float | None
    due: int
    open: int
    ended: dict[UserOutcome, int]
    output_tokens_per_s: float
    ttft_s: float
    itl_s: float
    cpu_share: float
    lag_s: float


@dataclass
class RunData:
    """Data that a run has measured.

    Attributes:
        records: One per request that was due, in the order in which they were due.
        samples: Samples of the tester itself.
        seconds: Time from the start of the run to the end of the last request.
        started_unix_s: Wall time at the start, in seconds since the Unix epoch.
        lag_s: Delays of the event loop over the whole run, one per probe.
        server: Description of the target by itself (the ``Server`` header, listed models), for the report.
        model: Model that the requests named.
        tokens_per_word, template_tokens: Results of the calibration.
        text_seed: Seed of the words of the prompts.
    """

    records: list[RequestRecord]
    samples: list[LoadTesterSample]
    seconds: float
    started_unix_s: float
    lag_s: "array[float]" = field(default_factory=lambda: array("d"))
    server: str = ""
    model: str = ""
    tokens_per_word: float = 1.0
    template_tokens: float = 0.0
    text_seed: int = 0
    cpu_seconds: float = 0.0
    peak_memory_bytes: int = 0

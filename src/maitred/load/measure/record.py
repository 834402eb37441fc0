"""Record of what one user saw of one request: the raw material of every report."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum


class UserOutcome(StrEnum):
    """How a request ended, as its user saw it. Every request has exactly one."""

    COMPLETE = "complete"
    """The answer came whole: a finish reason, then the end that the protocol asks for."""
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
    """Still open when the run had to end. Its times so far are lower bounds, and it counts against objectives."""


@dataclass(slots=True)
class RequestRecord:
    """One request. All times are seconds since the start of the run, by one monotonic clock.

    Attributes:
        session: Of the workload.
        turn: Position within its session.
        tenant: Who asked.
        intended_s: When the request was due by the workload. Latencies start here, so a server that makes the tester
            late cannot hide it (no coordinated omission).
        late_s: By how much the tester itself was late: from when the request was due to when it was ready to go out,
            before any wait for a connection or for its turn under ``max_open``.
        sent_s: When its first bytes were written; with retries, of the last attempt. NaN: never.
        headers_s: When the response's head arrived. NaN: never.
        ended_s: When the outcome was known.
        arrivals_s: When each piece of the answer's text was read from the socket.
        asked_tokens: The length of the answer that was asked for.
        prompt_tokens, cached_tokens, output_tokens: By the server's own usage; 0 when it sent none.
        attempts: Times it was sent.
        status: Of the last HTTP response; 0: none.
        error: The server's words, or the client's; empty when complete.
        text: The pieces of the answer, where the run was asked to keep them (chaos compares them); else None.
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
    """The tester's own state over one interval (about a second).

    Attributes:
        at_s: End of the interval, since the start of the run.
        cpu_share: Processor time of the tester over the interval's length; 1.0 is one core.
        starved_share: Share of the interval in which the tester was ready to run but no core was free.
        lag_s: Longest delay of the event loop: a time stamp can be late by this much.
        open_streams: Requests being answered at `at_s`.
        memory_bytes: Resident.
    """

    at_s: float
    cpu_share: float
    starved_share: float
    lag_s: float
    open_streams: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class RunProgress:
    """A run as it stands, for whoever watches it.

    Attributes:
        at_s: Since the start of the run.
        share: Of the run that is done, 0 to 1; None where its end is not known.
        due, open, ended: Requests that were due so far, are open now, have ended by outcome.
        output_tokens_per_s, ttft_s, itl_s: Of the last seconds (medians); NaN: nothing arrived.
        cpu_share, lag_s: Of the tester itself.
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
    """Everything a run has measured.

    Attributes:
        records: One per request that was due, in the order in which they were due.
        samples: Of the tester itself.
        seconds: From the start of the run to the end of the last request.
        started_unix_s: Wall clock at the start.
        lag_s: Event-loop delays over the whole run, one per probe.
        server: What the target said of itself (the ``Server`` header, listed models), for the report.
        model: The model that was asked.
        tokens_per_word, template_tokens: What calibration found.
        text_seed: That the words of the prompts were drawn with.
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

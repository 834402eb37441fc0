"""What an API worker and the controller of its gateway say to each other: frames of msgpack over a Unix socket.

::

    worker                                controller
      Hello ------------------------------->       with what an earlier controller has granted, and what goes on
      <------------------------- Welcome, and again whenever something in it changes
      Asks ------------------------------->       one request at one model
      <------------------------- Seated, or Refused
      <------------------------- Released         its turn has come; the replica
      Took ------------------------------->       tokens, some times a second
      FailedThere ------------------------>       the replica has failed it: Released follows, or Refused
      Settles ---------------------------->       the answer is whole
      <------------------------- Settled          whatever it held is given back
      Leaves ----------------------------->       the same, where it was not settled
      Ended ------------------------------>       the HTTP request is over: what metrics, logs and stories tell of it

`number` is the worker's, for as long as its connection lasts. The end of the byte stream is the death of the peer: the
controller ends all that the worker had asked for, as if its callers had left. Times are of the machine's monotonic
clock, which both read.
"""

from enum import StrEnum

import msgspec

from maitred.core.answer import ModelSelection, Outcome, RateLimitStatus, RejectedAnswer
from maitred.core.flow import Flow, PriorityClass, QueuePosition
from maitred.core.request import FinishReason, SamplingParams, Usage
from maitred.core.tenancy import DirectoryChanges, Principal
from maitred.core.timeline import TimelineSpan
from maitred.core.trace_context import TraceContext
from maitred.wire.error_codec import WrittenError


class PromptSummary(msgspec.Struct, frozen=True, array_like=True):
    """A prompt as the queue sees it."""

    tokens: int
    ids: list[int]
    """Its tokens; where these are estimated, what stands for the first of them. None where nobody looks at them."""


class AdmitRequest(msgspec.Struct, frozen=True, array_like=True, tag="asks"):
    """Worker: may this run, and where? See `Errand` and `Work`."""

    number: int
    pool: str
    principal: Principal
    request_id: str
    route: str
    model: str
    arrived_s: float
    flow: Flow
    prompts: list[PromptSummary]
    choices: int
    length: int
    """Most tokens of a choice, before any limit has had a look at it."""
    window_left: int
    max_tokens: int | None
    """As its caller named it."""
    min_tokens: int
    deadline_s: float | None
    session: str | None
    max_tokens_param: str
    prompt_param: str


class TokensUsed(msgspec.Struct, frozen=True, array_like=True, tag="took"):
    """Worker: tokens came."""

    number: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first: bool = False
    """Whether its very first token is among them."""


class AttemptResult(StrEnum):
    """What an attempt at a server of somebody else's says of that server."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEITHER = "neither"
    AWAY = "away"
    """It could not even be reached."""


class ReplicaFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed_there"):
    """Worker: the replica has failed it, and it waits for another one. See `Seat.again`."""

    number: int
    met: AttemptResult
    prompts: list[int]
    answer_by_s: float | None
    rest_s: float | None


class SettleRequest(msgspec.Struct, frozen=True, array_like=True, tag="settles"):
    """Worker: the answer is whole, and its end is shown as soon as this is in the ledger."""

    number: int
    usage: Usage
    outcome: Outcome
    first_token_s: float | None


class ReleaseRequest(msgspec.Struct, frozen=True, array_like=True, tag="leaves"):
    """Worker: it is over here."""

    number: int
    usage: Usage
    first_token_s: float | None
    met: AttemptResult = AttemptResult.NEITHER
    error: WrittenError | None = None
    cancelled: bool = False
    """Whether its caller has left."""


class ResumeGrant(msgspec.Struct, frozen=True, array_like=True):
    """Of a worker that had another controller before: this was granted, and goes on, or has ended since."""

    asks: AdmitRequest
    """Without the tokens of its prompts; `number` is still good."""
    lease: str
    max_tokens: int
    """For each choice, as it was granted."""
    replica: str
    """Where it runs; empty: it waits."""
    usage: Usage
    """Until now; what is told of tokens from here on comes on top."""
    first_token_s: float | None
    ended: SettleRequest | ReleaseRequest | None = None
    """What could not be told when it happened."""


class WorkerHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Worker: here I am."""

    worker: int
    """Its number in the gateway, from 1."""
    pid: int
    resumes: list[ResumeGrant]
    unanswered: list[str] = []
    """Ids of requests that have asked, ask again or have given up: nobody has been told what was granted to them."""


class RequestSummary(msgspec.Struct, frozen=True, array_like=True):
    """What stories and spans tell of what was asked."""

    model: str
    sampling: SamplingParams
    max_tokens: int | None
    seed: int | None
    left_open: frozenset[str]
    stops: tuple[str, ...]
    priority: int | None
    ttft_in_s: float | None
    itl_objective_s: float | None
    deadline_in_s: float | None
    needs: tuple[str, ...]
    whole: bool


class RequestEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """Worker: the HTTP request is over. See `Tally`."""

    request_id: str
    started_s: float
    ended_s: float
    route: str
    outcome: Outcome
    status: int
    principal: Principal | None
    model: str
    ask: RequestSummary | None
    failure: WrittenError | None
    refused_by: str
    chosen: ModelSelection | None
    clamped_max_tokens: int | None
    priority: PriorityClass | None
    forecast: QueuePosition | None
    released_s: float | None
    first_token_s: float | None
    waited_ms: dict[str, float]
    degraded: list[str]
    usage: Usage
    gaps_s: list[float]
    finishes: list[FinishReason]
    fallbacks: list[str]
    failed: list[RejectedAnswer]
    recoveries: int
    continued: int
    stalled: bool
    chapters: list[TimelineSpan]
    trace: TraceContext | None
    parent_span_id: str


class SubmissionAcked(msgspec.Struct, frozen=True, array_like=True, tag="heard"):
    """Worker: an engine's report counts the next of its prompts. See `Seat.submitted`."""

    number: int


class RateLimitQuery(msgspec.Struct, frozen=True, array_like=True, tag="peeks"):
    """Worker: where does a caller stand with its limits?"""

    number: int
    principal: Principal
    model: str


class DirectoryAck(msgspec.Struct, frozen=True, array_like=True, tag="knows"):
    """Worker: it goes by this version of keys, tenants and limits now."""

    version: int


class DirectoryQuery(msgspec.Struct, frozen=True, array_like=True, tag="reads"):
    """Worker: what of keys, tenants and limits is new since this version?"""

    number: int
    since: int


ToController = (
    WorkerHello
    | AdmitRequest
    | SubmissionAcked
    | TokensUsed
    | ReplicaFailed
    | SettleRequest
    | ReleaseRequest
    | RequestEnded
    | RateLimitQuery
    | DirectoryQuery
    | DirectoryAck
)


class ControllerSnapshot(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Controller: what a worker has to know, as it is now."""

    directory: int
    """The version of keys, tenants and limits."""
    passed: frozenset[str]
    """Names of models whose requests are the controller's own business, because versions are tried behind them."""
    windows: dict[str, int]
    """Pool -> tokens of prompt and answer together, where a server has said so."""
    engines: dict[str, str]
    """Where the engines of the `model` section listen, by name."""


class AdmitAccepted(msgspec.Struct, frozen=True, array_like=True, tag="seated"):
    """Controller: it has what it needs from its caller's limits, and waits for its turn."""

    number: int
    lease: str
    max_tokens: int
    clamped: bool
    standing: RateLimitStatus | None
    place: QueuePosition
    expected_tokens: int


class AdmitRejected(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Controller: this stands against it. It holds nothing any more."""

    number: int
    error: WrittenError
    standing: RateLimitStatus | None = None


class Dispatched(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """Controller: its turn has come."""

    number: int
    replica: str
    waited_ms: dict[str, float]
    elsewhere: bool
    """Whether another replica could take it, should this one fail."""


class SettleReply(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """Controller: it is in the ledger, and holds nothing any more; or why not."""

    number: int
    error: WrittenError | None = None


class DirectoryUpdate(msgspec.Struct, frozen=True, array_like=True, tag="news"):
    """Controller: the answer to `DirectoryQuery`; or why there is none."""

    number: int
    changes: DirectoryChanges | None
    error: WrittenError | None = None


class RateLimitReply(msgspec.Struct, frozen=True, array_like=True, tag="peeked"):
    """Controller: the answer to `RateLimitQuery`."""

    number: int
    standing: RateLimitStatus | None


ToWorker = (
    ControllerSnapshot | AdmitAccepted | AdmitRejected | Dispatched | SettleReply | DirectoryUpdate | RateLimitReply
)

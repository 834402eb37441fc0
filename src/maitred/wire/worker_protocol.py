"""Protocol between an API worker and its controller: msgpack frames over a Unix socket.

::

    worker                                controller
      WorkerHello ------------------------->       with the grants of an earlier controller whose requests go on
      <------------------ ControllerSnapshot       and again whenever something in it changes
      AdmitRequest ------------------------>       one request at one model
      <----- AdmitAccepted, or AdmitRejected
      <-------------------------- Dispatched       its turn has come; with the replica
      TokensUsed -------------------------->       token counts, some times a second
      ReplicaFailed ----------------------->       the replica has failed; Dispatched follows, or AdmitRejected
      SettleRequest ----------------------->       the response is complete
      <------------------------- SettleReply       all that the request held is released
      ReleaseRequest ---------------------->       in place of SettleRequest, where the response is not complete
      RequestEnded ------------------------>       the HTTP request has ended; with its data for metrics and logs

The worker assigns `number`, which is valid as long as its connection lasts. The end of the byte stream means that the
peer is dead: the controller ends all requests of the worker, as if their clients had disconnected. Times use the
monotonic clock of the machine, which both processes read.
"""

from enum import StrEnum

import msgspec

from maitred.core.context import CacheResult, ModelSelection, Outcome, RateLimitStatus, RejectedAnswer
from maitred.core.flow import Flow, PriorityClass, QueuePosition
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason, SamplingParams, Usage
from maitred.core.tenancy import DirectoryChanges, Principal
from maitred.core.timeline import TimelineSpan
from maitred.core.trace_context import TraceContext
from maitred.wire.error_codec import EncodedError


class PromptSummary(msgspec.Struct, frozen=True, array_like=True):
    """Summary of a prompt for the queue: its length and, if replicas are compared, its token ids."""

    tokens: int
    ids: list[int]
    """Token ids, or substitutes for the first ones if the count is estimated.

    The list is empty if replicas are not compared.
    """


class AdmitRequest(msgspec.Struct, frozen=True, array_like=True, tag="asks"):
    """Worker: asks whether a request may run, and on which replica.

    The message has the fields of `DispatchRequest` and of `AdmissionRequest`.
    """

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
    requested_output_tokens: int
    """Largest number of output tokens of a choice, before any limit is applied."""
    window_left: int
    max_tokens: int | None
    """`max_tokens` as the client sent it."""
    min_tokens: int
    deadline_s: float | None
    session: str | None
    max_tokens_param: str
    prompt_param: str
    is_counted: bool = False
    has_fallback: bool = False
    """Whether the request is rejected if all servers of the pool refuse requests, because it can begin elsewhere."""
    longest_prompt: int | None = None
    """Number of tokens of the longest prompt; None: there is only one prompt."""
    cache: str = ""
    """Cache that has the answer; then the request waits in no queue, and no `Dispatched` follows. Empty: none."""
    cached_tokens: int = 0
    """Output tokens of the longest choice of that answer."""
    bill: bytes = b""
    """Digest of the answer whose bill its callers share; empty: nobody does."""
    regions: frozenset[str] | None = None
    """Regions in which the request may be computed; None: in all regions."""


class TokensUsed(msgspec.Struct, frozen=True, array_like=True, tag="took"):
    """Worker: reports tokens that a request has consumed."""

    number: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first: bool = False
    """Whether these tokens include the first output token."""


class WorkerAttemptOutcome(StrEnum):
    """Outcome of an attempt at an upstream server, as its worker saw it; see `AttemptOutcome`."""

    SUCCESS = "success"
    FAILURE = "failure"
    BUSY = "busy"
    ACCOUNT_REFUSED = "account"
    NEUTRAL = "neither"
    UNREACHABLE = "away"
    """The worker could not reach the server."""


class ReplicaFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed_there"):
    """Worker: the replica has failed, and the request waits for another one; see `DispatchEntry.requeue`."""

    number: int
    attempt_outcome: WorkerAttemptOutcome
    prompts: list[int]
    answer_by_s: float | None
    rest_s: float | None
    retry_after_s: float | None = None
    """Time that the busy server asks to wait, if it names one."""


class SettleRequest(msgspec.Struct, frozen=True, array_like=True, tag="settles"):
    """Worker: the response is complete and can be settled.

    The client gets the end of the response as soon as the usage is in the ledger.
    """

    number: int
    usage: Usage
    outcome: Outcome
    first_token_s: float | None


class ReleaseRequest(msgspec.Struct, frozen=True, array_like=True, tag="leaves"):
    """Worker: the request has ended here without being settled."""

    number: int
    usage: Usage
    first_token_s: float | None
    attempt_outcome: WorkerAttemptOutcome = WorkerAttemptOutcome.NEUTRAL
    error: EncodedError | None = None
    cancelled: bool = False
    """Whether the client has disconnected."""
    retry_after_s: float | None = None
    """Time that the busy server asks to wait, if it names one."""


class ResumeGrant(msgspec.Struct, frozen=True, array_like=True):
    """Grant of an earlier controller, reported by its worker.

    Its request is still running, or has ended since.
    """

    admit_request: AdmitRequest
    """The request without the token ids of its prompts; its `number` is still valid."""
    lease: str
    max_tokens: int
    """Number of output tokens of each choice that was granted."""
    replica: str
    """Replica at which the request runs; empty if the request waits."""
    usage: Usage
    """Usage until now; token counts of later reports are added to it."""
    first_token_s: float | None
    ended: SettleRequest | ReleaseRequest | None = None
    """Message that could not be sent when the request ended, or None if it is still running."""


class WorkerHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Worker: introduces itself to a controller, with its open requests."""

    worker: int
    """The worker's number in the gateway, from 1."""
    pid: int
    resume_grants: list[ResumeGrant]
    unanswered_ids: list[str] = []
    """Ids of requests without a reply to their `AdmitRequest`.

    Each of these requests asks again or has given up.
    """


class RequestSummary(msgspec.Struct, frozen=True, array_like=True):
    """The parameters of a request that timelines and traces show."""

    model: str
    sampling: SamplingParams
    max_tokens: int | None
    seed: int | None
    unset_fields: frozenset[str]
    stops: tuple[str, ...]
    priority: int | None
    ttft_in_s: float | None
    itl_objective_s: float | None
    deadline_in_s: float | None
    needs: tuple[str, ...]
    whole: bool


class RequestEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """Worker: the HTTP request has ended.

    The message has the fields of `RequestContext`.
    """

    request_id: str
    started_s: float
    ended_s: float
    route: str
    outcome: Outcome
    status: int
    principal: Principal | None
    model: str
    request: RequestSummary | None
    failure: EncodedError | None
    refused_by: str
    selection: ModelSelection | None
    clamped_max_tokens: int | None
    priority: PriorityClass | None
    predicted_position: QueuePosition | None
    dispatched_s: float | None
    first_token_s: float | None
    waited_ms: dict[str, float]
    degraded: list[str]
    usage: Usage
    paid_tokens: int
    gaps_s: list[float]
    finish_reasons: list[FinishReason]
    fallbacks: list[str]
    rejected_answers: list[RejectedAnswer]
    recoveries: int
    continued: int
    cache: CacheResult | None
    stalled: bool
    spans: list[TimelineSpan]
    trace: TraceContext | None
    parent_span_id: str


class SubmissionAcked(msgspec.Struct, frozen=True, array_like=True, tag="heard"):
    """Worker: the load report of an engine now includes the next prompt of a request.

    See `DispatchEntry.on_submitted`.
    """

    number: int


class RateLimitQuery(msgspec.Struct, frozen=True, array_like=True, tag="peeks"):
    """Worker: asks for the use of a client's rate limits."""

    number: int
    principal: Principal
    model: str


class LimitQuery(msgspec.Struct, frozen=True, array_like=True, tag="asks_limits"):
    """Worker: asks whether a client's limits have room for the smallest request."""

    number: int
    principal: Principal
    least_output: int
    """Fewest output tokens of such a request."""


class AnswerQuery(msgspec.Struct, frozen=True, array_like=True, tag="looks_up"):
    """Worker: asks for an answer in the cache; see `maitred.cache.answer_key.AnswerKey`."""

    number: int
    digest: bytes
    tenant: str
    organisation: str
    model: str
    server: str
    epoch: str


class AnswerStored(msgspec.Struct, frozen=True, array_like=True, tag="stores"):
    """Worker: a complete answer for the cache; see `maitred.cache.backend.AnswerBackend.put`."""

    digest: bytes
    tenant: str
    organisation: str
    model: str
    server: str
    epoch: str
    answer: bytes
    ttl_s: float
    fingerprint: str
    since_s: float
    """Monotonic time since when it was computed."""


class AnswerClaim(msgspec.Struct, frozen=True, array_like=True, tag="claims"):
    """Worker: it computes this answer for all who ask for it, unless another process does."""

    number: int
    digest: bytes
    """Digest of the request; see `maitred.cache.answer_key.AnswerKey`."""


class AnswerReleased(msgspec.Struct, frozen=True, array_like=True, tag="releases"):
    """Worker: it does not compute this answer any more."""

    digest: bytes


class AnswerPart(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """Both ends: what has come of an answer that another process computes."""

    number: int
    """The number of its reader: at the controller, or at the worker that has claimed the answer."""
    parts: list[TextDelta]
    has_begun: bool
    """Whether a part of the answer has come; False: the request is admitted."""
    usage: Usage
    finish_reasons: list[FinishReason]
    ignored_fields: list[str]
    is_passthrough: bool
    priority: PriorityClass | None = None
    """Priority class of the request for which it is computed."""


class AnswerEnded(msgspec.Struct, frozen=True, array_like=True, tag="over"):
    """Both ends: the reader of this number gets no more; the error, if the answer is not complete."""

    number: int
    error: EncodedError | None = None
    is_lost: bool = False
    """Whether the process that computed the answer has ended, or does not compute it any more."""


class ReaderLeft(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """Both ends: the reader of this number wants no more."""

    number: int


class DirectoryAck(msgspec.Struct, frozen=True, array_like=True, tag="knows"):
    """Worker: the worker now uses this version of keys, tenants and limits."""

    version: int


class DirectoryQuery(msgspec.Struct, frozen=True, array_like=True, tag="reads"):
    """Worker: asks for the changes of keys, tenants and limits since this version."""

    number: int
    since: int


class WorkerRetires(msgspec.Struct, frozen=True, array_like=True, tag="retires"):
    """Worker: it ends when its last connection has; the controller ends the WebSockets that it passes on."""


ToController = (
    WorkerHello
    | WorkerRetires
    | AdmitRequest
    | SubmissionAcked
    | TokensUsed
    | ReplicaFailed
    | SettleRequest
    | ReleaseRequest
    | RequestEnded
    | RateLimitQuery
    | LimitQuery
    | AnswerQuery
    | AnswerStored
    | AnswerClaim
    | AnswerReleased
    | AnswerPart
    | AnswerEnded
    | ReaderLeft
    | DirectoryQuery
    | DirectoryAck
)


class ControllerSnapshot(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Controller: the state that a worker needs now."""

    directory_version: int
    """The version of keys, tenants and limits."""
    rollout_names: frozenset[str]
    """Names of models with a rollout, whose requests the controller handles itself."""
    context_tokens_by_pool: dict[str, int]
    """Map from a pool to its context window, if a server has reported it.

    The window is the number of prompt and output tokens together.
    """
    engines: dict[str, str]
    """Map from a replica name to the address of an engine of the `model` section."""
    stays_ready: bool = False
    """Whether that model is ready while no engine serves."""


class AdmitAccepted(msgspec.Struct, frozen=True, array_like=True, tag="seated"):
    """Controller: the request has passed its limits, and waits in the queue unless a cache has its answer."""

    number: int
    lease: str
    max_tokens: int
    clamped: bool
    rate_limits: RateLimitStatus | None
    queue_position: QueuePosition | None
    """Position in the queue; None: the request does not wait."""
    expected_tokens: int


class AdmitRejected(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Controller: the request is rejected with this error, and all that it held is released."""

    number: int
    error: EncodedError
    rate_limits: RateLimitStatus | None = None


class Dispatched(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """Controller: the request is dispatched to this replica."""

    number: int
    replica: str
    waited_ms: dict[str, float]
    has_other_replica: bool
    """Whether another replica could take the request if this one fails."""
    has_idle_replica: bool = False
    """Whether one of these has room for it now."""
    region: str | None = None
    """Region of the replica; None: it has no name."""


class SettleReply(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """Controller: the request is in the ledger and all that it held is released; or the error."""

    number: int
    error: EncodedError | None = None
    paid_tokens: int = 0
    """`RequestContext.paid_tokens`."""


class DirectoryReply(msgspec.Struct, frozen=True, array_like=True, tag="news"):
    """Controller: the reply to `DirectoryQuery`; or the error."""

    number: int
    changes: DirectoryChanges | None
    error: EncodedError | None = None


class RateLimitReply(msgspec.Struct, frozen=True, array_like=True, tag="peeked"):
    """Controller: the reply to `RateLimitQuery`."""

    number: int
    rate_limits: RateLimitStatus | None


class LimitReply(msgspec.Struct, frozen=True, array_like=True, tag="limits_checked"):
    """Controller: the reply to `LimitQuery`; or the error of the limit that has no room."""

    number: int
    error: EncodedError | None = None


class ClaimReply(msgspec.Struct, frozen=True, array_like=True, tag="claimed"):
    """Controller: the reply to `AnswerClaim`."""

    number: int
    is_read: bool = False
    """Whether another process computes the answer, whose parts follow under the same number."""
    may_be_stored: bool = False
    """Whether another process has just computed it, so that it may be in the cache now."""


class ReaderJoined(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """Controller: another process wants to read an answer that this worker computes, under this number."""

    number: int
    digest: bytes


class AnswerReply(msgspec.Struct, frozen=True, array_like=True, tag="looked_up"):
    """Controller: the reply to `AnswerQuery`."""

    number: int
    answer: bytes | None = None
    """The encoded answer; None: there is none."""
    fingerprint: str = ""


ToWorker = (
    ControllerSnapshot
    | AdmitAccepted
    | AdmitRejected
    | Dispatched
    | SettleReply
    | DirectoryReply
    | RateLimitReply
    | LimitReply
    | AnswerReply
    | ClaimReply
    | ReaderJoined
    | AnswerPart
    | AnswerEnded
    | ReaderLeft
)

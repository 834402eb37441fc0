"""Errors that a caller can see, in four groups by who must act.

::

    MaitredError
    ├── CallerError           the caller must change the request
    │   ├── InvalidRequest            400  a field is missing, of the wrong type or out of range
    │   │   ├── ContextLengthExceeded 400  prompt and answer do not fit the model's window
    │   │   ├── ContentRefused        400  a provider's policy is against the content
    │   │   ├── Unsupported           400  the model or its provider does not support the request
    │   │   ├── PreviousResponseNotFound 400  the conversation to go on with is not stored
    │   │   ├── TooExpensive          400  the request may cost more than its caller allows
    │   │   └── CachedAnswerTooLong   400  limits allow only a shorter answer than the cached one
    │   ├── Unauthenticated           401  the key is missing or invalid
    │   ├── Forbidden                 403  the key is valid but lacks the permission
    │   ├── ModelNotFound             404  no such model here
    │   ├── RouteNotFound             404  no such path
    │   ├── ResourceNotFound          404  no such tenant, key or limit
    │   ├── MethodNotAllowed          405  the path exists, the method does not
    │   ├── BodyTooSlow               408  the body did not arrive in time
    │   ├── Conflict                  409  the change conflicts with existing data
    │   │   └── IdempotencyConflict   409  the Idempotency-Key belongs to another request, or its answer was not kept
    │   ├── BodyTooLarge              413  the body is over the configured limit
    │   ├── UnsupportedBody           415  the body is compressed in a way that the server does not read
    │   ├── UpgradeRequired           426  the path speaks WebSocket only
    │   ├── NotCached                 504  the caller takes only an answer from the cache, which has none
    │   ├── WebSocketExpired          400  the WebSocket has been open for as long as one may be
    │   └── ConfigInvalid             400  the operator's configuration has faults
    ├── Refused               the caller must come back later
    │   ├── Saturated                 429  more requests are in flight than this server takes
    │   ├── Overloaded                429
    │   │   ├── QueueFull             429  the queue is full, or its wait is too long
    │   │   └── DeadlineUnmeetable    429  the caller's deadline will have passed before its turn
    │   └── LimitReached              429
    │       ├── RateLimited           429  a rate or a concurrency limit has no room now
    │       └── QuotaExceeded         429  a budget has no room until its window ends
    ├── Unavailable           the operator, or time, must act
    │   ├── ReplicaUnavailable        503  no replica of the model is ready
    │   │   ├── ReplicaBusy           503  a replica takes no more requests now
    │   │   ├── ReplicaNotInTime      503  a replica has not begun to answer within its time
    │   │   ├── AccountRefused        503  a server refuses the account or the credential of this gateway
    │   │   ├── ModelLoading          503  the model is being loaded
    │   │   ├── ModelLoadFailed       503  the load of the model failed
    │   │   └── ModelHeld             503  the operator keeps the model unloaded
    │   ├── ReplicaLost               502  the replica died while it was answering
    │   │   ├── ReplicaStalled        502  the answer stopped coming in its middle
    │   │   ├── ReplicaTooSlow        502  the answer took longer than answers may
    │   │   └── AnswerTooLarge        502  the answer has more bytes than answers may
    │   ├── DeadlineExceeded          504  the answer was not complete within the caller's deadline
    │   ├── StoreUnavailable          503  the database or the shared counters are away
    │   └── Draining                  503  the server is shutting down
    └── Bug                   we must act
        └── ProtocolViolation         500  a peer broke the framed protocol

Each class has `code`, `http_status` and `retryable` for programs; the message tells a person what to do. Only
`maitred.api.dialect` turns an error into HTTP.
"""

from typing import ClassVar

from maitred.core.counters import CounterState
from maitred.core.flow import QueuePosition


class MaitredError(Exception):
    """Base class of all maitred errors.

    Args:
        message: One or two sentences that name the remedy. If omitted, the `default_message` of the class.
        param: The request field at fault, in the caller's own terms (``messages[2].content``).
        retry_after_s: Seconds after which a retry makes sense, for temporary errors.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    default_message: ClassVar[str] = "The server failed. Report this with the request id."

    def __init__(
        self, message: str | None = None, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        self.message = message or self.default_message
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(self.message)


class CallerError(MaitredError):
    """The caller must change the request; a retry of the same request cannot help."""

    code = "invalid_request"
    http_status = 400
    default_message = "The request cannot be served as it is. Change it and send it again."


class InvalidRequest(CallerError):
    """A field is missing, of the wrong type or out of range; `param` names it."""

    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested answer do not fit the model's context window.

    Args:
        window: Most tokens of prompt and answer together; 0: not known here.
        prompt_tokens: Tokens of the prompt, or an estimate of them.
        max_tokens: Tokens that the caller allows for the answer; None: it does not say.
    """

    code = "context_length_exceeded"
    default_message = "Prompt and max_tokens exceed the model's context window. Shorten one of them."

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        window: int = 0,
        prompt_tokens: int = 0,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.window = window
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens


class ContentRefused(InvalidRequest):
    """The content violates the policy of the model's provider."""

    code = "content_policy_violation"
    default_message = "The server that runs this model refuses the content. Change it, or ask another model."


class Unsupported(InvalidRequest):
    """The model or its provider does not support the request; another model may support it."""


class PreviousResponseNotFound(InvalidRequest):
    """The response that the request goes on with is not stored, or it is not the caller's."""

    code = "previous_response_not_found"
    default_message = "The previous response is not stored. Send the whole conversation."


class TooExpensive(InvalidRequest):
    """The request may cost more than its caller allows."""

    code = "cost_exceeded"
    default_message = "The request may cost more than it is allowed to. Shorten it, or allow a higher cost."


class CachedAnswerTooLong(InvalidRequest):
    """Limits of the caller allow only a shorter answer than the cached one, so the answer must be computed.

    No caller sees this error.
    """

    default_message = "The cached answer is longer than the limits allow. Compute a shorter one."


class Unauthenticated(CallerError):
    """The key is missing or invalid. The message never says which part was wrong."""

    code = "invalid_api_key"
    http_status = 401
    default_message = "A valid API key is needed. Send it as `Authorization: Bearer sk-mtd-…`."


class Forbidden(CallerError):
    """The key is valid but lacks the permission for this request."""

    code = "permission_denied"
    http_status = 403
    default_message = "This key may not be used here. Ask for one with the scope that is needed."


class ModelNotFound(CallerError):
    """No model of that name is served here."""

    code = "model_not_found"
    http_status = 404
    default_message = "No such model. GET /v1/models lists what is served."


class RouteNotFound(CallerError):
    """No route has that path."""

    code = "not_found"
    http_status = 404
    default_message = "No such path. GET /openapi.json lists the routes."


class ResourceNotFound(CallerError):
    """No tenant, key, limit or request of that id exists."""

    code = "not_found"
    http_status = 404
    default_message = "There is nothing of that id."


class MethodNotAllowed(CallerError):
    """The path exists, but not with that method."""

    code = "method_not_allowed"
    http_status = 405
    default_message = "This path does not take that method. GET /openapi.json lists the routes."


class BodyTooSlow(CallerError):
    """The body did not arrive in time; meanwhile it held a slot that other requests wait for."""

    code = "request_timeout"
    http_status = 408
    default_message = "The request body did not arrive in time. Send it again, or send a shorter one."


class Conflict(CallerError):
    """Existing data prevents a change: an id is taken, or the data has changed in between."""

    code = "conflict"
    http_status = 409
    default_message = "That does not fit what exists already. Look at it again, then repeat the change."


class IdempotencyConflict(Conflict):
    """The Idempotency-Key belongs to another request, or its answer could not be kept."""

    code = "idempotency_conflict"
    default_message = "This Idempotency-Key was used for another request. Take a new key for each new request."


class BodyTooLarge(CallerError):
    """The body is larger than the server accepts."""

    code = "request_too_large"
    http_status = 413
    default_message = "The request body is too large. Send a shorter prompt."


class UnsupportedBody(CallerError):
    """The body is compressed in a way that the server does not read."""

    code = "unsupported_content_encoding"
    http_status = 415
    default_message = "The server does not read this Content-Encoding. Send the body without it."


class UpgradeRequired(CallerError):
    """The path speaks WebSocket, and the request is no handshake for one."""

    code = "upgrade_required"
    http_status = 426
    default_message = "This path speaks WebSocket, version 13. Send a handshake for one (RFC 6455), or use POST."


class NotCached(CallerError):
    """The caller takes only an answer from the cache, which has none; the status is that of RFC 9111, 5.2.1.7."""

    code = "not_cached"
    http_status = 504
    default_message = (
        "The cache has no answer to this request. Send it without `only-if-cached` in the header Cache-Control to have "
        "one computed."
    )


class WebSocketExpired(CallerError):
    """The WebSocket has been open for as long as one may be. The code is OpenAI's."""

    code = "websocket_connection_limit_reached"
    default_message = "This WebSocket has been open for as long as one may be. Open a new one and go on there."


class ConfigInvalid(CallerError):
    """The operator's configuration has faults; the message lists all of them."""

    code = "config_invalid"
    default_message = "The configuration is invalid. Run `maitred config check`."


class Refused(MaitredError):
    """A valid request is refused for now; `retry_after_s` says when to retry."""

    code = "refused"
    http_status = 429
    retryable = True
    default_message = "The request was refused for now. Try again later."


class Saturated(Refused):
    """More requests are in flight than the server takes."""

    code = "saturated"
    default_message = "The server has as many requests as it can hold. Try again after the time in Retry-After."


class Overloaded(Refused):
    """Other requests go first, and this request would wait too long.

    Args:
        message: Reason of the refusal.
        param: See `MaitredError`.
        retry_after_s: Seconds until this caller's share has room.
        position: Predicted queue position of the request.
    """

    code = "overloaded"

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        position: QueuePosition | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.position = position


class QueueFull(Overloaded):
    """The queue accepts no more requests of this class: its length or its wait is too long."""

    code = "queue_full"
    default_message = "The queue is full. Try again after the time in Retry-After."


class DeadlineUnmeetable(Overloaded):
    """The predicted first token is after the deadline; `retry_after_s` says when the share has room."""

    code = "deadline_unmeetable"
    default_message = "The first token would come after the deadline. Try again after the time in Retry-After."


class LimitReached(Refused):
    """A limit has no room for the request.

    Args:
        message: Names the limit and the remedy.
        subject: Subject of the limit, such as ``tenant:acme``.
        limit: Kind of the limit, such as ``tokens_per_minute``.
        value: Value of the limit, in requests, tokens or nano-dollars.
        reading: State of the counter of the limit.
        retry_after_s: Seconds until there is room; None: waiting cannot help.
    """

    def __init__(
        self,
        message: str,
        *,
        subject: str,
        limit: str,
        value: int,
        reading: CounterState,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.subject = subject
        self.limit = limit
        self.value = value
        self.counter_state = reading


class RateLimited(LimitReached):
    """A rate or concurrency limit has no room now; room returns with time."""

    code = "rate_limit_exceeded"


class QuotaExceeded(LimitReached):
    """A budget has no room; an early retry cannot help."""

    code = "insufficient_quota"
    retryable = False


class Unavailable(MaitredError):
    """The request is valid, but nothing here can serve it now."""

    code = "unavailable"
    http_status = 503
    retryable = True
    default_message = "The service is not available now. Try again shortly."


class ReplicaUnavailable(Unavailable):
    """No replica of the model is ready: starting, restarting or gone."""

    code = "replica_unavailable"
    default_message = "No replica of this model is ready. Try again after the time in Retry-After."


class ReplicaBusy(ReplicaUnavailable):
    """The replica is healthy but accepts no more requests now."""


class ReplicaNotInTime(ReplicaUnavailable):
    """A replica took the request and has not begun to answer within its time."""

    default_message = "The server that runs this model did not answer in time. Try again after the time in Retry-After."


class AccountRefused(ReplicaUnavailable):
    """A server refuses the operator's account or credential; the caller is told nothing about either."""

    default_message = (
        "The server that runs this model does not accept this gateway's credential. Its operator must look at it, and "
        "at the account behind it. Name another model, or try again later."
    )


class ModelLoading(ReplicaUnavailable):
    """The model is not in memory. A request loads it; `retry_after_s` says when."""

    code = "model_loading"
    default_message = "The model is being loaded. Try again after the time in Retry-After."


class ModelLoadFailed(ReplicaUnavailable):
    """The load of the model failed; `retry_after_s` says when it is tried again."""

    code = "model_load_failed"
    default_message = "The model could not be loaded. The server's log says why; it is tried again after Retry-After."


class ModelHeld(ReplicaUnavailable):
    """The operator has unloaded the model and keeps it unloaded until the operator loads it again."""

    code = "model_held"
    default_message = (
        "The model's operator has taken it out of memory and has to load it again. Name another model, or try again "
        "after the time in Retry-After."
    )


class ReplicaLost(Unavailable):
    """The replica died during the answer; the text that was sent is incomplete."""

    code = "replica_lost"
    http_status = 502
    default_message = "The replica failed before the answer was complete. Send the request again."


class ReplicaTooSlow(ReplicaLost):
    """The answer exceeded the time limit of the replica; another attempt would take as long."""

    default_message = "The answer took longer than answers may take here. Ask for a shorter one."


class ReplicaStalled(ReplicaLost):
    """The answer stopped coming in its middle, for longer than its parts may take."""


class AnswerTooLarge(ReplicaLost):
    """The answer has more bytes than answers may have; another attempt would have as many."""

    default_message = "The answer is longer than answers may be here. Ask for a shorter one."


class DeadlineExceeded(Unavailable):
    """The caller's deadline passed before the answer was complete."""

    code = "deadline_exceeded"
    http_status = 504
    default_message = (
        "The deadline passed before the answer was complete. Allow more time, or accept part of an answer with "
        "`x-maitred-partial: true`."
    )


class StoreUnavailable(Unavailable):
    """The database or the shared counters cannot be reached, and local data is insufficient."""

    code = "store_unavailable"
    default_message = "The store of this service is not available now. Try again shortly."


class Draining(Unavailable):
    """The server is shutting down and takes no new work."""

    code = "draining"
    default_message = "The server is shutting down. Send the request to another one, or try again shortly."


class Bug(MaitredError):
    """A bug in maitred; the caller cannot fix it."""


class ProtocolViolation(Bug):
    """A peer sent data that violates the framed protocol."""

    code = "protocol_violation"
    default_message = "A peer broke the engine protocol. Both ends must run the same version of maitred."

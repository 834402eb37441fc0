"""Request and response free of any API's shape, and the context that every request leaves behind.

An API turns its own request into an `InferenceRequest` and maps the `TextDelta` objects of an `ResponseStream` back to
its own chunks. Whatever stands in between never learns which API was called. A `RequestContext` goes along: the stages
write down what they see (tokens, times), and the edge closes it exactly once with the request's one `Outcome`.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from maitred.core.counters import CounterState
from maitred.core.errors import MaitredError
from maitred.core.flow import PriorityClass, QueuePosition
from maitred.core.grammar import Constraint
from maitred.core.replica import ModelCard
from maitred.core.request import FinishReason, SamplingParams, Usage
from maitred.core.rollout import RolloutArm
from maitred.core.tenancy import Principal
from maitred.core.timeline import RequestTimeline
from maitred.core.tools import ToolRules


class Conversation(msgspec.Struct, frozen=True):
    """A prompt that the model's chat template has yet to render."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    """End with the opening of the assistant's turn."""
    tools: list[dict[str, Any]] = []
    """What the model is told of tools, in the words of OpenAI's API."""
    template_arguments: dict[str, Any] = {}
    """What the template is told beside all that."""


Prompt = str | list[int] | Conversation
"""Text, token ids, or a conversation."""


class InferenceRequest(msgspec.Struct, frozen=True):
    """One request, read and checked, not yet tokenised."""

    model: str
    prompts: Sequence[Prompt]
    """At least one. Choice `i` of prompt `p` has index `p * sampling.n + i` in the answer."""
    sampling: SamplingParams
    """With `max_tokens` and `seed` still to be settled: the next two fields say what the caller wants."""
    max_tokens: int | None = None
    """None: as many as the context window leaves."""
    seed: int | None = None
    """None: draw one for each prompt."""
    unset_fields: frozenset[str] = frozenset()
    """Fields of `sampling` that the caller does not name, so that the model may have defaults of its own."""
    stops: tuple[str, ...] = ()
    """Strings that end a choice; they are not part of the answer."""
    echo: bool = False
    """Begin every choice with its prompt."""
    priority: int | None = None
    """From 1 to 10, as the caller asks for it; None: it does not say."""
    ttft_in_s: float | None = None
    """Seconds from the request's arrival within which its first token must come; None: it does not say."""
    itl_objective_s: float | None = None
    """The time between two tokens that its reader should not see exceeded; None: it does not say."""
    deadline_in_s: float | None = None
    """Seconds from the request's arrival within which the whole answer must be there; None: it does not say."""
    partial: bool = False
    """Whether what is there at the deadline is welcome; otherwise an answer that is not whole by then has failed."""
    retries: int = 0
    """How often the caller has sent the same request before, as far as it says so."""
    escalate: bool | None = None
    """Whether an answer that fails a check may be asked of a larger model too, at the caller's expense; None: it does
    not say."""
    scored: bool = False
    """Whether log-probabilities are looked at here, though the caller has not asked for them."""
    degradable: bool = True
    """Whether the caller would rather have a shorter answer, or that of a smaller model, than be refused."""
    session: str | None = None
    """What the caller calls the session that it belongs to; None: none."""
    user: str | None = None
    """What it calls the user on whose behalf it asks; None: nothing."""
    local_only: bool = False
    """Whether nothing of it may leave for a provider."""
    regions: frozenset[str] | None = None
    """Where it may be computed; None: anywhere that its caller's tenants allow."""
    max_usd: float | None = None
    """What it may cost; None: what its limits allow."""
    whole: bool = False
    """Whether its caller sees nothing of the answer before all of it is there."""
    max_tokens_param: str = "max_tokens"
    """What this API calls the limit, and..."""
    prompt_param: str = "prompt"
    """...the prompt, for messages about them."""
    needs: tuple[str, ...] = ()
    """Fields that ask for more than text, such as ``tools`` or ``response_format``; only some replicas know them."""
    tools: Callable[[], ToolRules | None] | None = None
    """Reads the tools that it brings, and raises `InvalidRequest` if they cannot be had; None: its API has none."""
    to_openai: Callable[[], Mapping[str, Any]] | None = None
    """The whole request in the words of OpenAI's API, without what the caller left out: for replicas that are asked
    in these. None: its API cannot say it so."""
    constraint: Callable[[], Constraint | None] | None = None
    """What a model of our own has to hold its answer to, None: to nothing; others have their own rules for what was
    sent. Raises `InvalidRequest` if it is not said as it has to be."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and its log-probability, in text."""

    text: str
    raw: bytes
    """The token's exact bytes; `text` cannot show half a character."""
    logprob: float


class TokenScore(msgspec.Struct, frozen=True):
    """The chosen token at one position, and the most probable ones there, best first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]
    offset: int
    """Characters of the choice's text before this token."""


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """Text added to one choice since its last delta; exactly the last delta of a choice has `finish`."""

    index: int
    text: str
    finish: FinishReason | None = None
    """With `FinishReason.DEADLINE` the answer is a part of one."""
    scores: list[TokenScore] | None = None
    """One per token, if asked for. Text can lag behind: it waits for whole characters and possible stop strings."""
    extra: dict[str, Any] | None = None
    """Further members of a message's delta as OpenAI's API has them: ``tool_calls``, ``refusal``..."""
    stop: str | None = None
    """The stop string that ended the choice; on its last part, if one did."""
    continued: bool = False
    """Whether another server begins here to go on with what one has left off: it has read the text, not the tokens."""

    @property
    def plain(self) -> bool:
        """Whether it is new text and nothing else, as most of an answer is."""
        bare = self.finish is None and self.scores is None and self.extra is None and not self.continued
        return bare and bool(self.text)


class RateLimitStatus(msgspec.Struct, frozen=True):
    """How much of its rate limits a caller has left: of each sort the tightest, None where there is none."""

    requests: CounterState | None = None
    tokens: CounterState | None = None


class ModelSelection(msgspec.Struct, frozen=True):
    """Which model was chosen for a request whose caller had left that open."""

    name: str
    """What the caller asked for, without aliases."""
    model: str
    """The first choice, as it stands in the table of names; it may have gone on from there."""
    reason: str
    """``small``, ``medium`` or ``large`` for how hard it looked, else the kind of work, such as ``code``."""
    score: float | None = None
    """How hard it looked, from 0 to 1; None: it could not be told."""


class RejectedAnswer(msgspec.Struct, frozen=True):
    """A whole answer that failed a check (see `maitred.routing.escalation`). It is billed."""

    model: str
    reason: str
    """The check."""
    usage: Usage
    replaced: bool = False
    """Whether its caller got that of a larger model instead."""


class Outcome(StrEnum):
    """How a request ended. Each ends in exactly one of these ways."""

    FINISHED = "finished"
    """The whole answer was sent."""
    REFUSED = "refused"
    """It was turned away before any work was done for it."""
    FAILED = "failed"
    """It was taken, and then we could not complete it."""
    CANCELLED = "cancelled"
    """The caller left."""


class RequestContext(msgspec.Struct):
    """Record of one request; observers read it once, when the request has ended."""

    request_id: str
    started_s: float
    """Monotonic, as all times here."""
    route: str = "unmatched"
    principal: Principal | None = None
    """Who calls; None before that is known, and on routes that everybody may use."""
    model: str = ""
    """As resolved, so its values are bounded; empty until then."""
    selection: ModelSelection | None = None
    """Why that model, where the caller had left it open; None: it named one."""
    arm: RolloutArm | None = None
    """Which side of a rollout serves it; None: there is none behind its name, or neither does."""
    rate_limits: RateLimitStatus | None = None
    """Where the caller stands with its limits after this request was reserved; None if nothing was counted."""
    refused_by: str = ""
    """The kind of limit that refused it, such as ``tokens_per_minute``."""
    failure: MaitredError | None = None
    """The error that it was answered with; None: none."""
    clamped_max_tokens: int | None = None
    """What `max_tokens` was lowered to, because a limit had no room for more."""
    priority: PriorityClass | None = None
    """As granted; None until that is known."""
    predicted_position: QueuePosition | None = None
    """What was predicted when it joined the queue."""
    position: Callable[[], QueuePosition | None] | None = None
    """Where it stands now; None, or returning None: it does not wait."""
    dispatched_s: float | None = None
    """When it left the queue."""
    waited_ms: dict[str, float] = {}
    """Milliseconds that it waited, by cause (see `maitred.core.request.WaitCause`)."""
    degraded: list[str] = []
    """What was taken from it because of the load, such as ``max_tokens=64`` or ``model=small``."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Part of the completion tokens."""
    estimated: bool = False
    """Whether tokens are estimates, because whoever served it did not count them."""
    first_token_s: float | None = None
    gaps_s: list[float] = []
    """Between one delivery of tokens of a choice and the next."""
    finish_reasons: list[FinishReason] = []
    """Why choices ended, one for each that has."""
    fallbacks: list[str] = []
    """The models that it went on to after others had failed it, such as ``general=big``."""
    rejected_answers: list[RejectedAnswer] = []
    """Whole answers that failed a check, in their order; the last one may be the one that was given."""
    recoveries: int = 0
    """How often it went on at another replica because its own had failed."""
    continued: int = 0
    """Of these, how often in the middle of an answer whose text another server was given to go on with."""
    hedged: str = ""
    """Which of two replicas, ``first`` or ``second``, began to answer first; empty: it was sent to one."""
    outcome: Outcome | None = None
    stalled: bool = False
    """Whether it was cancelled because its client had stopped reading."""
    status: int = 0
    ended_s: float = 0.0
    request: InferenceRequest | None = None
    """What was asked; None until that is known."""
    timeline: RequestTimeline = msgspec.field(default_factory=RequestTimeline)
    """What happened on its way."""
    listener: "DeltaListener | None" = None
    """Hears the answer beside its caller; None: nobody does."""

    @property
    def error(self) -> str:
        """The code of the error that it was answered with, such as ``queue_full``; empty: none."""
        return "" if self.failure is None else self.failure.code

    @property
    def escalated(self) -> list[str]:
        """Answers that failed a check: the model, and the check."""
        return [f"{failed.model}={failed.reason}" for failed in self.rejected_answers]

    @property
    def usage(self) -> Usage:
        """The tokens, as they are billed."""
        return Usage(
            self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.estimated, self.reasoning_tokens
        )

    def reset_for_fallback(self, fallback: str) -> None:
        """Clears what is known of the request when it moves to another model."""
        self.fallbacks.append(fallback)
        self._reset()

    def escalate(self) -> "RequestContext":
        """The whole answer that is there has failed a check: another model is asked. Returns what was known so far."""
        known = replace(self, fallbacks=[*self.fallbacks], degraded=[*self.degraded])
        self._reset()
        self.first_token_s, self.gaps_s, self.waited_ms = None, [], {}
        return known

    def restore(self, known: "RequestContext") -> None:
        """Restores a saved copy: the other model that was asked has given nothing."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(known, name))

    def _reset(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.reasoning_tokens = 0
        self.predicted_position = self.position = self.dispatched_s = self.clamped_max_tokens = None
        self.estimated, self.degraded, self.refused_by, self.finish_reasons = False, [], "", []

    def close(self, outcome: Outcome, status: int, now_s: float) -> None:
        """Fixes the outcome; a second one would be a fault of ours."""
        if self.outcome is not None:
            raise RuntimeError(f"Request {self.request_id} ended twice: {self.outcome}, then {outcome}.")
        self.outcome, self.status, self.ended_s = outcome, status, now_s


class ResponseStream(Protocol):
    """An answer as it comes; iterate once."""

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        """One list for every batch that the replica delivers, with the parts of each choice in their order.

        The list is empty while all new text is held back. The first one, empty or not, says that the replica has
        begun to answer.
        """
        ...


class StreamSink(Protocol):
    """Where text goes out to a client."""

    @property
    def open(self) -> bool:
        """Whether it can go out now."""
        ...

    def send(self, parts: Sequence[TextDelta]) -> None:
        """Sends it; only while it is `open`."""
        ...


class PushStream(ABC):
    """An answer of which most need not be read.

    No protocol: every stream asks whether its answer is one, and to look for a method by its name takes thirty calls.
    """

    @abstractmethod
    def push_to(self, sink: StreamSink) -> None:
        """Lets what is nothing but text out here, from when it comes and while its reader waits for it.

        The reader is left to sleep then; it gets the rest, in the order in which it came: whatever is not text alone,
        what comes while the outlet is not open, and the end.
        """
        ...


class InferenceService(Protocol):
    """System behind an API, as the API uses it; `maitred.app.request.pipeline` implements it."""

    def generate(
        self, request: InferenceRequest, context: RequestContext
    ) -> AbstractAsyncContextManager[ResponseStream]:
        """Starts the work for a request; leaving the context ends whatever is unfinished.

        Raises:
            ModelNotFound: Nothing of that name is served to this caller.
            InvalidRequest: The prompt cannot be rendered or does not fit.
            LimitReached: The caller's limits have no room for it.
            ReplicaUnavailable: Nothing can run it now.
        """
        ...

    async def tokenize(
        self, principal: Principal, model: str, prompt: Prompt, *, add_special_tokens: bool | None
    ) -> list[int]:
        """The prompt as the model would get it; see `InferenceService.generate` for what it raises."""
        ...

    def detokenize(self, principal: Principal, model: str, tokens: Sequence[int]) -> str:
        """The text of these tokens."""
        ...

    def models(self, principal: Principal) -> Sequence[str]:
        """Returns the models that a caller may use, by the names that requests use."""
        ...

    async def rate_limit_status(self, context: RequestContext) -> RateLimitStatus | None:
        """Where the caller stands with its limits, for a request that was refused before anything was reserved."""
        ...

    def card(self, principal: Principal, model: str) -> ModelCard:
        """Returns the card of a model.

        Raises:
            ModelNotFound: Nothing of that name is served to this caller.
            ReplicaUnavailable: Its replica has never been ready.
        """
        ...

    def queue_position(self, principal: Principal, request_id: str) -> QueuePosition:
        """Where a request of this caller's organisation stands in the queue.

        Raises:
            ResourceNotFound: None of that id waits.
        """
        ...

    def ready(self, model: str | None = None) -> bool:
        """Whether a request that arrives now can run: at this model, or at any."""
        ...


class DeltaListener(Protocol):
    """Someone who hears an answer beside its caller. Must not block and must not raise."""

    def on_delta(self, parts: Sequence[TextDelta]) -> None:
        """Takes the next deltas of the answer."""
        ...


class RequestObserver(Protocol):
    """Someone who wants to know of ended requests. Must not block and must not raise."""

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Told of each request once, after everything it held is free, of some at a time in the order they ended."""
        ...

"""Requests for embeddings, images, sound and moderations of upstream servers: routed, limited, queued and billed.

    route -> admit -> dispatch -> send -> answer -> settle

The stages are those of `maitred.app.request.pipeline`, without what only texts have: prompts that are tokenised,
answers that are shared or go on elsewhere. A request is tried again, at another server or at another model of its
route, while its caller has seen nothing of an answer. An answer that comes whole is read to its end before its caller
gets it; a stream is billed before its last piece.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from msgspec.structs import replace

from maitred.admission.request import AdmissionRequest
from maitred.app.models.router import Router
from maitred.app.request.flow_control import DispatchHandle, FlowController, GrantHandle
from maitred.app.request.planner import flow_of
from maitred.app.request.retry_policy import RetryPolicy
from maitred.app.request.upstream_request import TruncatedPrompt
from maitred.app.request.validation import check_mode
from maitred.core.backoff import GiveUpReason, RetryState
from maitred.core.clock import Clock
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import (
    AnswerTooLarge,
    DeadlineExceeded,
    MaitredError,
    NotCached,
    ReplicaBusy,
    ReplicaLost,
    ReplicaStalled,
    ReplicaUnavailable,
    TooExpensive,
)
from maitred.core.ids import new_span_id
from maitred.core.request import Usage
from maitred.core.resource_stack import ResourceStack
from maitred.core.tenancy import ANONYMOUS, Principal
from maitred.core.text_replica import PassthroughAnswer, PassthroughRequest
from maitred.core.timeline import SpanName, error_code
from maitred.core.usage import Price, to_usd
from maitred.dispatch.request import AnyEndpoint, DispatchRequest
from maitred.routing.catalog import TextModel
from maitred.routing.pools.route_table import RouteTarget
from maitred.wire.openai.responses import encode
from maitred.wire.reported_usage import parse_usage

_IMAGE_TOKENS = 6_240
"""Most output tokens of an image where a model counts them: OpenAI's `gpt-image-1`, of high quality and 1024x1536."""
_SOUND_TOKENS_PER_S = 10
"""Tokens of a second of sound, and of what is said in it, that are reserved where a model counts them."""
_MAX_EVENT_BYTES = 8 << 20
"""Largest event of a stream whose usage is read; a larger one is an image."""


class Passthrough:
    """Passes requests on to upstream servers. Implements `maitred.core.service.PassthroughService`.

    Args:
        router: Resolves and routes model names.
        flow_controller: Admission, queue and dispatch.
        retry_policy: Retries after a failure before anything of the answer was seen.
        clock: Clock for the times in the context.
    """

    def __init__(
        self, router: Router, flow_controller: FlowController, retry_policy: RetryPolicy, clock: Clock
    ) -> None:
        self._router = router
        self._flow_controller = flow_controller
        self._retry_policy = retry_policy
        self._clock = clock

    def runs_elsewhere(self, principal: Principal, model: str) -> bool:
        """Returns whether upstream servers run a model; implements `PassthroughService.runs_elsewhere`."""
        return isinstance(self._router.resolve(model, principal), TextModel)

    @asynccontextmanager
    async def respond(self, request: PassthroughRequest, context: RequestContext) -> "AsyncIterator[ForwardedResponse]":
        """Passes a request on; implements `PassthroughService.respond`."""
        inference_request, principal = request.inference_request, context.principal or ANONYMOUS
        context.request = inference_request
        if inference_request.cache.only_if_cached:
            raise NotCached
        deadline_in_s = inference_request.deadline_in_s
        deadline_s = None if deadline_in_s is None else context.started_s + deadline_in_s
        with context.timeline.span(SpanName.RESOLVE, self._clock.monotonic_s, asked=inference_request.model):
            route_plan = self._router.route(inference_request, principal, context.request_id)
        context.selection = route_plan.selection
        target, first_failure = route_plan.first_target(), None
        async with ResourceStack() as stack:
            while True:
                try:
                    while route_plan.has_general_target and self._router.is_refusing(target):
                        refused = ReplicaBusy()
                        next_target = route_plan.next_target(refused)
                        if next_target is None:
                            break
                        target = next_target
                        context.reset_for_fallback(f"{target.reason}={target.name}")
                    context.has_fallback = route_plan.has_general_target
                    context.arm = None if route_plan.arm is None else route_plan.arm_for(target)
                    response = await self._respond(target, request, principal, context, deadline_s, stack)
                    break
                except MaitredError as failure:
                    # What is left of this model is settled before the next one is asked.
                    await stack.__aexit__(type(failure), failure, failure.__traceback__)
                    first_failure = first_failure or failure
                    following = route_plan.next_target(failure)
                    if following is None:
                        raise first_failure from (None if first_failure is failure else failure)
                    target = following
                    context.reset_for_fallback(f"{target.reason}={target.name}")
            yield response

    async def _respond(
        self,
        target: RouteTarget,
        request: PassthroughRequest,
        principal: Principal,
        context: RequestContext,
        deadline_s: float | None,
        stack: ResourceStack,
    ) -> "ForwardedResponse":
        """Admits a request at one model, sends it, and returns its response."""
        context.model = target.name
        model = self._router.model(target)
        check_mode(model, request.mode)
        assert isinstance(model, TextModel), "only these have other modes than chat"
        model.card()  # raises while none of its servers has been seen
        price = self._flow_controller.price_of(target.name)
        # Tokens of the answer cannot be limited, so what they may cost is reserved like the cost of units.
        units_nusd, units = price.cost_of_units(request.units)
        most_nusd = units_nusd + price.max_cost_nusd(0, _most_output_tokens(request, price))
        _check_cost(price, request, most_nusd)
        context.prompt_tokens = request.prompt_tokens
        dispatch_request = _dispatch_request(principal, context, request)
        context.priority = dispatch_request.flow.priority
        with context.timeline.span(SpanName.PLAN, self._clock.monotonic_s, model=target.name) as span:
            context.predicted_position = self._flow_controller.check(target.pool, dispatch_request)
            span.facts |= {"mode": request.mode, "prompt_tokens": request.prompt_tokens}
        grant, entry = await self._flow_controller.admit(
            target.pool,
            dispatch_request,
            AdmissionRequest(
                principal=principal,
                request_id=context.request_id,
                route=context.route,
                model=context.model,
                prompt_tokens=request.prompt_tokens,
                max_tokens=0,
                window_left=0,
                prompt_param="input",
                is_counted=context.is_counted,
                units_nusd=most_nusd,
                context=context,
            ),
            context.timeline,
            stack,
        )
        context.position = entry.position
        # Whoever leaves while a server works pays for it: the server charges for what it was asked.
        grant.record_usage(Usage(request.prompt_tokens, 0, estimated=True, units_nusd=units_nusd, units=units))
        sent = replace(request, id=grant.lease, server_model=target.model)
        retry_state = self._retry_policy.new_state(
            principal.tenants[0], deadline_s, request.inference_request.most_retries
        )
        while True:
            try:
                async with asyncio.timeout(
                    None if deadline_s is None else max(0.0, deadline_s - self._clock.monotonic_s())
                ):
                    return await self._attempt(sent, price, context, grant, entry, stack)
            except TimeoutError:
                raise DeadlineExceeded from None
            except (ReplicaLost, ReplicaUnavailable) as failure:
                self._requeue(failure, entry, context, retry_state, deadline_s)

    async def _attempt(
        self,
        request: PassthroughRequest,
        price: Price,
        context: RequestContext,
        grant: GrantHandle,
        entry: DispatchHandle,
        stack: ResourceStack,
    ) -> "ForwardedResponse":
        """Waits for dispatch, sends the request to one server, and reads its answer unless it is a stream."""
        endpoint: AnyEndpoint = await entry.wait_dispatched()
        now_s = self._clock.monotonic_s
        context.position, context.dispatched_s, context.waited_ms = None, now_s(), dict(entry.waited_ms)
        context.is_counted = True
        grant.set_replica(endpoint.name)
        timeline = context.timeline
        facts = {"replica": endpoint.name, **endpoint.replica.trace_attributes}
        span = timeline.begin(SpanName.ATTEMPT, now_s(), **facts)
        if timeline.trace is not None:
            request = replace(request, trace=timeline.context_at(span, new_span_id))
        try:
            async with ResourceStack() as attempt:
                answer = await attempt.enter_async_context(endpoint.replica.pass_through(request))
                entry.on_submitted()
                response = ForwardedResponse(answer, request, price, context=context, grant=grant, entry=entry)
                if not answer.is_stream:
                    await response.read_whole()
                response.on_answer(now_s())
                stack.push_async_exit(attempt.pop_all())
        except BaseException as failure:
            span.end(now_s(), error_code(failure))
            raise
        span.end(now_s(), "")
        if response.whole is not None:
            await response.settle()
        return response

    def _requeue(
        self,
        failure: ReplicaLost | ReplicaUnavailable,
        entry: DispatchHandle,
        context: RequestContext,
        retry_state: RetryState,
        deadline_s: float | None,
    ) -> None:
        """Requeues the request for another server or for the same one; raises the failure if it cannot be retried."""
        if context.dispatched_s is None:
            raise failure  # it was never sent
        elsewhere = entry.has_other_replica
        lasts = isinstance(failure, AnswerTooLarge) or (isinstance(failure, ReplicaStalled) and context.has_fallback)
        if not elsewhere and (lasts or not isinstance(failure, ReplicaLost | ReplicaBusy)):
            raise failure
        retry_after_s = failure.retry_after_s if isinstance(failure, ReplicaBusy) else None
        wait_s = retry_state.wait(
            self._clock.monotonic_s(),
            retry_after_s=None if elsewhere else retry_after_s,
            is_free=elsewhere and entry.has_idle_replica,
        )
        if isinstance(wait_s, GiveUpReason) or not entry.requeue(
            prompts=range(1), answer_by_s=deadline_s, suspend_s=retry_after_s if elsewhere else wait_s
        ):
            raise failure
        context.recoveries += 1


class ForwardedResponse:
    """Response of a server, passed on. Implements `maitred.core.service.PassthroughResponse`.

    Args:
        answer: The answer.
        request: The request.
        price: Price of the model.
        context: Record of the request.
        grant: The reservation of the request.
        entry: Its entry in dispatch.

    Attributes:
        content_type: Content type of the answer.
        whole: The whole answer; None: it is a stream, or not read yet.
    """

    def __init__(
        self,
        answer: PassthroughAnswer,
        request: PassthroughRequest,
        price: Price,
        *,
        context: RequestContext,
        grant: GrantHandle,
        entry: DispatchHandle,
    ) -> None:
        self.content_type = answer.content_type
        self.whole: bytes | None = None
        self._answer = answer
        self._mode = request.mode
        self._units = request.units
        self._price = price
        self._context = context
        self._grant = grant
        self._entry = entry
        self._reported: Usage | None = None
        self._streamed_images = 0

    async def read_whole(self) -> None:
        """Reads the whole answer, and what it says of its usage; the model in it gets the name that it has here."""
        self.whole, members = await self._answer.read_whole()
        if "usage" in members:
            self._on_usage(msgspec.json.decode(members["usage"]))
        if "duration" in members:
            self._on_seconds(msgspec.json.decode(members["duration"]))
        if "data" in members and self._mode == "image_generation":
            images = msgspec.json.decode(members["data"], type=list[msgspec.Raw] | None) or []
            self._units = replace(self._units, images=min(len(images), self._units.images))
        if "model" in members:
            self.whole = encode({**members, "model": self._context.model})

    def on_answer(self, now_s: float) -> None:
        """Notes that the server has answered: from now on its work is billed."""
        if self._context.first_token_s is None:
            self._context.first_token_s = now_s
        self._entry.on_first_token()
        usage = self._usage()
        self._context.prompt_tokens, self._context.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        self._entry.charge_tokens(prompt_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens)
        self._grant.record_usage(usage)

    async def settle(self) -> None:
        """Settles the reservation with what the answer has used."""
        usage = self._usage()
        self._context.set_usage(usage)
        await self._grant.settle(usage, Outcome.FINISHED)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yields the pieces of a stream, the last of them when the answer is billed."""
        reader = EventUsageReader() if self.content_type.startswith("text/event-stream") else None
        held = b""
        async for piece in self._answer:
            for event in reader.feed(piece) if reader is not None else ():
                self._on_event(event)
            if held:
                yield held
            held = piece
        await self.settle()
        if held:
            yield held

    def _on_event(self, event: dict[str, object]) -> None:
        kind = event.get("type")
        if isinstance(kind, str) and kind.startswith("image_") and kind.endswith(".completed"):
            self._streamed_images += 1
            self._units = replace(self._units, images=self._streamed_images)
        self._on_usage(event.get("usage"))
        self._on_seconds(event.get("duration"))

    def _on_usage(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        self._on_seconds(usage.get("seconds"))
        if (reported := parse_usage(usage)) is not None:
            self._reported = reported if self._reported is None else self._reported + reported

    def _on_seconds(self, seconds: object) -> None:
        """Takes the length of the sound as the server has measured it."""
        if isinstance(seconds, str):
            try:
                seconds = float(seconds)
            except ValueError:
                return
        if isinstance(seconds, int | float) and self._units.audio_s and 0 <= seconds < math.inf:
            self._units = replace(self._units, audio_s=float(seconds), estimated=False)

    def _usage(self) -> Usage:
        """Returns the usage as far as it is known: tokens as the server counts them, and the units."""
        cost_nusd, text = self._price.cost_of_units(self._units)
        usage = self._reported
        if usage is None and self._mode == "embedding":
            usage = Usage(self._context.prompt_tokens, 0, estimated=True)
        return replace(usage or Usage(0, 0), units_nusd=cost_nusd, units=text)


class EventUsageReader:
    """Reader of what the events of a stream say of usage; it looks into those alone that may say something."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_skipped = False
        """Whether the event at hand is too large to be read."""

    def feed(self, data: bytes) -> list[dict[str, object]]:
        """Takes data, and returns the events in it that may say something of usage."""
        *whole, rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        events = []
        for event in whole:
            if not self._is_skipped and (b'"usage"' in event or b'.completed"' in event or b'"duration"' in event):
                lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
                try:
                    value = msgspec.json.decode(b"\n".join(lines))
                except (msgspec.MsgspecError, UnicodeError):
                    value = None
                if isinstance(value, dict):
                    events.append(value)
            self._is_skipped = False
        if len(rest) > _MAX_EVENT_BYTES:
            self._is_skipped, rest = True, rest[-4:]
        self._rest = rest
        return events


def _most_output_tokens(request: PassthroughRequest, price: Price) -> int:
    """Returns the output tokens that are reserved: none where a model does not count them."""
    if not price.output:
        return 0
    if request.mode == "image_generation":
        return request.units.images * _IMAGE_TOKENS
    if request.mode == "audio_transcription":
        return math.ceil(request.units.audio_s * _SOUND_TOKENS_PER_S)
    return request.prompt_tokens * 8 if request.mode == "audio_speech" else 0


def _check_cost(price: Price, request: PassthroughRequest, most_nusd: int) -> None:
    """Raises TooExpensive if the request may cost more than its caller allows."""
    max_usd = request.inference_request.max_usd
    usd = to_usd(price.max_cost_nusd(request.prompt_tokens, 0) + most_nusd)
    if max_usd is not None and usd > max_usd:
        raise TooExpensive(f"It may cost ${usd:.4g}, and ${max_usd:.4g} are allowed. Ask for less, or allow more.")


def _dispatch_request(principal: Principal, context: RequestContext, request: PassthroughRequest) -> DispatchRequest:
    asked = request.inference_request
    wishes_s = [wish_s for wish_s in (asked.ttft_in_s, asked.deadline_in_s) if wish_s is not None]
    return DispatchRequest(
        id=context.request_id,
        organisation=principal.tenants[-1],
        flow=flow_of(principal, asked),
        prompt_tokens=request.prompt_tokens,
        prompts=[TruncatedPrompt((), request.prompt_tokens)],
        max_tokens=0,
        choices=1,
        arrived_s=context.started_s,
        ttft_deadline_s=context.started_s + min(wishes_s) if wishes_s else None,
        session=None if asked.session is None else f"{principal.tenants[-1]}/{asked.session}",
        regions=principal.regions if asked.regions is None else principal.regions_for(asked.regions),
        timeline=context.timeline,
    )

"""The way of a request for embeddings: the stages of `maitred.app.request.pipeline`, for answers that are vectors.

A request may bring thousands of texts. Granted as a whole it would hold the encoder for seconds, and whoever has one
sentence would wait behind it. So it is cut into slices, each of which has an entry of its own in the fair queue, a few
of them at a time: between two slices others have their turn. Admission and ledger see one request.
"""

import asyncio
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from maitred.admission.admission import Admission
from maitred.admission.grant import Grant
from maitred.admission.request import AdmissionRequest
from maitred.app.models.router import Router
from maitred.app.request.output import EncodingSpans
from maitred.app.request.planner import flow_of
from maitred.app.request.tokenized import tokens_of
from maitred.app.request.validation import check_embeds, check_text
from maitred.core.clock import Clock
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import DeadlineExceeded, ReplicaLost
from maitred.core.flow import Flow
from maitred.core.inference import InferenceRequest
from maitred.core.replica import ModelCard, TokenStream
from maitred.core.request import EngineRequest, FinishReason, SamplingParams, TokenDelta
from maitred.core.service import Vector
from maitred.core.tenancy import ANONYMOUS, Principal
from maitred.core.timeline import SpanName
from maitred.dispatch.dispatcher import DispatchEntry, Dispatcher
from maitred.dispatch.request import DispatchRequest
from maitred.routing.catalog import AnyModel, ServedModel

SLICE_TEXTS = 32
"""Texts that are granted together, at most."""
_SLICES_AT_ONCE = 4
"""Of one request, in the queue or at work: enough that the encoder does not wait for us."""
_NOTHING_GENERATED = SamplingParams(max_tokens=0, seed=0)


@dataclass(frozen=True, slots=True)
class _Job:
    """One request on its way."""

    inference_request: InferenceRequest
    context: RequestContext
    texts: Sequence[list[int]]
    slices: Sequence[range]
    """Of the texts, by index."""
    flow: Flow
    principal_org: str
    dispatcher: Dispatcher
    vectors: list[Vector]
    """Filled as they come."""

    def dispatch_request(self, part: range) -> DispatchRequest:
        """A slice as the queue sees it."""
        request, context, texts = self.inference_request, self.context, [self.texts[index] for index in part]
        wishes = [wish_s for wish_s in (request.ttft_in_s, request.deadline_in_s) if wish_s is not None]
        return DispatchRequest(
            id=context.request_id,
            principal_org=self.principal_org,
            flow=self.flow,
            prompt_tokens=sum(map(len, texts)),
            prompts=texts,
            max_tokens=0,
            choices=len(texts),
            arrived_s=context.started_s,
            deadline_s=context.started_s + min(wishes) if wishes else None,
            timeline=context.timeline,
        )

    def request(self, index: int, lease: str, now_s: float) -> EngineRequest:
        """Makes the engine request for one text, under an id that leads to the line in the ledger."""
        deadline_in_s = self.inference_request.deadline_in_s
        return EngineRequest(
            id=f"{lease}-{index}",
            prompt=self.texts[index],
            sampling=_NOTHING_GENERATED,
            flow=self.flow,
            deadline_in_s=None if deadline_in_s is None else self.context.started_s + deadline_in_s - now_s,
            known_as=self.context.request_id,
            trace_id=self.context.timeline.trace_id,
        )


class Embedder:
    """Takes requests for embeddings through the stages. Implements `maitred.core.embedding.EmbeddingService`.

    Args:
        router: What is served, under which names.
        dispatchers: For each model of the catalog, the queue before its replicas.
        admission: Who may run.
        clock: Clock for the times in the context.
    """

    def __init__(
        self, router: Router, dispatchers: Mapping[str, Dispatcher], admission: Admission, clock: Clock
    ) -> None:
        self._router = router
        self._dispatchers = dispatchers
        self._admission = admission
        self._clock = clock

    async def embed(
        self, request: InferenceRequest, context: RequestContext, dimensions: int | None
    ) -> Sequence[Vector]:
        """Computes the vectors of a request; implements `EmbeddingService.embed`."""
        principal = context.principal or ANONYMOUS
        context.request = request
        model = self._find_model(request, principal, context)
        card = model.card()
        check_embeds(card, model.name, dimensions)
        assert isinstance(model, ServedModel), "servers of others compute no vectors, so the check has refused them"
        job = await self._plan_job(model, card, request, principal, context)
        # May the caller have it? Then wait in line, slice by slice, and settle before anybody sees the end.
        async with AsyncExitStack() as running:
            with context.timeline.span(SpanName.ADMISSION, self._clock.monotonic_s) as span:
                admission_request = _admission_request(principal, context, request, job.texts)
                grant = running.push_async_exit(await self._admission.admit(admission_request))
                span.facts["lease"] = grant.lease
            await self._run(job, grant)
            await grant.settle(context.usage, Outcome.FINISHED)
        if dimensions is None or dimensions == card.embedding_dimensions:
            return job.vectors
        return [shorten(vector, dimensions) for vector in job.vectors]

    def _find_model(self, request: InferenceRequest, principal: Principal, context: RequestContext) -> AnyModel:
        """Finds the model that serves the request."""
        with context.timeline.span(SpanName.RESOLVE, self._clock.monotonic_s, asked=request.model):
            model = self._router.resolve(request.model, principal)
        context.model = model.name
        return model

    async def _plan_job(
        self,
        model: ServedModel,
        card: ModelCard,
        request: InferenceRequest,
        principal: Principal,
        context: RequestContext,
    ) -> _Job:
        """Reads the texts, and predicts when their turn will come: who would be served too late is told so now."""
        with context.timeline.span(SpanName.PLAN, self._clock.monotonic_s, model=model.name) as span:
            texts = [
                model.tokenizer.append_end(tokens) if isinstance(prompt, str) else tokens
                for prompt, tokens in zip(request.prompts, await tokens_of(model, request.prompts), strict=True)
            ]
            for index, text in enumerate(texts):
                check_text(card, text, request.prompt_param if len(texts) == 1 else f"{request.prompt_param}[{index}]")
            context.prompt_tokens = sum(map(len, texts))
            job = _Job(
                request,
                context,
                texts,
                list(split_inputs([len(text) for text in texts], card.kv_capacity_tokens // _SLICES_AT_ONCE)),
                flow_of(principal, request),
                principal.tenants[-1],
                self._dispatchers[model.name],
                [b""] * len(texts),
            )
            context.priority = job.flow.priority
            context.predicted_position = position = job.dispatcher.admission.check(
                job.dispatch_request(job.slices[0]), self._clock.monotonic_s()
            )
            span.facts |= {
                "texts": len(texts),
                "slices": len(job.slices),
                "prompt_tokens": context.prompt_tokens,
                "position": position.position,
                "predicted_wait_s": round(position.wait_s, 6),
                "predicted_ttft_s": round(position.ttft_s, 6),
            }
        return job

    async def _run(self, job: _Job, grant: Grant) -> None:
        if len(job.slices) == 1:
            await self._slice(job, job.slices[0], grant)
            return
        waiting = iter(job.slices)

        async def work() -> None:
            for part in waiting:  # shared: each worker takes the next one
                await self._slice(job, part, grant)

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(_SLICES_AT_ONCE, len(job.slices))):
                    workers.create_task(work(), name="embedding slice")
        except ExceptionGroup as failures:
            # One slice's failure is the request's; the group has ended the others.
            raise failures.exceptions[0] from None

    async def _slice(self, job: _Job, part: range, grant: Grant) -> None:
        """Waits for the slice's turn, and computes it."""
        context = job.context
        async with AsyncExitStack() as running:
            entry = await running.enter_async_context(job.dispatcher.enqueue(job.dispatch_request(part)))
            if part.start == 0:
                context.position = entry.position
            endpoint = await entry.wait_dispatched()
            now_s = self._clock.monotonic_s()
            if context.dispatched_s is None:
                context.position, context.dispatched_s = None, now_s
                grant.replica = endpoint.name
            streams = []
            span = running.enter_context(
                context.timeline.span(
                    SpanName.ATTEMPT, self._clock.monotonic_s, replica=endpoint.name, first=part.start, texts=len(part)
                )
            )
            for index in part:
                request = job.request(index, grant.lease, now_s)
                streams.append(await running.enter_async_context(endpoint.replica.generate(request)))
                entry.on_submitted()
            encoding = EncodingSpans()
            for index, stream in zip(part, streams, strict=True):
                delta = await self._read_vector(stream, entry, context)
                job.vectors[index] = delta.embedding or b""
                encoding.on_report(delta, len(job.texts[index]))
                entry.charge_tokens(prompt_tokens=len(job.texts[index]))
            encoding.record(span, self._clock.monotonic_s())

    async def _read_vector(self, stream: TokenStream, entry: DispatchEntry, context: RequestContext) -> TokenDelta:
        """Returns the delta that has a text's vector."""
        async for deltas in stream:
            for delta in deltas:
                if delta.finish is FinishReason.DEADLINE:
                    raise DeadlineExceeded
                if delta.embedding is not None:
                    self._note(delta.waited_ms or {}, entry, context)
                    return delta
        raise ReplicaLost

    def _note(self, engine_waits: Mapping[str, float], entry: DispatchEntry, context: RequestContext) -> None:
        """Something came: for the caller's account the longest waits count, for they overlap."""
        if context.first_token_s is None:
            context.first_token_s = self._clock.monotonic_s()
        if not entry.queued.begun:
            entry.on_first_token()
        for waits in (entry.waited_ms, engine_waits):
            for cause, waited_ms in waits.items():
                context.waited_ms[cause] = max(context.waited_ms.get(cause, 0.0), waited_ms)


def split_inputs(lengths: Sequence[int], tokens: int) -> Iterator[range]:
    """Cuts texts into runs of at most `SLICE_TEXTS` texts and so many tokens; one that is longer is a run by itself."""
    start = total = 0
    for index, length in enumerate(lengths):
        if index > start and (index - start == SLICE_TEXTS or total + length > tokens):
            yield range(start, index)
            start, total = index, 0
        total += length
    yield range(start, len(lengths))


def shorten(vector: Vector, dimensions: int) -> Vector:
    """The first numbers of a vector, scaled to length 1 again.

    That keeps most of the meaning only in models that were trained for it (Kusupati et al., "Matryoshka Representation
    Learning", 2022).
    """
    numbers = struct.unpack_from(f"<{dimensions}f", vector)
    length = math.hypot(*numbers) or 1.0
    return struct.pack(f"<{dimensions}f", *(number / length for number in numbers))


def _admission_request(
    principal: Principal, context: RequestContext, request: InferenceRequest, texts: Sequence[list[int]]
) -> AdmissionRequest:
    """The request as admission sees it."""
    return AdmissionRequest(
        principal=principal,
        request_id=context.request_id,
        route=context.route,
        model=context.model,
        prompt_tokens=context.prompt_tokens,
        longest_prompt=max(map(len, texts)),
        max_tokens=0,
        window_left=0,
        choices=len(texts),
        prompt_param=request.prompt_param,
        context=context,
    )

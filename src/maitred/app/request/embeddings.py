"""Pipeline of embeddings requests: the stages of `maitred.app.request.pipeline` for a model that returns vectors.

A request may have thousands of inputs. Dispatched at once, they would occupy the encoder for seconds and block small
requests. So the inputs are split into chunks. Each chunk is a separate entry in the fair queue, with a few chunks in
the queue at a time, so other requests run in between. Admission and the ledger see one request.

Inputs whose vectors the cache has take no part in this (see `maitred.app.request.embedding_lookup`). Only the others
are computed and have prompt tokens in the ledger.
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
from maitred.app.request.embedding_lookup import EmbeddingLookup, make_embedding_lookup
from maitred.app.request.output import EmbeddingSpans
from maitred.app.request.planner import flow_of
from maitred.app.request.tokenized import tokenize_prompts
from maitred.app.request.validation import check_embeds, check_input_tokens, prompt_truncation
from maitred.cache.embedding_cache import EmbeddingCache
from maitred.core.clock import Clock
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import DeadlineExceeded, NotCached, ReplicaLost
from maitred.core.flow import Flow
from maitred.core.inference import InferenceRequest
from maitred.core.replica import ModelCard, TokenStream
from maitred.core.request import EngineRequest, FinishReason, SamplingParams, TokenDelta, Usage
from maitred.core.service import Vector
from maitred.core.tenancy import ANONYMOUS, Principal
from maitred.core.timeline import SpanName
from maitred.dispatch.dispatcher import DispatchEntry, Dispatcher
from maitred.dispatch.request import DispatchRequest
from maitred.routing.catalog import AnyModel, ServedModel

MAX_CHUNK_TEXTS = 32
"""Most inputs of one chunk."""
_MAX_CONCURRENT_CHUNKS = 4
"""Most chunks of one request that wait or run at a time; enough to keep the encoder busy."""
_EMBEDDING_SAMPLING = SamplingParams(max_tokens=0, seed=0)


@dataclass(frozen=True, slots=True)
class _EmbeddingRequest:
    """State of one embeddings request."""

    inference_request: InferenceRequest
    context: RequestContext
    texts: Sequence[list[int]]
    vectors: list[Vector]
    """Vectors by input index; empty until they are known."""
    missing: Sequence[int]
    """Indices of the inputs that are computed."""
    lookup: EmbeddingLookup | None
    """Look-up of the inputs in the cache; None: they are not cached."""
    chunks: Sequence[Sequence[int]]
    """Indices of inputs that are dispatched together."""
    flow: Flow
    organisation: str
    regions: frozenset[str] | None
    dispatcher: Dispatcher

    def dispatch_request(self, chunk: Sequence[int]) -> DispatchRequest:
        """Makes the dispatch request of one chunk."""
        request, context, texts = self.inference_request, self.context, [self.texts[index] for index in chunk]
        deadlines = [wish_s for wish_s in (request.ttft_in_s, request.deadline_in_s) if wish_s is not None]
        return DispatchRequest(
            id=context.request_id,
            organisation=self.organisation,
            flow=self.flow,
            prompt_tokens=sum(map(len, texts)),
            prompts=texts,
            max_tokens=0,
            choices=len(texts),
            arrived_s=context.started_s,
            ttft_deadline_s=context.started_s + min(deadlines) if deadlines else None,
            regions=self.regions,
            timeline=context.timeline,
        )

    def engine_request(self, index: int, lease: str, now_s: float) -> EngineRequest:
        """Makes the engine request of one input; its id starts with the lease, which is the ledger key."""
        deadline_in_s = self.inference_request.deadline_in_s
        return EngineRequest(
            id=f"{lease}-{index}",
            prompt=self.texts[index],
            sampling=_EMBEDDING_SAMPLING,
            flow=self.flow,
            deadline_in_s=None if deadline_in_s is None else self.context.started_s + deadline_in_s - now_s,
            known_as=self.context.request_id,
            trace_id=self.context.timeline.trace_id,
        )


class Embedder:
    """Serves embeddings requests. Implements `maitred.core.service.EmbeddingService`.

    Args:
        router: Resolves model names.
        dispatchers: Dispatcher of each model.
        admission: Admits requests to limits and budgets.
        clock: Clock for the times in the context.
        cache: Cache of vectors; None: every vector is computed.
    """

    def __init__(
        self,
        router: Router,
        dispatchers: Mapping[str, Dispatcher],
        admission: Admission,
        clock: Clock,
        cache: EmbeddingCache | None = None,
    ) -> None:
        self._router = router
        self._dispatchers = dispatchers
        self._admission = admission
        self._clock = clock
        self._cache = cache

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
        embedding = await self._prepare(model, card, request, principal, context)
        # Admit, run all chunks, and settle before the response is returned.
        async with AsyncExitStack() as stack:
            if embedding.lookup is not None:
                embedding.lookup.begin(embedding.missing)
                stack.callback(embedding.lookup.close)
            with context.timeline.span(SpanName.ADMISSION, self._clock.monotonic_s) as span:
                grant = stack.push_async_exit(await self._admission.admit(_admission_request(embedding, principal)))
                span.facts["lease"] = grant.lease
            await self._run(embedding, grant)
            await grant.settle(Usage(context.prompt_tokens - context.saved_prompt_tokens, 0), Outcome.FINISHED)
        vectors = embedding.vectors
        if embedding.lookup is not None:
            embedding.lookup.repeat(vectors)
        if dimensions is None or dimensions == card.embedding_dimensions:
            return vectors
        return [shorten(vector, dimensions) for vector in vectors]

    def _find_model(self, request: InferenceRequest, principal: Principal, context: RequestContext) -> AnyModel:
        """Finds the model that serves the request."""
        with context.timeline.span(SpanName.RESOLVE, self._clock.monotonic_s, asked=request.model):
            model = self._router.resolve(request.model, principal)
        context.model = model.name
        return model

    async def _prepare(
        self,
        model: ServedModel,
        card: ModelCard,
        request: InferenceRequest,
        principal: Principal,
        context: RequestContext,
    ) -> _EmbeddingRequest:
        """Tokenises, checks and looks up the inputs, and predicts the queue position; rejects what would be late."""
        with context.timeline.span(SpanName.PLAN, self._clock.monotonic_s, model=model.name) as span:
            before, inputs = model.tokenizer.text_prompt, request.prompts
            if before:
                inputs = [before + text if isinstance(text, str) else text for text in inputs]
            truncation = prompt_truncation(card, request)
            prompts = await tokenize_prompts(model, inputs, truncation=truncation, principal=principal)
            texts = [
                model.tokenizer.append_end(tokens, *(truncation or ())) if isinstance(prompt, str) else tokens
                for prompt, tokens in zip(request.prompts, prompts, strict=True)
            ]
            for index, text in enumerate(texts):
                check_input_tokens(
                    card, text, request.prompt_param if len(texts) == 1 else f"{request.prompt_param}[{index}]"
                )
            lengths = [*map(len, texts)]
            context.prompt_tokens = sum(lengths)
            flow = flow_of(principal, request)
            context.priority = flow.priority
            vectors, lookup = [b""] * len(texts), None
            missing: Sequence[int] = range(len(texts))
            if self._cache is not None:
                lookup = make_embedding_lookup(self._cache, model, card, texts, request, principal, context)
            if lookup is not None:
                missing = await lookup.find(vectors, lengths, context)
            if missing and request.cache.only_if_cached:
                raise NotCached
            chunks = split_inputs(
                [lengths[index] for index in missing], card.kv_capacity_tokens // _MAX_CONCURRENT_CHUNKS
            )
            embedding = _EmbeddingRequest(
                inference_request=request,
                context=context,
                texts=texts,
                vectors=vectors,
                missing=missing,
                lookup=lookup,
                chunks=[missing[chunk.start : chunk.stop] for chunk in chunks],
                flow=flow,
                organisation=principal.tenants[-1],
                regions=principal.regions_for(request.regions),
                dispatcher=self._dispatchers[model.name],
            )
            span.facts |= {
                "texts": len(texts),
                "known_texts": len(texts) - len(missing),
                "slices": len(embedding.chunks),
                "prompt_tokens": context.prompt_tokens,
            }
            if missing:
                context.predicted_position = position = embedding.dispatcher.load_shedder.check(
                    embedding.dispatch_request(embedding.chunks[0]), self._clock.monotonic_s()
                )
                span.facts |= {
                    "position": position.position,
                    "predicted_wait_s": round(position.wait_s, 6),
                    "predicted_ttft_s": round(position.ttft_s, 6),
                }
        return embedding

    async def _run(self, embedding: _EmbeddingRequest, grant: Grant) -> None:
        if len(embedding.chunks) == 1:
            await self._run_chunk(embedding, embedding.chunks[0], grant)
            return
        pending_chunks = iter(embedding.chunks)

        async def work() -> None:
            for chunk in pending_chunks:  # shared: each worker takes the next one
                await self._run_chunk(embedding, chunk, grant)

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(_MAX_CONCURRENT_CHUNKS, len(embedding.chunks))):
                    tasks.create_task(work(), name="embedding chunk")
        except ExceptionGroup as failures:
            # A failed chunk fails the request; the task group has cancelled the others.
            raise failures.exceptions[0] from None

    async def _run_chunk(self, embedding: _EmbeddingRequest, chunk: Sequence[int], grant: Grant) -> None:
        """Waits for dispatch of a chunk and reads its vectors."""
        context = embedding.context
        async with AsyncExitStack() as running:
            entry = await running.enter_async_context(embedding.dispatcher.enqueue(embedding.dispatch_request(chunk)))
            if chunk is embedding.chunks[0]:
                context.position = entry.position
            endpoint = await entry.wait_dispatched()
            now_s = self._clock.monotonic_s()
            if context.dispatched_s is None:
                context.position, context.dispatched_s = None, now_s
                grant.replica = endpoint.name
            streams = []
            span = running.enter_context(
                context.timeline.span(
                    SpanName.ATTEMPT,
                    self._clock.monotonic_s,
                    replica=endpoint.name,
                    first=chunk[0],
                    texts=len(chunk),
                )
            )
            for index in chunk:
                request = embedding.engine_request(index, grant.lease, now_s)
                streams.append(await running.enter_async_context(endpoint.replica.generate(request)))
                entry.on_submitted()
            embedding_spans = EmbeddingSpans()
            for index, stream in zip(chunk, streams, strict=True):
                delta = await self._read_embedding_delta(stream, entry, context)
                embedding.vectors[index] = delta.embedding or b""
                embedding_spans.on_report(delta, len(embedding.texts[index]))
                entry.charge_tokens(prompt_tokens=len(embedding.texts[index]))
            embedding_spans.record(span, self._clock.monotonic_s())
        if embedding.lookup is not None:
            # Also of a request that fails later, so that its repeat computes only the rest.
            embedding.lookup.store([(index, embedding.vectors[index]) for index in chunk])

    async def _read_embedding_delta(
        self, stream: TokenStream, entry: DispatchEntry, context: RequestContext
    ) -> TokenDelta:
        """Returns the delta with the vector of one input."""
        async for deltas in stream:
            for delta in deltas:
                if delta.finish is FinishReason.DEADLINE:
                    raise DeadlineExceeded
                if delta.embedding is not None:
                    self._record_first_result(delta.waited_ms or {}, entry, context)
                    return delta
        raise ReplicaLost

    def _record_first_result(
        self, engine_waits: Mapping[str, float], entry: DispatchEntry, context: RequestContext
    ) -> None:
        """Records the time of the first vector and, by cause, the longest wait: the waits of chunks overlap."""
        if context.first_token_s is None:
            context.first_token_s = self._clock.monotonic_s()
        if not entry.queued.has_output:
            entry.on_first_token()
        for waits in (entry.waited_ms, engine_waits):
            for cause, waited_ms in waits.items():
                context.waited_ms[cause] = max(context.waited_ms.get(cause, 0.0), waited_ms)


def split_inputs(lengths: Sequence[int], max_tokens: int) -> Iterator[range]:
    """Splits inputs into chunks of at most `MAX_CHUNK_TEXTS` inputs and `max_tokens`; a longer input is one chunk."""
    if not lengths:
        return
    start = total = 0
    for index, length in enumerate(lengths):
        if index > start and (index - start == MAX_CHUNK_TEXTS or total + length > max_tokens):
            yield range(start, index)
            start, total = index, 0
        total += length
    yield range(start, len(lengths))


def shorten(vector: Vector, dimensions: int) -> Vector:
    """Truncates a vector to its first components and normalises it to length 1.

    That keeps most of the meaning only in models that were trained for it (Kusupati et al., "Matryoshka Representation
    Learning", 2022).
    """
    components = struct.unpack_from(f"<{dimensions}f", vector)
    length = math.hypot(*components) or 1.0
    return struct.pack(f"<{dimensions}f", *(number / length for number in components))


def _admission_request(embedding: _EmbeddingRequest, principal: Principal) -> AdmissionRequest:
    """Makes the admission request: for the tokens that are computed, or for an answer from the cache."""
    request, context, texts = embedding.inference_request, embedding.context, embedding.texts
    return AdmissionRequest(
        principal=principal,
        request_id=context.request_id,
        route=context.route,
        model=context.model,
        prompt_tokens=context.prompt_tokens - context.saved_prompt_tokens,
        longest_prompt=max(map(len, texts)),
        max_tokens=0,
        window_left=0,
        choices=len(texts),
        prompt_param=request.prompt_param,
        cache="" if embedding.missing else "exact",
        saved_tokens=context.saved_prompt_tokens,
        context=context,
    )

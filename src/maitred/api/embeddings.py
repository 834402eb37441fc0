"""Route `POST /v1/embeddings`: computes a vector for each of one or several texts."""

import asyncio
import struct
from base64 import b64encode
from collections.abc import Sequence
from typing import cast

import msgspec

from maitred.api.exchange import HttpExchange
from maitred.api.headers import apply_request_headers
from maitred.api.media.passthrough import PassthroughRoutes
from maitred.api.routes import Route
from maitred.core.inference import Conversation, InferenceRequest, Prompt
from maitred.core.request import SamplingParams
from maitred.core.service import EmbeddingService, Vector
from maitred.core.tenancy import Scope
from maitred.wire.cache_control import to_cache_control
from maitred.wire.openai.decode import decode_embedding
from maitred.wire.openai.requests import EmbeddingRequest
from maitred.wire.openai.responses import EmbeddingEntry, EmbeddingList, EmbeddingUsage, encode

_ENTRIES_AT_ONCE = 32
"""Vectors that are encoded before other tasks may run: this takes about a millisecond."""


class EmbeddingRoutes:
    """Routes of embeddings in OpenAI's API.

    Args:
        embedding: The embedding service behind the API.
        strict: Whether unknown fields are refused.
        passthrough: Passes requests for models of other servers on; None: there are none.
    """

    def __init__(
        self, embedding: EmbeddingService, *, strict: bool, passthrough: PassthroughRoutes | None = None
    ) -> None:
        self._embedding = embedding
        self._passthrough = passthrough
        self._strict = strict

    def routes(self) -> list[Route]:
        """Returns the one route of embeddings."""
        return [
            Route(
                "POST",
                "/v1/embeddings",
                self.create,
                "Turn texts into vectors.",
                reads=EmbeddingRequest,
                returns=EmbeddingList,
                needs=Scope.INFERENCE,
                idempotent=True,
                least_output=0,
            )
        ]

    async def create(self, exchange: HttpExchange) -> None:
        """Computes the vectors of the inputs, or passes the request on to the servers of its model."""
        if self._passthrough is not None:
            model = await exchange.decode(_decode_model)
            if model and self._passthrough.runs_elsewhere(exchange, model):
                await self._passthrough.pass_json(exchange, "embeddings", "embedding")
                return
        request = await exchange.decode(decode_embedding, strict=self._strict)
        exchange.context.ignored_fields = request.ignored_fields
        inference_request = apply_request_headers(_ask_of(request), exchange.header, retries=exchange.retries)
        vectors = await self._embedding.embed(inference_request, exchange.context, request.dimensions)
        tokens = exchange.context.prompt_tokens
        answer = EmbeddingList(
            data=await _entries(vectors, as_base64=request.as_base64),
            model=exchange.context.model,
            usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
        )
        await exchange.respond(encode(answer))


class _NamedModel(msgspec.Struct):
    """Body of a request, of which only the model is read."""

    model: str = ""


def _decode_model(body: bytes) -> str:
    """Returns the model that a body names; empty: it names none, or is at fault in some way."""
    try:
        return msgspec.json.decode(body, type=_NamedModel).model.strip()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return ""


async def _entries(vectors: Sequence[Vector], *, as_base64: bool) -> list[EmbeddingEntry]:
    """Returns the encoded entries of an answer, in small steps so that other tasks can run between them."""
    entries: list[msgspec.Raw] = []
    for index, vector in enumerate(vectors):
        shown = b64encode(vector).decode("ascii") if as_base64 else list(struct.unpack(f"<{len(vector) // 4}f", vector))
        entries.append(msgspec.Raw(msgspec.json.encode(EmbeddingEntry(embedding=shown, index=index))))
        if index % _ENTRIES_AT_ONCE == _ENTRIES_AT_ONCE - 1:
            await asyncio.sleep(0)
    return cast("list[EmbeddingEntry]", entries)


def _prompts_of(request: EmbeddingRequest) -> Sequence[Prompt]:
    if request.messages is None:
        return request.inputs()
    return [
        Conversation(
            request.conversation(),
            add_generation_prompt=request.add_generation_prompt is True,
            template_arguments=request.chat_template_kwargs or {},
            continue_final_message=request.continue_final_message is True,
        )
    ]


def _ask_of(request: EmbeddingRequest) -> InferenceRequest:
    return InferenceRequest(
        model=request.model,
        prompts=_prompts_of(request),
        sampling=SamplingParams(max_tokens=0, seed=0),
        priority=request.priority,
        cache=to_cache_control(request.cache),
        prompt_param="input" if request.messages is None else "messages",
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        # An encoder keeps the beginning of a text, as in vLLM.
        truncation_side="left" if request.truncation_side == "left" else "right",
        whole=True,
    )

"""Compaction of conversations: the model that is asked summarises what it has read so far.

The summary is an answer like any other: it is admitted, queued, generated, settled and billed as one.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack

from msgspec.structs import replace

from maitred.api.exchange import HttpExchange
from maitred.api.fair_thread_pool import FairThreadPool
from maitred.api.large_body import LARGE_BODY_BYTES
from maitred.core.context import RequestContext
from maitred.core.errors import ContextLengthExceeded, InvalidRequest, ReplicaLost
from maitred.core.inference import InferenceRequest
from maitred.core.request import FinishReason
from maitred.core.service import InferenceService, ResponseStream
from maitred.store.responses import ResponseStore
from maitred.wire.responses.compaction import MAX_SUMMARY_TOKENS, CompactedWindow, is_sealed_here, seal, unseal
from maitred.wire.responses.requests import CompactionItem, InputItem


class CompactionCodec:
    """Codec of compaction items: seals windows for clients, and opens those that come back.

    Args:
        store: Has the key.
        threads: Threads for windows that are too large for the event loop.
    """

    def __init__(self, store: ResponseStore, threads: FairThreadPool) -> None:
        self._store = store
        self._threads = threads

    async def prepare(self) -> None:
        """Reads the key, so that no window fails for it after its summary was generated.

        Raises:
            StoreUnavailable: The database cannot be reached, and the key was never read.
        """
        await self._store.signing_key()

    async def seal(self, exchange: HttpExchange, window: CompactedWindow) -> str:
        """Returns a window as the text of ``encrypted_content``."""
        return seal(window, exchange.principal, await self._store.signing_key())

    async def open_last(
        self, exchange: HttpExchange, earlier: Sequence[InputItem], own: Sequence[InputItem]
    ) -> CompactedWindow | None:
        """Returns what the last compaction item of a conversation stands for; None: there is none of this server.

        Args:
            exchange: The exchange of the request.
            earlier: Items of the conversation before the request's own.
            own: Items of the request.

        Raises:
            InvalidRequest: It was altered, or made for another tenant.
        """
        items = [*(("conversation", item) for item in earlier)]
        items += [(f"input[{position}]", item) for position, item in enumerate(own)]
        for path, item in reversed(items):
            if isinstance(item, CompactionItem):
                return await self._open(exchange, item, path) if is_sealed_here(item) else None
        return None

    async def _open(self, exchange: HttpExchange, item: CompactionItem, path: str) -> CompactedWindow:
        size, key = len(item.encrypted_content), await self._store.signing_key()
        if size <= LARGE_BODY_BYTES:
            return unseal(item, exchange.principal, key, path)
        return await self._threads.run(exchange.principal, size, lambda: unseal(item, exchange.principal, key, path))


def for_summary(request: InferenceRequest) -> InferenceRequest:
    """Returns a request for a summary, which is of no use in part."""
    return replace(request, whole=True, partial=False, escalate=False)


def with_half_the_cost(request: InferenceRequest) -> InferenceRequest:
    """Returns a request that may cost half, for each of the two that a caller's bound is for."""
    return request if request.max_usd is None else replace(request, max_usd=request.max_usd / 2)


async def open_summary(
    service: InferenceService, request: InferenceRequest, context: RequestContext, stack: AsyncExitStack
) -> ResponseStream:
    """Begins a summary of at most `MAX_SUMMARY_TOKENS`, or of an eighth of a window that has no room for so many.

    Args:
        service: The inference service.
        request: The request for the summary.
        context: The request context.
        stack: Owns what the summary holds.
    """
    try:
        return await stack.enter_async_context(
            service.generate(replace(request, max_tokens=MAX_SUMMARY_TOKENS), context)
        )
    except ContextLengthExceeded as error:
        shorter = error.window // 8
        if not 0 < shorter < MAX_SUMMARY_TOKENS:
            raise
        return await stack.enter_async_context(service.generate(replace(request, max_tokens=shorter), context))


async def read_summary(answer: ResponseStream, context: RequestContext, window: CompactedWindow) -> CompactedWindow:
    """Reads an answer to its end; returns the window with its text as the summary.

    Raises:
        InvalidRequest: It was cut, because there was no room for a longer one.
        ReplicaLost: It has no text.
    """
    text, finish = "", None
    async for parts in answer:
        for part in parts:
            text += part.text
            finish = part.finish or finish
    if finish is FinishReason.LENGTH and (context.clamped_max_tokens is not None or context.degraded):
        raise InvalidRequest(
            "The conversation is not compacted: a summary of it needs more tokens than the limits of this key, or the "
            "load of the server, leave. Compact it later, or send fewer items in input.",
            param="input",
        )
    if not text.strip():
        raise ReplicaLost("The model gave no summary of the conversation. Send the request again.")
    return replace(window, summary=text, is_cut=finish is FinishReason.LENGTH)

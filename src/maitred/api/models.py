"""Routes that give information about models: the list, and a model's tokenizer."""

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

from msgspec import UNSET, UnsetType

from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.errors import InvalidRequest, ReplicaUnavailable
from maitred.core.inference import Conversation, Prompt
from maitred.core.service import InferenceService
from maitred.core.tenancy import Scope
from maitred.wire.anthropic import responses as anthropic
from maitred.wire.openai.decode import decode_detokenize, decode_tokenize
from maitred.wire.openai.requests import DetokenizeRequest, TokenizeRequest
from maitred.wire.openai.responses import Detokenized, ModelEntry, ModelList, Tokenized, encode
from maitred.wire.openai.sampling import declared_tools

_MOST_MODELS = 1_000
"""Most models of a page, as in Anthropic's API."""


class ModelRoutes:
    """Routes for the list of models and for their tokenizers.

    Args:
        answering: The inference service behind the API.
        strict: Whether unknown fields are refused.
    """

    def __init__(self, answering: InferenceService, *, strict: bool) -> None:
        self._answering = answering
        self._strict = strict
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        return [
            Route(
                "GET", "/v1/models", self.list, "The models that are served.", returns=ModelList, needs=Scope.INFERENCE
            ),
            Route("GET", "/v1/models/{model}", self.get, "One model.", returns=ModelEntry, needs=Scope.INFERENCE),
            Route(
                "POST",
                "/tokenize",
                self.tokenize,
                "A text or a conversation as token ids.",
                reads=TokenizeRequest,
                returns=Tokenized,
                needs=Scope.INFERENCE,
            ),
            Route(
                "POST",
                "/detokenize",
                self.detokenize,
                "The text of token ids.",
                reads=DetokenizeRequest,
                returns=Detokenized,
                needs=Scope.INFERENCE,
            ),
        ]

    async def list(self, exchange: HttpExchange) -> None:
        """Lists all models that the caller may use; clients of Anthropic's API get pages in its words."""
        names = self._answering.models(exchange.principal)
        if _speaks_anthropic(exchange):
            await exchange.respond(anthropic.encode(self._page(exchange, names)))
        else:
            await exchange.respond(encode(ModelList(data=[self._entry(exchange, name) for name in names])))

    async def get(self, exchange: HttpExchange) -> None:
        """Answers with one model that the caller may use."""
        entry = self._entry(exchange, exchange.parameter)
        await exchange.respond(anthropic.encode(_model_info(entry)) if _speaks_anthropic(exchange) else encode(entry))

    def _page(self, exchange: HttpExchange, names: Sequence[str]) -> anthropic.ModelPage:
        """Returns the page that the query asks for by `limit`, `after_id` or `before_id`."""
        query = dict(exchange.query)
        limit, after, before = query.get("limit", "20"), query.get("after_id"), query.get("before_id")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MOST_MODELS):
            raise InvalidRequest(f"limit must be a number from 1 to {_MOST_MODELS}.", param="limit")
        for param, cursor in (("after_id", after), ("before_id", before)):
            if cursor is not None and cursor not in names:
                raise InvalidRequest(f"{param} must be the id of a model of another page.", param=param)
        if before is not None:
            earlier = names[: names.index(before)]
            page, rest = earlier[-int(limit) :], earlier[: -int(limit)]
        else:
            later = names[0 if after is None else names.index(after) + 1 :]
            page, rest = later[: int(limit)], later[int(limit) :]
        return anthropic.ModelPage(
            data=[_model_info(self._entry(exchange, name)) for name in page],
            has_more=bool(rest),
            first_id=page[0] if page else None,
            last_id=page[-1] if page else None,
        )

    async def tokenize(self, exchange: HttpExchange) -> None:
        """Tokenizes a text as the model would read it."""
        request = await exchange.decode(decode_tokenize, strict=self._strict)
        exchange.context.ignored_fields = request.ignored_fields
        model = request.model or self._first(exchange)
        prompt: Prompt = request.prompt or ""
        if request.messages is not None:
            continues = request.continue_final_message is True
            prompt = Conversation(
                request.conversation(),
                add_generation_prompt=not continues and request.add_generation_prompt is not False,
                tools=declared_tools(request),
                template_arguments=request.chat_template_kwargs or {},
                continue_final_message=continues,
                chat_template=request.chat_template,
            )
        tokens = await self._answering.tokenize(
            exchange.principal, model, prompt, add_special_tokens=request.adds_special_tokens
        )
        window = self._answering.card(exchange.principal, model).context_tokens
        await exchange.respond(encode(Tokenized(count=len(tokens), max_model_len=window, tokens=tokens)))

    async def detokenize(self, exchange: HttpExchange) -> None:
        """Converts tokens into their text."""
        request = await exchange.decode(decode_detokenize, strict=self._strict)
        model = request.model or self._first(exchange)
        await exchange.respond(
            encode(Detokenized(prompt=self._answering.detokenize(exchange.principal, model, request.tokens)))
        )

    def _first(self, exchange: HttpExchange) -> str:
        """Returns the default model of requests that name none; any name if the caller may use no model."""
        return next(iter(self._answering.models(exchange.principal)), "")

    def _entry(self, exchange: HttpExchange, name: str) -> ModelEntry:
        window: int | UnsetType = UNSET
        dimensions: int | UnsetType = UNSET
        ready = self._answering.ready(name)
        # The list of models must not depend on the health of a replica.
        with suppress(ReplicaUnavailable):
            card = self._answering.card(exchange.principal, name)
            window, dimensions = card.context_tokens, card.embedding_dimensions or UNSET
        return ModelEntry(
            id=name,
            created=self._created,
            owned_by="maitred",
            max_model_len=window,
            ready=ready,
            embedding_dimensions=dimensions,
        )


def _speaks_anthropic(exchange: HttpExchange) -> bool:
    """Returns whether a client expects the words of Anthropic's API, whose clients all send this header."""
    return exchange.header(b"anthropic-version") is not None


def _model_info(entry: ModelEntry) -> anthropic.ModelInfo:
    return anthropic.ModelInfo(
        id=entry.id,
        display_name=entry.id,
        created_at=datetime.fromtimestamp(entry.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=None if entry.max_model_len is UNSET else entry.max_model_len,
    )

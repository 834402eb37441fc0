"""Answers of LiteLLM's administration, and its routes."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from maitred.api.exchange import HttpExchange
from maitred.api.litellm.dialect import LITELLM
from maitred.api.routes import Handler, Route
from maitred.core.tenancy import Scope


def litellm_route(
    method: str,
    path: str,
    handler: Handler,
    *,
    reads: type | None = None,
    query: type[msgspec.Struct] | None = None,
    needs: Scope | None = Scope.ADMIN,
) -> Route:
    """Returns a route with LiteLLM's errors; its answers are described by LiteLLM's own documentation."""
    summary = f"LiteLLM's `{path}`."
    return Route(method, path, handler, summary, reads=reads, query=query, needs=needs, dialect=LITELLM)


async def answer(
    exchange: HttpExchange,
    body: Mapping[str, Any] | Sequence[Any] | str,
    noted: Sequence[str] = (),
    *,
    status: int = 200,
) -> None:
    """Sends an answer as JSON, and names the fields of the request that were left out."""
    headers = [(b"x-maitred-ignored", ", ".join(noted).encode("ascii"))] if noted else []
    await exchange.respond(msgspec.json.encode(body), status=status, headers=headers)

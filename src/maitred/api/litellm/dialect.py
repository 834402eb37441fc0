"""Dialect of LiteLLM's administration: its errors, its answers and its routes."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from maitred.api.dialect import OpenAIDialect
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Handler, Route
from maitred.core.errors import CallerError, Forbidden, MaitredError, QuotaExceeded, ResourceNotFound, Unauthenticated
from maitred.core.tenancy import Scope


class LitellmErrorDetail(Struct, frozen=True):
    """Detail of an error in LiteLLM's form."""

    message: str
    type: str
    param: str | None
    code: str
    """The status, as text."""


class LitellmError(Struct, frozen=True):
    """Body of an error."""

    error: LitellmErrorDetail


class LitellmDialect(OpenAIDialect):
    """Dialect of LiteLLM's administration: as OpenAI's, but `code` is the status, and the types are its own."""

    error_struct: type[Struct] = LitellmError

    def error(self, error: MaitredError, request_id: str) -> tuple[int, bytes]:
        """Encodes an error as LiteLLM's proxy does."""
        detail = LitellmErrorDetail(error.message, _type_of(error), error.param, str(error.http_status))
        return error.http_status, msgspec.json.encode(LitellmError(detail))


LITELLM = LitellmDialect()


def _type_of(error: MaitredError) -> str:
    match error:
        case Unauthenticated() | Forbidden():
            return "auth_error"
        case ResourceNotFound():
            return "not_found_error"
        case QuotaExceeded():
            return "budget_exceeded"
        case CallerError():
            return "bad_request_error"
        case _:
            return "internal_server_error"


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

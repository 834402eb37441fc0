"""Dialect of LiteLLM's administration: the format of its errors."""

import msgspec
from msgspec import Struct

from maitred.api.dialect import OpenAIDialect
from maitred.core.errors import CallerError, Forbidden, MaitredError, QuotaExceeded, ResourceNotFound, Unauthenticated


class LitellmErrorDetail(Struct, frozen=True):
    """What was wrong."""

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

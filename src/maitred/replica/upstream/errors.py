"""Errors of upstreams: maps a server's error response to the error that the caller gets.

The status decides whose fault it is, whatever the body looks like. A 4xx is the request's fault, and the caller gets
the server's message, because only the server knows the reason. The exceptions are 404, where the operator has
configured a wrong model, and the statuses in `_ACCOUNT_STATUSES` and `_BUSY_STATUSES`. An error about the account or
the credential is the operator's fault whatever its status: the caller can change nothing. Its message, like that of
any other error, is only logged, because it may reveal accounts or machines.
"""

import html
import logging
import math
import re
from collections.abc import Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from maitred.core.errors import (
    AccountRefused,
    ContentRefused,
    ContextLengthExceeded,
    InvalidRequest,
    MaitredError,
    ReplicaBusy,
    ReplicaLost,
    ReplicaNotInTime,
    ReplicaUnavailable,
)

log = logging.getLogger(__name__)

_MAX_MESSAGE_CHARACTERS = 500
_ACCOUNT_STATUSES = frozenset({401, 402, 403, 407})
"""Statuses of errors about the operator's account or credential."""
_BUSY_STATUSES = frozenset({408, 409, 425, 429, 503, 529})
_MAX_RETRY_AFTER_S = 86_400.0
"""Longest `Retry-After` that is believed."""
_CONTENT_POLICY_CODES = (
    *("content_filter", "content_policy_violation", "content_policy", "responsibleaipolicyviolation"),
    "image_content_policy_violation",
)
"""Error codes of OpenAI and Azure for a violation of the content policy."""
_CONTEXT_LENGTH_PHRASES = (
    *("context length", "context_length", "maximum context", "context window", "context size", "max_model_len"),
    # Anthropic; Amazon Bedrock; Google; OpenAI's newer models; xAI; Groq; TGI
    *("prompt is too long", "context limit", "input is too long", "maximum number of tokens", "input tokens exceed"),
    *("maximum prompt length", "reduce the length of the messages", "`inputs` tokens + `max_new_tokens`"),
)
_ACCOUNT_CODES = frozenset(
    {
        *("insufficientquota", "insufficientuserquota", "insufficientbalance", "insufficientcredits"),
        *("insufficientfunds", "exceededcurrentquotaerror", "creditsexhausted", "paymentrequired", "arrearage"),
        *("billingerror", "billingnotactive", "billinghardlimitreached", "spendlimitreached", "spendinglimitexceeded"),
        *("invalidapikey", "incorrectapikey", "apikeyinvalid", "apikeyexpired", "missingapikey", "invalidkey"),
        *("authenticationerror", "autherror", "unauthenticated", "unauthorized", "invalidauthentication"),
        *("invalidauthenticationerror", "accountdeactivated", "accountdisabled", "accountsuspended"),
        *("organizationrestricted", "organizationdisabled", "accessterminated", "accessterminatederror"),
    }
)
"""Error codes and types for a fault of the operator's account or credential, in lower case and letters alone."""
_ACCOUNT_PHRASES = re.compile(
    r"credit balance|has no money"
    r"|(?:insufficient|not enough|no|out of) (?:account )?(?:credits?|funds?|balance|quota)\b"
    r"|exceeded your current quota|plans? (?:&|and) billing|billing (?:details|account|hard limit|is not)"
    r"|payment required|hard limit has been reached|(?:spend|spending|api usage) limits?\b|in good standing"
    r"|(?:invalid|incorrect|expired|missing|unknown|wrong|revoked) (?:x-)?(?:api|access|secret)[ _-]?(?:key|token)"
    r"|(?:api|access|secret)[ _-]?(?:key|token) (?:is |was |has |has been |provided is )?"
    r"(?:not valid|not found|invalid|incorrect|expired|missing|revoked|disabled|deactivated|suspended)"
    r"|invalid (?:authentication|credentials?|bearer token)"
    r"|(?:account|organi[sz]ation|project|subscription)\b[^.]{0,60}\b(?:deactivated|disabled|suspended|terminated"
    r"|restricted|overdue|not active|inactive|in arrears)",
    re.IGNORECASE,
)
"""Words of a message about the operator's account or credential."""
_CREDENTIALS = re.compile(
    r"\b(?:sk|rk|pk|gsk|xai|key|org|proj|acct)[-_][\w*-]{6,}|\bAIza[\w-]{20,}|\bBearer\s+\S{6,}", re.IGNORECASE
)
"""Pattern of credentials and of names of accounts."""
_STATUSES_BY_TYPE = {
    **dict.fromkeys(("invalidrequesterror", "badrequesterror", "badrequest", "invalidargument"), 400),
    # What the Responses API says of an input in `response.failed`.
    **dict.fromkeys(("invalidprompt", "contextlengthexceeded", "imagecontentpolicyviolation"), 400),
    **dict.fromkeys(("invalidimage", "invalidimageformat", "invalidbase64image", "invalidimageurl"), 400),
    **dict.fromkeys(("imagetoolarge", "imagetoosmall", "imageparseerror", "unsupportedimagemediatype"), 400),
    **dict.fromkeys(("ratelimiterror", "ratelimitexceeded", "toomanyrequests", "resourceexhausted"), 429),
    **dict.fromkeys(("overloadederror", "overloaded", "serviceunavailable", "unavailable"), 503),
    **dict.fromkeys(("notfounderror", "modelnotfound"), 404),
    **dict.fromkeys(("permissionerror", "permissiondenied"), 403),
    "requesttoolarge": 413,
    "timeouterror": 504,
}
"""HTTP status by the type or code of an error, in lower case and letters alone, for errors without a status."""
_TAGS = re.compile(r"<(script|style|head)\b.*?</\1\s*>|<[^>]*>", re.DOTALL | re.IGNORECASE)


class ReportedError(msgspec.Struct, frozen=True):
    """Error that a server reported, parsed from any of the known formats."""

    message: str = ""
    code: str = ""
    param: str | None = None
    status: int | None = None
    """HTTP status in the error object, needed if the HTTP status of the response was 200."""
    kind: str = ""
    """Type of the error, if it has a code, too."""
    retry_after_s: float | None = None
    """Time that the error object asks to wait before a retry."""


def parse_error(fields: Any) -> ReportedError | None:  # noqa: ANN401 - whatever JSON can be
    """Returns the error in a decoded body or event; None if there is none.

    The formats are ``{"error": {"message", "type", "param", "code"}}`` (OpenAI and most others), ``{"error": text,
    "error_type"}`` (TGI), ``{"object": "error", "message", "type", "code"}`` (SGLang and vLLM before 0.9), ``{"type":
    "error", "error": …}`` (Anthropic), ``{"detail": …}`` (validation errors of FastAPI), ``{"base_resp":
    {"status_code", "status_msg"}}`` (MiniMax), and each of them in a list (Google).
    """
    match fields:
        case {"error": dict() as inner}:
            return _parse_error_object(inner)
        case {"error": str() as text} if text:
            return ReportedError(text, str(fields.get("error_type") or ""))
        case {"object": "error"}:
            return _parse_error_object(fields)
        case {"detail": detail}:
            return ReportedError(detail if isinstance(detail, str) else _to_json(detail))
        case {"error": inner} if inner:
            return ReportedError(str(inner))
        case {"type": "error"}:
            return _parse_error_object(fields)
        case {"base_resp": {"status_code": code, "status_msg": str() as text}} if code:
            return ReportedError(text, str(code))
        case {"errors": [first, *_]}:
            return parse_error(first) or (
                _parse_error_object(first) if isinstance(first, dict) else ReportedError(_to_text(first))
            )
        case [dict() as first, *_]:
            return parse_error(first)
    return None


def parse_error_in_place(fields: Any) -> ReportedError | None:  # noqa: ANN401 - whatever JSON can be
    """Returns the error in an object that came where an answer should be; None if it says no word of one.

    Without an answer beside it, a message at the top is that of an error (Alibaba, Zhipu and others).
    """
    error = parse_error(fields)
    if error is None and isinstance(fields, dict):
        error = _parse_error_object(fields)
    return error if error is not None and error.message else None


def parse_error_body(body: bytes) -> ReportedError:
    """Returns the error in the body of an error response, whatever the body is.

    JSON of an unknown form, text and HTML become the message: they are all that the server says.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        text = body.decode("utf-8", "replace")
        if "<" in text:
            text = html.unescape(_TAGS.sub(" ", text))
        return ReportedError(text)
    error = parse_error(fields)
    if error is None and isinstance(fields, dict):
        error = _parse_error_object(fields)
    if error is None or not (error.message or error.code):
        return ReportedError(_to_text(fields))
    return error


def _parse_error_object(fields: dict[str, object]) -> ReportedError:
    code, error_type, param = fields.get("code"), fields.get("type"), fields.get("param")
    if code is None:
        code = fields.get("error_code")
    status = _to_status(code)
    if status is None:
        status = _to_status(fields.get("status"))
    if status is not None or code is None:
        # Google has the status as `code`, its name as `status`, and the reason in the details.
        name = fields.get("status")
        error_type = error_type or (name if isinstance(name, str) and not name.isdigit() else None)
        code = _google_reason(fields) or error_type
        error_type = error_type if code is not error_type else None
    message = next(
        (
            text
            for name in ("message", "Message", "msg", "detail", "error_description", "error_msg", "title", "reason")
            if isinstance(text := fields.get(name), str) and text
        ),
        "",
    )
    return ReportedError(
        message,
        "" if code is None else str(code),
        param if isinstance(param, str) else None,
        status,
        kind="" if error_type is None else str(error_type),
        retry_after_s=_google_retry_delay(fields),
    )


def _to_status(code: object) -> int | None:
    """Returns the HTTP status in a code, which can be a number or its digits."""
    if isinstance(code, str) and len(code) == 3 and code.isascii() and code.isdigit():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code < 600 else None


def _google_details(fields: dict[str, object]) -> Sequence[dict[str, object]]:
    details = fields.get("details")
    return [detail for detail in details if isinstance(detail, dict)] if isinstance(details, list) else []


def _google_reason(fields: dict[str, object]) -> str | None:
    reasons = (detail.get("reason") for detail in _google_details(fields))
    return next((reason for reason in reasons if isinstance(reason, str)), None)


def _google_retry_delay(fields: dict[str, object]) -> float | None:
    for detail in _google_details(fields):
        if isinstance(delay := detail.get("retryDelay"), str) and delay.endswith("s"):
            return _to_seconds(delay, 1.0)
    return None


def _to_text(fields: object) -> str:
    return fields if isinstance(fields, str) else "" if fields in (None, {}, []) else _to_json(fields)


def _to_json(fields: object) -> str:
    return msgspec.json.encode(fields).decode()


def make_response_error(
    server: str,
    status: int | None,
    error: ReportedError | None,
    retry_after_s: float | None = None,
    request_body: bytes | None = None,
) -> MaitredError:
    """Makes the exception for a server's error response.

    Args:
        server: Name of the server, for log messages.
        status: HTTP status of the response; None: the error came where an answer should be, and says by itself what it
            is.
        error: Error in the body; None: the body has none.
        retry_after_s: Time that the server asks to wait before a retry; None: it names none.
        request_body: Body of the request. Words that stand there are the caller's, so they say nothing about the
            operator's account. None: not known, so no words of a message do.
    """
    error = error or ReportedError()
    message = _shown_text(error.message)
    if status is None:
        status = error.status or _status_of_type(error)
    if retry_after_s is None:
        retry_after_s = error.retry_after_s
    # An account without credit is told like a rate that is used up; only the latter names a time.
    is_rate = status in _BUSY_STATUSES and retry_after_s is not None
    if status in _ACCOUNT_STATUSES or (status >= 400 and _is_about_account(error, None if is_rate else request_body)):
        log.error(
            "The upstream %s refuses the account or the credential of this gateway with %d: %s. Until its operator "
            "mends that, it answers nothing.",
            server,
            status,
            message or "no reason given",
        )
        return AccountRefused()
    if 400 <= status < 500 and status != 404 and status not in _BUSY_STATUSES:
        return _request_error_class(error)(
            message or f"The server that runs this model refuses the request with the status {status}.",
            param=error.param,
        )
    log.warning("The upstream %s answered %d: %s", server, status, message or "no reason given")
    if status == 404 or 300 <= status < 400:
        return ReplicaUnavailable(
            "The server that runs this model does not know it, or is not where the configuration says. Its operator "
            "must look at the upstream's URL and model."
        )
    if status in _BUSY_STATUSES:
        return ReplicaBusy(
            "The server that runs this model takes no more requests now. Try again after the time in Retry-After.",
            retry_after_s=retry_after_s or 1.0,
        )
    return ReplicaLost()


def make_stream_error(
    server: str, error: ReportedError | None, request_body: bytes | None, *, has_begun: bool
) -> MaitredError:
    """Makes the exception for an error that came where an answer should be, or in its middle.

    After the first output it is the server's fault, because the request was valid; or that of the operator's account.
    """
    if not has_begun or (error is not None and _is_about_account(error, request_body)):
        return make_response_error(server, None, error, request_body=request_body)
    return make_replica_lost(f"it reported an error: {error.message[:200] if error is not None else ''}")


def _status_of_type(error: ReportedError) -> int:
    """Returns the HTTP status that an error has by its code or its type; 502 if these say nothing."""
    names = _names(error)
    if not _ACCOUNT_CODES.isdisjoint(names):
        return 402
    return next((_STATUSES_BY_TYPE[name] for name in names if name in _STATUSES_BY_TYPE), 502)


def _is_about_account(error: ReportedError, request_body: bytes | None) -> bool:
    """Returns whether an error is about the operator's account or credential, by its code or its message.

    Words that stand in the request are the caller's: a server may repeat them.
    """
    if not _ACCOUNT_CODES.isdisjoint(_names(error)):
        return True
    if request_body is None:
        return False
    sent = request_body.decode("utf-8", "replace").lower()
    return any(found.group().lower() not in sent for found in _ACCOUNT_PHRASES.finditer(error.message))


def _names(error: ReportedError) -> Sequence[str]:
    """Returns what an error is called: its code, its type, or its message, which may be nothing but a code."""
    return _letters(error.code), _letters(error.kind), _letters(error.message)


def _letters(code: str) -> str:
    """Returns a code in lower case and without what separates its words."""
    return "".join(filter(str.isalnum, code[:100])).lower()


def _shown_text(message: str) -> str:
    """Returns a server's words in one printable line, without what looks like a credential."""
    words = "".join(
        character if character.isprintable() else " " for character in message[: 4 * _MAX_MESSAGE_CHARACTERS]
    )
    return _CREDENTIALS.sub("[masked]", " ".join(words.split()))[:_MAX_MESSAGE_CHARACTERS]


def _request_error_class(error: ReportedError) -> type[InvalidRequest]:
    """Returns the exception class for an invalid request."""
    text = f"{error.code} {error.message}".lower()
    if any(phrase in text for phrase in _CONTEXT_LENGTH_PHRASES):
        return ContextLengthExceeded
    return ContentRefused if error.code.lower() in _CONTENT_POLICY_CODES else InvalidRequest


def parse_retry_after(
    retry_after_ms: str | None, retry_after: str | None, date: str | None, wall_s: float
) -> float | None:
    """Returns the retry time in seconds; None if no header has a valid one.

    Args:
        retry_after_ms: Header `retry-after-ms` of OpenAI and Azure.
        retry_after: Header `Retry-After`: seconds, a fraction of them, or a date (RFC 9110, section 10.2.3).
        date: Header `Date`: the time at which the server said so.
        wall_s: Wall time here, in place of a missing `Date`.
    """
    for text, unit_s in ((retry_after_ms, 0.001), (retry_after, 1.0)):
        if (seconds := _to_seconds(text or "", unit_s)) is not None:
            return seconds
    until_s = _to_wall_s(retry_after)
    if until_s is None:
        return None
    said_s = _to_wall_s(date)
    return min(max(0.0, until_s - (wall_s if said_s is None else said_s)), _MAX_RETRY_AFTER_S)


def _to_seconds(text: str, unit_s: float) -> float | None:
    # A proxy joins repeated headers with a comma, and some servers write the unit.
    number = text.partition(",")[0].strip().removesuffix("s")
    try:
        seconds = float(number) * unit_s
    except ValueError:
        return None
    return min(seconds, _MAX_RETRY_AFTER_S) if math.isfinite(seconds) and seconds >= 0 else None


def _to_wall_s(text: str | None) -> float | None:
    """Returns the wall time of an HTTP date in any of its three forms; None if the text is none."""
    try:
        moment = parsedate_to_datetime(text or "")
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def make_replica_lost(reason: str, error_class: type[ReplicaLost] = ReplicaLost) -> ReplicaLost:
    """Makes a ReplicaLost error; the reason is a note, which is logged but not shown to the caller."""
    failure = error_class()
    failure.add_note(reason)
    return failure


def make_timeout_error(reason: str) -> ReplicaNotInTime:
    """Makes the error for a server that has not begun to answer in time; the reason is a note, as in others."""
    failure = ReplicaNotInTime(retry_after_s=1.0)
    failure.add_note(reason)
    return failure


def failure_details(failure: BaseException) -> str:
    """Returns the notes of an exception, or else its message, for log messages."""
    notes: Sequence[str] = getattr(failure, "__notes__", ())
    return "; ".join(notes) or str(failure)

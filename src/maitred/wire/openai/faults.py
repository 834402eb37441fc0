"""Describes msgspec's decoding errors in the client's terms.

msgspec speaks of Python types and JSON pointers (``Expected `int | null`, got `str` - at `$.max_tokens` ``); a
client thinks in fields and JSON (``max_tokens must be an integer or null; got a string.``).
"""

import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding a body can raise."""

_NOT_UTF8 = "The body is not UTF-8. Encode it as UTF-8 JSON."
_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_LOCATION = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>.*?)`$", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<expected>[^`]+)`, got `(?P<got>[^`]+)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]+)`$")
_HALF_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(?P<half>\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F]|\\?u?[dD]?$)"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_SURROGATE_FAULT = re.compile(r"surrogate pair \(byte (?P<byte>\d+)\)|truncated")
_NEAR_BYTES = 64
"""Distance from the decoder's place within which the half lies; a whole body would take long to search."""
_MAX_SHOWN_CHARACTERS = 64


def describe_fault(error: Exception) -> InvalidRequest:
    """Converts an exception of decoding a body to the error to raise."""
    match error:
        case RecursionError():
            return InvalidRequest("The body is nested too deeply. Send a flatter one.")
        case UnicodeDecodeError():
            return InvalidRequest(_NOT_UTF8)
        case msgspec.ValidationError():
            return _describe_validation(str(error))
        case _:
            return InvalidRequest(f"The body is not valid JSON: {_reason(str(error))}. Send one JSON object.")


def describe_body_fault(error: Exception, body: bytes) -> InvalidRequest:
    """Converts an exception of decoding a body as `describe_fault` does, and looks into the body for its cause.

    Half of a surrogate pair is what is left of a character where a text was cut by units of UTF-16; the decoder takes
    one near the end of a body for a body that ends too early.
    """
    if isinstance(error, msgspec.DecodeError) and (fault := _SURROGATE_FAULT.search(str(error))):
        near = len(body) if fault["byte"] is None else int(fault["byte"])
        if found := _HALF_SURROGATE.search(body, max(0, near - _NEAR_BYTES), near + _NEAR_BYTES):
            return InvalidRequest(
                f"The body is not valid JSON: {found['half'].decode()} (byte {found.start('half')}) is half of a "
                "surrogate pair. Cut texts between characters."
            )
    if isinstance(error, msgspec.DecodeError) and body.startswith(BOM_UTF8):
        return InvalidRequest("The body begins with a byte order mark. Send it without.")
    if isinstance(error, msgspec.DecodeError) and (body.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or 0 in body[:2]):
        return InvalidRequest(_NOT_UTF8)
    return describe_fault(error)


def format_value(value: object) -> str:
    """Formats a value for a message, as short JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() if not -(2**63) <= value < 2**64:
            return "a number beyond 64 bits"
        case int():
            return str(value)
        case float():
            return f"{value:g}"
        case str():
            text = value if len(value) <= _MAX_SHOWN_CHARACTERS else value[:_MAX_SHOWN_CHARACTERS] + "…"
            return f"'{text}'"
        case list():
            return "a list"
        case _:
            return "an object"


def _describe_validation(text: str) -> InvalidRequest:
    path = ""
    if location := _LOCATION.search(text):
        path, text = location["path"], text[: location.start()]
        if location["key"]:
            return InvalidRequest(f"The keys of {path} have the wrong form.", param=path)
    subject = path or "The body"
    param = path or None
    if match := _MISSING.match(text):
        missing = f"{path}.{match['field']}" if path else match["field"]
        return InvalidRequest(f"{missing} is required.", param=missing)
    if match := _EXPECTED.match(text):
        expected = _alternatives(match["expected"])
        got = _TYPE_NAMES.get(match["got"], match["got"])
        return InvalidRequest(f"{subject} must be {expected}; got {got}.", param=param)
    if "out of range" in text:
        return InvalidRequest(f"{subject} is a number too large to represent. Send a smaller one.", param=param)
    return InvalidRequest(f"{subject} is invalid: {text}.", param=param)


def _alternatives(expected: str) -> str:
    """Writes ``int | str | null`` in words."""
    names: list[Any] = [_TYPE_NAMES.get(name, name) for name in expected.split(" | ")]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _reason(text: str) -> str:
    reason = text.removeprefix("JSON is malformed: ")
    return reason[:1].lower() + reason[1:]

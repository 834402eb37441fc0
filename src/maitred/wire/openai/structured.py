"""What a request says of the form of its answer, in the words of OpenAI's API and of vLLM's.

========================================  ===================================================
``response_format``                       ``{"type": "text"}``, ``json_object``, ``json_schema``
``structured_outputs``                    ``json``, ``regex``, ``choice``, ``grammar``, ``json_object``
``guided_json``, ``guided_regex``, ...    the same in the words of vLLM up to 0.11
========================================  ===================================================

These rules hold for models of our own. What another server makes of these fields is its own affair.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.core.grammar import Constraint
from maitred.wire.openai.faults import shown
from maitred.wire.openai.requests import ChatRequest, CompletionRequest

MAX_CHOICES = 4096
_GUIDED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Field -> what it is in `structured_outputs`."""
FIELDS = frozenset({"response_format", "structured_outputs", *_GUIDED})
"""All that can say it."""
_REMARKS = frozenset({"disable_any_whitespace", "whitespace_pattern", "backend", "_backend"})
"""In `structured_outputs`: how it is to be written. Nothing stands between the tokens of JSON here, unless a pattern
says what."""


def constraint_of(request: ChatRequest | CompletionRequest) -> Constraint | None:
    """What the answer has to look like; None: anything.

    Raises:
        InvalidRequest: Something is missing, mistyped or unknown, or two fields say it.
    """
    said = [
        constraint
        for field in ("response_format", "structured_outputs", *_GUIDED)
        if (value := getattr(request, field)) is not None and (constraint := _said_in(field, value)) is not None
    ]
    if len(said) > 1:
        raise InvalidRequest(f"{said[0].param} and {said[1].param} exclude each other. Send one.", param=said[1].param)
    return said[0] if said else None


def _said_in(field: str, value: Any) -> Constraint | None:  # noqa: ANN401 - whatever was sent
    match field:
        case "response_format":
            return _response_format(value)
        case "structured_outputs":
            return _structured_outputs(value)
        case _:
            return _FORMS[_GUIDED[field]](value, field)


def _response_format(value: Any) -> Constraint | None:  # noqa: ANN401
    _check(isinstance(value, dict), "response_format", "an object", value)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return Constraint("json_object", None, "response_format")
        case "json_schema":
            wanted = value.get("json_schema")
            _check(isinstance(wanted, dict), "response_format.json_schema", "an object with the schema", wanted)
            strict = wanted.get("strict")
            _check(
                strict is None or isinstance(strict, bool), "response_format.json_schema.strict", "a boolean", strict
            )
            schema = wanted.get("schema")
            return _json(schema, "response_format.json_schema.schema", strict=strict is True)
        case other:
            raise InvalidRequest(
                f"response_format.type must be text, json_object or json_schema; got {shown(other)}.",
                param="response_format.type",
            )


def _structured_outputs(value: Any) -> Constraint | None:  # noqa: ANN401
    _check(isinstance(value, dict), "structured_outputs", "an object", value)
    said = {name: content for name, content in value.items() if content is not None and name not in _REMARKS}
    if said.get("json_object") is False:
        del said["json_object"]
    if unknown := next((name for name in said if name not in _FORMS), None):
        raise InvalidRequest(
            f"structured_outputs.{unknown[:64]} is not supported. Send one of {', '.join(_FORMS)}.",
            param="structured_outputs",
        )
    if not said:
        return None
    if len(said) > 1:
        raise InvalidRequest(
            f"structured_outputs must hold one of {', '.join(_FORMS)}; got {len(said)}.", param="structured_outputs"
        )
    ((name, content),) = said.items()
    constraint = _FORMS[name](content, f"structured_outputs.{name}")
    whitespace = value.get("whitespace_pattern")
    _check(
        whitespace is None or isinstance(whitespace, str),
        *("structured_outputs.whitespace_pattern", "a string", whitespace),
    )
    return msgspec.structs.replace(constraint, whitespace=whitespace)


def _json(content: Any, param: str, *, strict: bool = True) -> Constraint:  # noqa: ANN401
    if isinstance(content, str):
        try:
            content = msgspec.json.decode(content)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{param} is a string, and not valid JSON: {error}.", param=param) from error
    _check(isinstance(content, dict | bool), param, "a JSON schema", content)
    return Constraint("json_schema", content, param, strict)


def _regex(content: Any, param: str) -> Constraint:  # noqa: ANN401
    _check(isinstance(content, str), param, "a string", content)
    return Constraint("regex", content, param)


def _choice(content: Any, param: str) -> Constraint:  # noqa: ANN401
    fits = isinstance(content, list) and all(isinstance(each, str) for each in content)
    _check(fits and 0 < len(content) <= MAX_CHOICES, param, f"a list of 1 to {MAX_CHOICES} strings", content)
    return Constraint("choice", content, param)


def _grammar(content: Any, param: str) -> Constraint:  # noqa: ANN401
    _check(isinstance(content, str), param, "a string", content)
    return Constraint("grammar", content, param)


def _json_object(content: Any, param: str) -> Constraint:  # noqa: ANN401
    _check(content is True, param, "true", content)
    return Constraint("json_object", None, param)


_FORMS: Mapping[str, Callable[[Any, str], Constraint]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}


def _check(fits: bool, param: str, what: str, value: object) -> None:
    if not fits:
        raise InvalidRequest(f"{param} must be {what}; got {shown(value)}.", param=param)

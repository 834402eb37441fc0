"""Parses the constraints on an answer's form, in the fields of OpenAI's API and of vLLM's.

========================================  ===================================================
``response_format``                       ``{"type": "text"}``, ``json_object``, ``json_schema``
``structured_outputs``                    ``json``, ``regex``, ``choice``, ``grammar``, ``json_object``
``guided_json``, ``guided_regex``, ...    the same in the fields of vLLM up to 0.11
========================================  ===================================================

These rules hold for models of this gateway's engines. Upstream servers interpret these fields themselves.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.core.grammar import Constraint
from maitred.wire.openai.faults import format_value
from maitred.wire.openai.requests import ChatRequest, CompletionRequest

MAX_CHOICES = 4096
_GUIDED_FIELDS: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Field -> its name in `structured_outputs`."""
CONSTRAINT_FIELDS = frozenset({"response_format", "structured_outputs", *_GUIDED_FIELDS})
"""Fields of a request that can constrain its answer."""
_FORMAT_OPTIONS = frozenset({"disable_any_whitespace", "whitespace_pattern", "backend", "_backend"})
"""Options of `structured_outputs` for how the answer is written.

No white space stands between the tokens of JSON here, unless a pattern allows it.
"""


def to_constraint(request: ChatRequest | CompletionRequest) -> Constraint | None:
    """Returns the constraint on the form of the answer; None: there is none.

    Raises:
        InvalidRequest: A field is incomplete, mistyped or unknown, or two fields exclude each other.
    """
    constraints = [
        constraint
        for field in ("response_format", "structured_outputs", *_GUIDED_FIELDS)
        if (value := getattr(request, field)) is not None and (constraint := _parse_field(field, value)) is not None
    ]
    if len(constraints) > 1:
        raise InvalidRequest(
            f"{constraints[0].param} and {constraints[1].param} exclude each other. Send one.",
            param=constraints[1].param,
        )
    return constraints[0] if constraints else None


def _parse_field(field: str, value: Any) -> Constraint | None:  # noqa: ANN401 - whatever was sent
    match field:
        case "response_format":
            return _parse_response_format(value)
        case "structured_outputs":
            return _parse_structured_outputs(value)
        case _:
            return _PARSERS[_GUIDED_FIELDS[field]](value, field)


def _parse_response_format(value: Any) -> Constraint | None:  # noqa: ANN401
    _check(isinstance(value, dict), "response_format", "an object", value)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return Constraint("json_object", None, "response_format")
        case "json_schema":
            json_schema = value.get("json_schema")
            _check(
                isinstance(json_schema, dict), "response_format.json_schema", "an object with the schema", json_schema
            )
            strict = json_schema.get("strict")
            _check(
                strict is None or isinstance(strict, bool), "response_format.json_schema.strict", "a boolean", strict
            )
            schema = json_schema.get("schema")
            return _json_constraint(schema, "response_format.json_schema.schema", strict=strict is True)
        case other:
            raise InvalidRequest(
                f"response_format.type must be text, json_object or json_schema; got {format_value(other)}.",
                param="response_format.type",
            )


def _parse_structured_outputs(value: Any) -> Constraint | None:  # noqa: ANN401
    _check(isinstance(value, dict), "structured_outputs", "an object", value)
    options = {name: content for name, content in value.items() if content is not None and name not in _FORMAT_OPTIONS}
    if options.get("json_object") is False:
        del options["json_object"]
    if unknown := next((name for name in options if name not in _PARSERS), None):
        raise InvalidRequest(
            f"structured_outputs.{unknown[:64]} is not supported. Send one of {', '.join(_PARSERS)}.",
            param="structured_outputs",
        )
    if not options:
        return None
    if len(options) > 1:
        raise InvalidRequest(
            f"structured_outputs must hold one of {', '.join(_PARSERS)}; got {len(options)}.",
            param="structured_outputs",
        )
    ((name, content),) = options.items()
    constraint = _PARSERS[name](content, f"structured_outputs.{name}")
    whitespace = value.get("whitespace_pattern")
    _check(
        whitespace is None or isinstance(whitespace, str),
        *("structured_outputs.whitespace_pattern", "a string", whitespace),
    )
    return msgspec.structs.replace(constraint, whitespace=whitespace)


def _json_constraint(content: Any, param: str, *, strict: bool = True) -> Constraint:  # noqa: ANN401
    if isinstance(content, str):
        try:
            content = msgspec.json.decode(content)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{param} is a string, and not valid JSON: {error}.", param=param) from error
    _check(isinstance(content, dict | bool), param, "a JSON schema", content)
    return Constraint("json_schema", content, param, strict)


def _regex_constraint(content: Any, param: str) -> Constraint:  # noqa: ANN401
    _check(isinstance(content, str), param, "a string", content)
    return Constraint("regex", content, param)


def _choice_constraint(content: Any, param: str) -> Constraint:  # noqa: ANN401
    fits = isinstance(content, list) and all(isinstance(choice, str) for choice in content)
    _check(fits and 0 < len(content) <= MAX_CHOICES, param, f"a list of 1 to {MAX_CHOICES} strings", content)
    return Constraint("choice", content, param)


def _grammar_constraint(content: Any, param: str) -> Constraint:  # noqa: ANN401
    _check(isinstance(content, str), param, "a string", content)
    return Constraint("grammar", content, param)


def _json_object_constraint(content: Any, param: str) -> Constraint:  # noqa: ANN401
    _check(content is True, param, "true", content)
    return Constraint("json_object", None, param)


_PARSERS: Mapping[str, Callable[[Any, str], Constraint]] = {
    "json": _json_constraint,
    "regex": _regex_constraint,
    "choice": _choice_constraint,
    "grammar": _grammar_constraint,
    "json_object": _json_object_constraint,
}


def _check(fits: bool, param: str, expected: str, value: object) -> None:
    if not fits:
        raise InvalidRequest(f"{param} must be {expected}; got {format_value(value)}.", param=param)

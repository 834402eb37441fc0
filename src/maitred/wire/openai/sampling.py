"""Converts OpenAI's fields for sampling, structured output and tools to the engine's parameters.

Constraints on the form of an answer come in the fields of OpenAI's API and of vLLM:

========================================  ===================================================
``response_format``                       ``{"type": "text"}``, ``json_object``, ``json_schema``
``response_format.schema``                a schema beside ``json_object``, as llama.cpp and Together have it
``structured_outputs``                    ``json``, ``regex``, ``choice``, ``grammar``, ``json_object``
``guided_json``, ``guided_regex``, ...    the same in the fields of vLLM up to 0.11
========================================  ===================================================

These rules hold for models of this gateway's engines. Upstream servers interpret these fields themselves.

The tools are parsed here and not in the decoder, because a request for another server may declare tools that only that
server knows.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.core.grammar import Constraint
from maitred.core.request import SamplingParams
from maitred.core.tools import Tool, ToolRules
from maitred.wire.openai.faults import format_value
from maitred.wire.openai.requests import ChatRequest, CompletionRequest, TokenizeRequest

_SAME_FIELDS = frozenset(
    {
        *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("min_tokens", "ignore_eos", "n", "prompt_logprobs"),
    }
)
"""Fields that have the same name, meaning and default in the request and in the parameters."""
_SAMPLING_FIELDS = _SAME_FIELDS | {"top_k", "logit_bias", "logprobs", "stop_token_ids"}
WHOLE_VOCABULARY = -1
"""Value of `top_logprobs` and `prompt_logprobs` that asks for all tokens, as in vLLM's API."""
MAX_TOP_LOGPROBS = 20
"""Most tokens at each position, beside the one that stands there."""
_DEFAULT_PARAMS = SamplingParams(0, 0)
"""Parameters of requests that set no sampling field; token limit and seed are set later."""


def to_sampling_params(request: ChatRequest | CompletionRequest, *, max_tokens: int, seed: int) -> SamplingParams:
    """Builds the sampling parameters of a request.

    Args:
        request: A decoded request.
        max_tokens: Largest number of output tokens, after the context window was applied.
        seed: Seed of the request, or a seed that was drawn for it.
    """
    sent = request.sent
    if _SAMPLING_FIELDS.isdisjoint(sent):
        return _DEFAULT_PARAMS if max_tokens == seed == 0 else SamplingParams(max_tokens, seed)
    same_fields: dict[str, Any] = {}
    for field in _SAME_FIELDS.intersection(sent):
        # Converted: a client may write a whole number where the parameters have a fraction.
        same_fields[field] = getattr(request, field)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        # Clients write 0 or -1 for "all" .
        top_k=0 if request.top_k is None or request.top_k < 0 else request.top_k,
        logit_bias={int(token): bias for token, bias in request.logit_bias.items()} if request.logit_bias else {},
        top_logprobs=None if request.logprobs is None else _top_logprobs(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        **same_fields,
    )


TOKEN_FIELDS = frozenset(
    {
        *("allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens", "return_token_ids"),
        *("return_tokens_as_token_ids", "truncate_prompt_tokens", "truncation_side"),
    }
)
"""Fields about the tokens of prompt and output, by the same names in the request and in `InferenceRequest`."""


def token_fields(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """Returns the fields of `InferenceRequest` about the tokens of prompt and output that the request sets."""
    fields: dict[str, Any] = {field: getattr(request, field) for field in TOKEN_FIELDS.intersection(request.sent)}
    for name in ("allowed_token_ids", "bad_words"):
        if name in fields:
            fields[name] = tuple(dict.fromkeys(fields[name]))
    return fields


def unset_fields(request: ChatRequest | CompletionRequest, fields: frozenset[str]) -> frozenset[str]:
    """Returns the given fields that the request does not set."""
    return fields if fields.isdisjoint(request.sent) else fields.difference(request.sent)


def _top_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None


MAX_CHOICES = 4096
_GUIDED_FIELDS: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Map from each field to its name in `structured_outputs`."""
CONSTRAINT_FIELDS = frozenset({"response_format", "structured_outputs", *_GUIDED_FIELDS})
"""Fields of a request that can constrain its answer."""
_FORMAT_OPTIONS = frozenset({"disable_any_whitespace", "whitespace_pattern", "backend", "_backend"})
"""Options of `structured_outputs` that control how the answer is written.

The JSON has no white space between tokens, unless a pattern allows it.
"""


def to_constraint(request: ChatRequest | CompletionRequest) -> Constraint | None:
    """Returns the constraint on the form of the answer, or None if there is none.

    Raises:
        InvalidRequest: A field is incomplete, mistyped or unknown, or two fields exclude each other.
    """
    constraints = [
        constraint
        for field in ("response_format", "structured_outputs", *_GUIDED_FIELDS)
        if (value := getattr(request, field)) is not None and (constraint := _parse_field(field, value)) is not None
    ]
    if not constraints:
        return None
    first = constraints[0]
    for other in constraints[1:]:
        if not _say_the_same(first, other):
            raise InvalidRequest(f"{first.param} and {other.param} exclude each other. Send one.", param=other.param)
        if other.strict:
            first = other
    return first


def _say_the_same(one: Constraint, other: Constraint) -> bool:
    """Returns whether two constraints hold an answer to the same, but for how strictly they do."""
    # Compared as JSON, in which 1 is not true, and members have no order.
    said = [
        msgspec.json.encode((constraint.form, constraint.content, constraint.whitespace), order="deterministic")
        for constraint in (one, other)
    ]
    return said[0] == said[1]


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
            if value.get("schema") is None:
                return Constraint("json_object", None, "response_format")
            return _json_constraint(value["schema"], "response_format.schema", strict=False)
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


TOOL_FIELDS = frozenset({"tools", "tool_choice", "functions", "function_call"})
"""The fields of a request that this module reads."""
MAX_TOOLS = 128
"""Largest number of tools in a request, as in OpenAI's API."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def to_tool_rules(request: ChatRequest) -> ToolRules | None:
    """Returns the tools that the model may or must call, or None if the request has no tools.

    Raises:
        InvalidRequest: A tool or the choice among them is malformed; `param` says where.
    """
    legacy = not request.tools and bool(request.functions)
    field = "functions" if legacy else "tools"
    tools = tuple(_parse_tools(request.functions if legacy else request.tools, field, wrapped=not legacy))
    if request.functions and not legacy:
        older = tuple(_parse_tools(request.functions, "functions", wrapped=False))
        _check_equal("tools", [tool.declared for tool in tools], "functions", [tool.declared for tool in older])
    choice_field = "function_call" if legacy else "tool_choice"
    choice = request.function_call if legacy else request.tool_choice
    other_field = "tool_choice" if legacy else "function_call"
    if (other := request.tool_choice if legacy else request.function_call) is not None:
        # Each of the two forms says a function in its own way.
        other = _unwrap_choice(other) if legacy else _wrap_choice(other)
        choice = other if choice is None else choice
        _check_equal(choice_field, choice, other_field, other)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(f"{choice_field} needs tools. Send tools, or remove it.", param=choice_field)
        return None
    _check_names(tools, field)
    # The older fields allow only one call in each answer.
    parallel = request.parallel_tool_calls is not False and not legacy
    match choice:
        case None | "auto":
            return ToolRules(tools, parallel=parallel)
        case "none":
            return ToolRules(tools, may=False)
        case "required" if not legacy:
            return ToolRules(tools, must=True, parallel=parallel)
        case {"type": "function", "function": {"name": str() as name}} | {"name": str() as name} if legacy is (
            "name" in choice
        ):
            if name not in {tool.name for tool in tools}:
                raise InvalidRequest(
                    f"{choice_field} names {format_value(name)}, which is none of {field}. Declare it there.",
                    param=choice_field,
                )
            return ToolRules(tools, must=True, only=name, parallel=False)
        case _:
            known = "none, auto" if legacy else "none, auto, required"
            raise InvalidRequest(
                f"{choice_field} must be {known} or name a function; got {format_value(choice)}.", param=choice_field
            )


def _check_equal(field: str, value: object, other_field: str, other: object) -> None:
    """Raises InvalidRequest for two fields that say different things; the same, said twice, is one."""
    if msgspec.json.encode(value, order="deterministic") != msgspec.json.encode(other, order="deterministic"):
        raise InvalidRequest(f"{field} and {other_field} differ. Send only one.", param=other_field)


def _wrap_choice(choice: Any) -> Any:  # noqa: ANN401 - as it was sent
    return {"type": "function", "function": choice} if isinstance(choice, dict) else choice


def _unwrap_choice(choice: Any) -> Any:  # noqa: ANN401 - as it was sent
    return choice.get("function", choice) if isinstance(choice, dict) else choice


def declared_tools(request: TokenizeRequest) -> list[dict[str, Any]]:
    """Returns the tools that the template writes into a conversation that is to be tokenised.

    Raises:
        InvalidRequest: A tool is malformed.
    """
    return [tool.declared for tool in _parse_tools(request.tools, "tools", wrapped=True)]


def _parse_tools(declared: Any, field: str, *, wrapped: bool) -> Iterable[Tool]:  # noqa: ANN401 - as it was sent
    if declared is None:
        return
    if not isinstance(declared, list):
        raise InvalidRequest(f"{field} must be a list; got {format_value(declared)}.", param=field)
    if len(declared) > MAX_TOOLS:
        raise InvalidRequest(f"{field} must hold at most {MAX_TOOLS}; got {len(declared)}.", param=field)
    for position, entry in enumerate(declared):
        path = f"{field}[{position}]"
        if not wrapped:
            yield _parse_tool(path, entry)
            continue
        match entry:
            case {"type": "function", "function": dict() as function}:
                yield _parse_tool(f"{path}.function", function)
            case {"type": str() as kind} if kind != "function":
                raise InvalidRequest(
                    f"{path} is of the type {format_value(kind)}. This model calls tools of the type function only.",
                    param=f"{path}.type",
                )
            case _:
                raise InvalidRequest(f"{path} must be an object with type and function.", param=path)


def _parse_tool(path: str, function: object) -> Tool:
    match function:
        case {"name": str() as name, **rest}:
            pass
        case _:
            raise InvalidRequest(f"{path}.name is required.", param=f"{path}.name")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.name must be 1 to 128 letters, digits, _, - or .; got {format_value(name)}.", param=f"{path}.name"
        )
    parameters = rest.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(
            f"{path}.parameters must be a JSON Schema, an object; got {format_value(parameters)}.",
            param=f"{path}.parameters",
        )
    if parameters and parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"{path}.parameters must be the schema of an object: its type must be 'object'.",
            param=f"{path}.parameters",
        )
    # Templates write the fields of a function in this order: the name is first, and the parameters are always present.
    definition = {"name": name, **rest, "parameters": parameters or _NO_PARAMETERS}
    return Tool(
        name,
        f"{path}.parameters",
        {"type": "function", "function": definition},
        parameters or None,
        strict=rest.get("strict") is True,
    )


_NO_PARAMETERS = {"type": "object", "properties": {}}


def _check_names(tools: Iterable[Tool], field: str) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise InvalidRequest(
                f"{field} declares {format_value(tool.name)} twice. Each needs a name of its own.", param=field
            )
        seen.add(tool.name)

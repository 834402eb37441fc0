"""What a well-typed request must further obey, checked field by field; the first fault is raised.

A message names the field, the rule and the value, so that a caller can mend the request without a manual. Rules that
need the model (token ids within the vocabulary, the context window, its largest `n`) are not here.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.wire.openai.faults import shown
from maitred.wire.openai.requests import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    GenerationRequest,
    Message,
    TokenizeRequest,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
"""Each piece of text is compared with the stop strings, so their length costs time."""
MAX_TOKEN_ID = 2**31 - 1
MAX_LOGIT_BIAS = 100.0


class Range(msgspec.Struct, frozen=True):
    """The values that a number may take."""

    low: float
    high: float
    excludes_low: bool = False

    def check(self, field: str, value: float | None) -> None:
        """Raises InvalidRequest if the value lies outside; None is no value."""
        if value is None:
            return
        if value < self.low or (self.excludes_low and value == self.low):
            bound = f"greater than {self.low:g}" if self.excludes_low else f"at least {self.low:g}"
            raise InvalidRequest(f"{field} must be {bound}; got {shown(value)}.", param=field)
        if value > self.high:
            high = int(self.high) if self.high == int(self.high) else self.high
            raise InvalidRequest(f"{field} must be at most {high}; got {shown(value)}.", param=field)


_RANGES: Mapping[str, Range] = {
    "max_tokens": Range(1, MAX_TOKEN_ID),
    "max_completion_tokens": Range(1, MAX_TOKEN_ID),
    "min_tokens": Range(0, MAX_TOKEN_ID),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, excludes_low=True),
    "top_k": Range(-1, MAX_TOKEN_ID),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 100),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "seed": Range(-(2**63), 2**63 - 1),
    "n": Range(1, MAX_CHOICES),
    "top_logprobs": Range(0, 20),
}
_COMPLETION_LOGPROBS = Range(0, 5)

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "store": (False,),
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
"""Field -> the values that ask for nothing (beside null)."""


def check_chat(request: ChatRequest) -> None:
    """Raises InvalidRequest for the first rule that a chat request breaks."""
    _check_generation(request)
    check_messages(request.messages)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest("max_tokens and max_completion_tokens differ. Send only one.", param="max_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest(
            "top_logprobs needs logprobs to be true. Set it, or remove top_logprobs.", param="top_logprobs"
        )


def check_completion(request: CompletionRequest) -> None:
    """Raises InvalidRequest for the first rule that a completion request breaks."""
    _check_generation(request)
    _check_prompt(request.prompt)
    _COMPLETION_LOGPROBS.check("logprobs", request.logprobs)
    if request.echo and request.logprobs is not None:
        raise InvalidRequest(
            "logprobs of an echoed prompt are not supported by this server yet. Remove echo or logprobs.", param="echo"
        )
    if request.best_of is not None and request.best_of != request.choices:
        raise InvalidRequest(
            f"best_of must equal n ({request.choices}); got {shown(request.best_of)}. Remove it.", param="best_of"
        )


def check_tokenize(request: TokenizeRequest) -> None:
    """Raises InvalidRequest unless there is exactly one thing to tokenise."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Send either prompt or messages.", param="prompt")
    if request.messages is not None:
        check_messages(request.messages)
    if request.add_generation_prompt is False:
        raise InvalidRequest(
            "A conversation is tokenised as for an answer. Remove add_generation_prompt, or set it to true.",
            param="add_generation_prompt",
        )


def check_detokenize(request: DetokenizeRequest) -> None:
    """Raises InvalidRequest if something is no token id."""
    _check_token_ids("tokens", request.tokens)


def check_messages(messages: Sequence[Message]) -> None:
    """Raises InvalidRequest for the first message that a text model cannot read."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    for position, message in enumerate(messages):
        _check_message(f"messages[{position}]", message)


def check_known(fields: object, kind: type[msgspec.Struct], path: str = "") -> None:
    """Raises InvalidRequest for the first field that the struct does not have."""
    if not isinstance(fields, dict):
        return
    for name in fields:
        if name not in kind.__struct_fields__:
            close = get_close_matches(name[:64], kind.__struct_fields__, n=1)
            remedy = f"Did you mean {path}{close[0]}?" if close else "Remove it."
            raise InvalidRequest(
                f"{path}{shown(name)[1:-1]} is not a field of this request. {remedy}", param=f"{path}{name[:128]}"
            )


def _check_generation(request: GenerationRequest) -> None:
    if not request.model:
        raise InvalidRequest("model must name a model; got an empty string.", param="model")
    for field, harmless in _UNSUPPORTED.items():
        value = getattr(request, field, None)
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{field} is not supported by this server yet. Remove it.", param=field)
    for field, allowed in _RANGES.items():
        allowed.check(field, getattr(request, field, None))
    _check_stops(request.stop)
    _check_token_ids("stop_token_ids", request.stop_token_ids or ())
    for key, bias in (request.logit_bias or {}).items():
        _check_bias(key, bias)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options is only for streams. Set stream to true, or remove it.", param="stream_options"
        )


def _check_message(path: str, message: Message) -> None:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{path}.role must be one of {', '.join(ROLES)}; got {shown(message.role)}.", param=f"{path}.role"
        )
    match message.content:
        case None if message.role == "assistant" and (message.tool_calls or message.refusal):
            pass
        case None:
            raise InvalidRequest(
                f"{path}.content must be a string or a list of text parts; got null.", param=f"{path}.content"
            )
        case []:
            raise InvalidRequest(f"{path}.content must hold at least one part.", param=f"{path}.content")
        case [*parts]:
            for position, part in enumerate(parts):
                _check_part(f"{path}.content[{position}]", part)
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(
            f"{path}.tool_call_id is required for the role tool: it names the call that this answers.",
            param=f"{path}.tool_call_id",
        )


def _check_part(path: str, part: ContentPart) -> None:
    if part.type != "text":
        raise InvalidRequest(
            f"{path} has the type {shown(part.type)}, but this model reads text only. Send parts of the type 'text'.",
            param=path,
        )
    if part.text is None:
        raise InvalidRequest(f"{path}.text is required.", param=f"{path}.text")


def _check_prompt(prompt: str | Sequence[str | int | Sequence[int]]) -> None:
    if isinstance(prompt, str):
        return
    if not prompt:
        raise InvalidRequest("prompt must not be an empty list.", param="prompt")
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise InvalidRequest("prompt must hold only texts, only token ids, or only lists of token ids.", param="prompt")
    if kinds == {int}:
        _check_token_ids("prompt", [token for token in prompt if isinstance(token, int)])
    elif kinds == {list}:
        for position, tokens in enumerate(prompt):
            if isinstance(tokens, list):
                if not tokens:
                    raise InvalidRequest(
                        f"prompt[{position}] must hold at least one token id.", param=f"prompt[{position}]"
                    )
                _check_token_ids(f"prompt[{position}]", tokens)


def _check_token_ids(path: str, tokens: Sequence[int]) -> None:
    if tokens and (min(tokens) < 0 or max(tokens) > MAX_TOKEN_ID):
        wrong = next(token for token in tokens if not 0 <= token <= MAX_TOKEN_ID)
        raise InvalidRequest(f"{path} must hold token ids; got {shown(wrong)}.", param=path)


def _check_stops(stop: str | Sequence[str] | None) -> None:
    if stop is None:
        return
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop must hold at most {MAX_STOPS} strings; got {len(stops)}.", param="stop")
    if "" in stops:
        raise InvalidRequest("stop must not be an empty string. Remove it.", param="stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"A stop string must have at most {MAX_STOP_CHARACTERS} characters; got {longest}.", param="stop"
        )


def _check_bias(key: str, bias: float) -> None:
    # Ten digits hold every token id, and int() of a long text is slow.
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
        raise InvalidRequest(f"The keys of logit_bias must be token ids; got {shown(key)}.", param="logit_bias")
    Range(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS).check(f"logit_bias.{key}", bias)

"""What an OpenAI client sends, field by field.

These structs hold what was sent, `None` where the client sent nothing or null; `maitred.wire.openai.decode` makes
them from bytes and has checked them, so a struct that came from there keeps every rule in `maitred.wire.openai.rules`.
Names and meanings are OpenAI's; the fields that OpenAI does not have (`top_k`, `min_p`, ...) are those that clients
know from other open servers.

Some fields are here only to be refused: asking for tools and getting an answer without them would be a broken
promise, while a hint such as `reasoning_effort` may go unheard.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, cast

import msgspec

from maitred.core.flow import PriorityClass

SERVICE_TIERS: Mapping[str, PriorityClass] = {
    "auto": PriorityClass.STANDARD,
    "default": PriorityClass.STANDARD,
    "scale": PriorityClass.STANDARD,
    "priority": PriorityClass.INTERACTIVE,
    "flex": PriorityClass.BATCH,
}
"""What OpenAI's names mean here. `scale` is capacity that was bought beforehand; here, a tenant's weight is that."""
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that names none, as in OpenAI's API."""


def each_of(prompts: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One text, several, one list of token ids, or several: as a list of texts or lists of token ids."""
    match prompts:
        case str() as text:
            return [text]
        case [int(), *_] as tokens:
            return [cast("list[int]", tokens)]
        case several:
            return cast("list[str | list[int]]", several)


class FunctionCall(msgspec.Struct, frozen=True):
    """The function that an assistant message called, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call in an assistant message of the history."""

    id: str
    function: FunctionCall
    type: str = "function"


class ImageUrl(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a picture is, or the picture itself as a ``data:`` URL."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """One piece of a message. Only `text` parts pass the rules."""

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    """What was a call before there were `tool_calls`; its result is the next message, of the role ``function``."""
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def text(self) -> str:
        """The content as one string; parts are separate lines, as chat templates of text models expect."""
        if isinstance(self.content, list):
            return "\n".join(part.text or "" for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it: plain text, and the arguments of tool calls as objects."""
        content = self.content
        fields: dict[str, Any] = {"role": self.role, "content": content if content.__class__ is str else self.text()}
        if self.name is not None:
            fields["name"] = self.name
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        calls = [] if self.tool_calls is None else [*self.tool_calls]
        if self.function_call is not None:
            calls.append(ToolCall(_id_of(self.function_call.name), self.function_call))
        if self.role == "function":
            fields |= {"role": "tool", "tool_call_id": _id_of(self.name or "")}
        if calls:
            fields["tool_calls"] = [_call_for_template(call) for call in calls]
        if thought := self.reasoning_content or self.reasoning:
            fields["reasoning_content"] = thought
        return fields


def _id_of(function: str) -> str:
    """Calls of the older kind have no ids; templates want some."""
    return f"call_{function}"


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.function.arguments.strip() or "{}"
    # A model wrote them: what is not JSON is shown to it as it was.
    with suppress(msgspec.DecodeError, RecursionError):
        arguments = msgspec.json.decode(arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


class StreamOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """What chat and text completions have in common."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    service_tier: str | None = None
    user: str | None = None
    metadata: Any = None

    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None

    @cached_property
    def sent(self) -> Mapping[str, Any]:
        """What was sent, as plain JSON values in the order above: nothing that was left out, and no null.

        Rules and conversions go by these few, where the structs have some fifty fields.
        """
        sent: dict[str, Any] = msgspec.to_builtins(self)
        return sent

    @property
    def choices(self) -> int:
        """`n`, or the 1 it defaults to."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, however they were written."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def streams(self) -> bool:
        """Whether the answer goes out as it comes."""
        return self.stream is True

    @property
    def asked_priority(self) -> int | None:
        """From 1 to 10, as a number or by the name of a service tier; None: the body does not say."""
        if self.priority is None and self.service_tier is not None:
            return SERVICE_TIERS[self.service_tier].priority
        return self.priority

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: Any = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    store: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """Most output tokens; None: as many as the context window leaves."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_param(self) -> str:
        """Which field the limit came from, for messages about it."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates know them."""
        return [message.for_template() for message in self.messages]

    def template_arguments(self) -> dict[str, Any]:
        """What a chat template is told beside the conversation; those that do not know a name pass over it."""
        told: dict[str, Any] = {}
        if self.enable_thinking is not None:
            told["enable_thinking"] = self.enable_thinking
        if self.reasoning_effort is not None:
            told["reasoning_effort"] = self.reasoning_effort
        return told | (self.chat_template_kwargs or {})


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    """One text, several, one list of token ids, or several."""
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    suffix: str | None = None

    @property
    def token_limit(self) -> int:
        """Most output tokens."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def token_limit_param(self) -> str:
        """Which field the limit came from, for messages about it."""
        return "max_tokens"

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one, however they were written."""
        return each_of(self.prompt)


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/embeddings`."""

    model: str
    input: str | list[str | int | list[int]]
    """One text, several, one list of token ids, or several."""
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    priority: int | None = None

    def inputs(self) -> list[str | list[int]]:
        """The inputs, one by one, however they were written."""
        return each_of(self.input)

    @property
    def as_base64(self) -> bool:
        """Whether vectors are wanted as base64 of their bytes; else as lists of numbers."""
        return self.encoding_format == "base64"


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: a text, or a conversation, as the model would get it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def adds_special_tokens(self) -> bool:
        """As asked; by default only for a text, since a chat template writes its own."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates know them."""
        return [message.for_template() for message in self.messages or ()]


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None

"""Requests of OpenAI clients, field by field.

These structs have the fields as they were sent, and `None` for fields that were omitted or null.
`maitred.wire.openai.decode` makes and checks the structs, so a struct from there follows all rules of that module.
Names and meanings are OpenAI's; the fields that OpenAI does not have (`top_k`, `min_p`, ...) are those that clients
know from other open servers.

Some fields exist only to be rejected: a client that sends tools would fail on an answer without tools, while a hint
such as `reasoning_effort` can be ignored.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from maitred.core.flow import PriorityClass

SERVICE_TIERS: Mapping[str, PriorityClass] = {
    "auto": PriorityClass.STANDARD,
    "default": PriorityClass.STANDARD,
    "scale": PriorityClass.STANDARD,
    "priority": PriorityClass.INTERACTIVE,
    "flex": PriorityClass.BATCH,
}
"""Map from OpenAI's service tiers to priority classes.

In OpenAI's API, `scale` means capacity that was bought in advance; here the weight of a tenant has this purpose.
"""
DEFAULT_COMPLETION_TOKENS = 16
"""Default `max_tokens` of a text completion, as in OpenAI's API."""


def split_prompts(prompts: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Splits prompts of any form into a list of texts or of lists of token ids."""
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


class CustomCall(msgspec.Struct, frozen=True):
    """The custom tool that an assistant message called, and its input as text."""

    name: str
    input: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call in an assistant message of the history: of a function, or of a tool whose input is a text."""

    id: str
    function: FunctionCall | None = None
    type: str = "function"
    custom: CustomCall | UnsetType = UNSET
    extra_content: Any = UNSET
    """Members that the server sent with the call, such as Google's signatures."""


def failed_result(text: str) -> str:
    """Returns the result of a failed tool call as text that says so, for models that know results only as text."""
    if not text.strip():
        return "Error: the tool call failed."
    return text if text.lstrip()[:5].lower() == "error" else f"Error: {text}"


class ImageUrl(msgspec.Struct, frozen=True, omit_defaults=True):
    """Address of an image, or the image itself as a ``data:`` URL."""

    url: str
    detail: str | None = None


class FilePart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file in a message, as a ``data:`` URL."""

    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None


class ContentPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """One part of a message: a text, or an image, a sound or a file, which only servers of others read."""

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None
    file: FilePart | None = None
    input_audio: dict[str, Any] | None = None
    video_url: dict[str, Any] | None = None
    audio_url: dict[str, Any] | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    """Function call in the older form, before `tool_calls`; the next message has its result.

    The next message has the role ``function``.
    """
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking_blocks: list[dict[str, Any]] | None = None
    """Signed blocks of the reasoning, as they stood in the answer; other models than the one that wrote them skip them.
    """
    content_blocks: list[dict[str, Any]] | None = None
    """Blocks of an answer of the Messages API, as they stood in it; only servers of that API read them."""
    is_error: bool | None = None
    """Whether the tool call failed whose result this is; Messages has this field, and OpenAI's API does not."""

    def text(self) -> str:
        """Returns the content as one string, with each part on its own line.

        Chat templates of text models expect this form.
        """
        if isinstance(self.content, list):
            return "\n".join(part.text or "" for part in self.content if part.type == "text")
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form of chat templates.

        The content is plain text, or null in a message that only calls tools; the arguments of its calls are text.
        """
        content: str | list[ContentPart] | None = self.content
        if content.__class__ is not str and (content is not None or not (self.tool_calls or self.function_call)):
            content = self.text()
        fields: dict[str, Any] = {"role": self.role, "content": content}
        if self.name is not None:
            fields["name"] = self.name
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
            if self.is_error:
                fields["content"] = failed_result(fields["content"])
        calls = [] if self.tool_calls is None else [*self.tool_calls]
        if self.function_call is not None:
            calls.append(ToolCall(_function_call_id(self.function_call.name), self.function_call))
        if self.role == "function":
            fields |= {"role": "tool", "tool_call_id": _function_call_id(self.name or "")}
        if calls:
            fields["tool_calls"] = [_call_for_template(call) for call in calls]
        if reasoning := self.reasoning_content or self.reasoning:
            fields["reasoning_content"] = reasoning
        return fields


def _function_call_id(function: str) -> str:
    """Makes an id for a function call, because templates need one and older calls have none."""
    return f"call_{function}"


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    if call.function is None:
        # Templates have no place for a text: it is shown as the only argument.
        custom = call.custom or CustomCall("", "")
        name, arguments = custom.name, msgspec.json.encode({"input": custom.input}).decode()
    else:
        name, arguments = call.function.name, call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


class StreamOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options for the stream of an answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether every chunk, and not only the last, has the usage so far; needs `include_usage`."""
    include_obfuscation: bool | None = None


class CacheFields(msgspec.Struct, frozen=True, omit_defaults=True, rename="kebab"):
    """Wishes of a body about answers from a cache, in the names that clients know from LiteLLM."""

    no_cache: bool | None = None
    no_store: bool | None = None
    ttl: float | None = None
    """Longest time in seconds for which the answer is kept."""
    s_maxage: float | None = None
    """Largest age in seconds of an answer from the cache."""
    namespace: str | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """Common fields of chat and text completions."""

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
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """No effect here: no text between two tokens is added or left out."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    service_tier: str | None = None
    user: str | None = None
    metadata: Any = None
    cache: CacheFields | None = None

    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None

    @cached_property
    def sent(self) -> Mapping[str, Any]:
        """Sent fields as plain JSON values, without omitted and null fields; also those that the structs do not have.

        Rules and conversions read only these few fields, while the structs have about fifty fields. The decoder sets
        it to what the client wrote; for a request that was made here, it follows from the struct.
        """
        sent: dict[str, Any] = msgspec.to_builtins(self)
        return sent

    @property
    def choices(self) -> int:
        """The number of choices: `n`, or 1 by default."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple, for every form in the request."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def streams(self) -> bool:
        """Whether the answer is sent as a stream."""
        return self.stream is True

    @property
    def requested_priority(self) -> int | None:
        """Priority from 1 to 10 that the body requests by number or service tier, or None."""
        if self.priority is None and self.service_tier is not None:
            return SERVICE_TIERS[self.service_tier].priority
        return self.priority

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def include_continuous_usage(self) -> bool:
        """Whether every chunk of a stream with its usage carries the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats is True


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Whether the model continues the last message, instead of answering it."""
    chat_template: str | None = None
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
    thinking: Any = None
    """Setting of a provider for the model's thinking; Anthropic's is an object with a `type`."""
    stop_in_reasoning: bool | None = None
    """Whether `stop` ends the answer within the reasoning, too; not by default."""
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    store: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """Largest number of output tokens of a choice, or None for the rest of the context window."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_param(self) -> str:
        """Field that sets the limit, as named in error messages."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the messages in the form of chat templates."""
        return list(map(Message.for_template, self.messages))

    def template_arguments(self) -> dict[str, Any]:
        """Returns the additional arguments for the chat template, which ignores unknown names."""
        arguments: dict[str, Any] = {}
        if self.enable_thinking is not None:
            arguments["enable_thinking"] = self.enable_thinking
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
        return arguments | (self.chat_template_kwargs or {})


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    """One text, several texts, one list of token ids, or several lists of token ids."""
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    suffix: str | None = None

    @property
    def token_limit(self) -> int:
        """Largest number of output tokens of a choice."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def token_limit_param(self) -> str:
        """Field that sets the limit, as named in error messages."""
        return "max_tokens"

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer has the prompt or its log-probabilities, so that it is one even without output."""
        return self.echo is True or self.prompt_logprobs is not None

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts as a list, for every form in the request."""
        return split_prompts(self.prompt)


class RequestBody(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Body that is the same for all targets, so that the decoder can tell what becomes of each field."""

    @cached_property
    def ignored_fields(self) -> tuple[str, ...]:
        """Hints in the body that are left out, as paths; the decoder sets it."""
        return ()


class EmbeddingRequest(RequestBody, frozen=True, kw_only=True):
    """Body of `POST /v1/embeddings`."""

    model: str
    input: str | list[str | int | list[int]] | None = None
    """One text, several texts, one list of token ids, or several lists of token ids."""
    messages: list[Message] | None = None
    """Conversation that the model's chat template writes as the only input, in place of `input`."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    priority: int | None = None
    cache: CacheFields | None = None

    def inputs(self) -> list[str | list[int]]:
        """Returns the inputs as a list, for every form in the request."""
        return [] if self.input is None else split_prompts(self.input)

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the messages in the form of chat templates."""
        return list(map(Message.for_template, self.messages or ()))

    @property
    def as_base64(self) -> bool:
        """Whether vectors are sent as base64 of their bytes, and otherwise as lists of numbers."""
        return self.encoding_format == "base64"


class TokenizeRequest(RequestBody, frozen=True, kw_only=True):
    """Body of `POST /tokenize`: a text or a conversation, in the form in which the model gets it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def adds_special_tokens(self) -> bool:
        """Whether special tokens are added; by default only for a text.

        A chat template writes its own special tokens.
        """
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the messages in the form of chat templates."""
        return list(map(Message.for_template, self.messages or ()))


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None

"""Body of a request, with the fields that the script uses."""

import msgspec

KNOWN_FIELDS = frozenset(
    (
        "audio",
        "best_of",
        "echo",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "modalities",
        "model",
        "n",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "prompt",
        "prompt_cache_key",
        "reasoning_effort",
        "response_format",
        "safety_identifier",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "suffix",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
        "verbosity",
        "web_search_options",
    )
)
"""Top-level fields of the two requests in OpenAI's API reference."""


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None

    def words(self) -> int:
        content = self.content
        parts = [content] if isinstance(content, str) else [part.text for part in content or []]
        return sum(len(part.split()) for part in parts)


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Question(msgspec.Struct):
    """Fields of a request's body that the script uses."""

    messages: list[_Message] | None = None
    prompt: str | list[int | str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    model: str = ""
    user: str | None = None

    def words(self) -> int:
        """Number of words of the prompt, or of tokens if it came as tokens."""
        if self.messages is not None:
            return sum(message.words() for message in self.messages)
        if isinstance(self.prompt, str):
            return len(self.prompt.split())
        return sum(1 if isinstance(item, int) else len(item.split()) for item in self.prompt or [])

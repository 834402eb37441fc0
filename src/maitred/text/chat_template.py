"""Chat template of a model: the Jinja program that writes a conversation as the prompt it was trained on.

Templates come with model weights from third parties, so they run in Jinja's sandbox. They use the conventions of
Hugging Face's `apply_chat_template`: blocks are trimmed, loops have `break` and `continue`, `tojson` does not escape
for HTML, `raise_exception` rejects a conversation, `strftime_now` returns the date, and ``{% generation %}`` marks the
model's own text for training.

The module converts earlier tool calls in a conversation to a form that the template accepts. Some templates reject
conversations that OpenAI's API allows, although the same history can be written in another form:

* Llama 3's templates write one call per message. Several calls are split into several messages, each followed by its
  result.
* Mistral's templates require ids of nine letters or digits. Other ids are replaced.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from maitred.core.errors import ConfigInvalid, InvalidRequest

_ONE_CALL = re.compile(r"tool_calls\s*\|\s*length\s*!=\s*1|single tool-calls")
_SHORT_IDS = re.compile(r"length\s*!=\s*9")
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_Message = Mapping[str, Any]


class ToolHistory:
    """Adapter that converts the earlier tool calls of a conversation for one chat template.

    Args:
        template: Source of the template.
    """

    def __init__(self, template: str) -> None:
        self._one_call = _ONE_CALL.search(template) is not None
        self._short_ids = _SHORT_IDS.search(template) is not None

    def shape(self, messages: Sequence[_Message]) -> Sequence[_Message]:
        """Returns the messages in the form that the template accepts."""
        if self._one_call:
            messages = list(_one_by_one(messages))
        if self._short_ids:
            messages = [_with_short_ids(message) for message in messages]
        return messages


def _one_by_one(messages: Sequence[_Message]) -> Iterator[_Message]:
    results: list[_Message] = []
    """Results of the earlier calls, which have been written directly after their calls."""
    for position, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) > 1:
            results = []
            for later in messages[position + 1 :]:
                if later.get("role") != "tool":
                    break
                results.append(later)
            yield from _split_calls(message, calls, results)
        elif not any(message is answered for answered in results):
            yield message


def _split_calls(message: _Message, calls: Sequence[_Message], results: Sequence[_Message]) -> Iterator[_Message]:
    """Yields every call with its result; results without a call are last."""
    left = list(results)
    for number, call in enumerate(calls):
        yield {**message, "content": "" if number else message.get("content", ""), "tool_calls": [call]}
        for result in [match for match in left if match.get("tool_call_id") == call.get("id")]:
            left = [other for other in left if other is not result]
            yield result
    yield from left


def _with_short_ids(message: _Message) -> _Message:
    changes: dict[str, Any] = {}
    if isinstance(message.get("tool_call_id"), str):
        changes["tool_call_id"] = _short(message["tool_call_id"])
    if calls := message.get("tool_calls"):
        changes["tool_calls"] = [{**call, "id": _short(call.get("id") or "")} for call in calls]
    return {**message, **changes} if changes else message


def _short(id_: str) -> str:
    """Returns nine characters that represent an id; a valid id represents itself."""
    if _SHORT_ID.fullmatch(id_):
        return id_
    number = int.from_bytes(blake2b(id_.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(9))


class ChatTemplate:
    """Compiled chat template that renders conversations as prompts.

    Args:
        source: Jinja source of the template.
        special_tokens: Variables such as ``bos_token``.
        now: Function that returns the local time, for templates that write the date into the prompt.

    Attributes:
        source: Jinja source of the template.
        supports_tools: Whether the template can describe tools to the model.

    Raises:
        ConfigInvalid: The template does not compile.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigInvalid(
                f"The model's chat template does not compile: {error}. Replace chat_template in tokenizer_config.json."
            ) from error
        self.source = source
        self.knows_tools = re.search(r"\btools\b", source) is not None
        self._history = ToolHistory(source)
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation as a prompt that includes special tokens.

        The role ``developer`` is OpenAI's newer name of ``system``; templates that do not know it get the old name.
        Earlier tool calls are adapted to the template (see `maitred.text.chat_template`).

        Args:
            messages: Messages in order, each with ``role`` and ``content``.
            add_generation_prompt: Whether the prompt ends where the answer of the model begins.
            tools: Tool definitions, for templates that support tools.
            arguments: Further variables of this template, such as ``enable_thinking`` of the template of Qwen 3.

        Raises:
            InvalidRequest: The template rejects the conversation or fails on it, or an argument has the name of a
                special token of the model.
        """
        if arguments and (own := self._special_tokens.keys() & arguments.keys()):
            raise InvalidRequest(
                f"{min(own)} is a token of the model's, and not to be told. Remove it from chat_template_kwargs.",
                param="chat_template_kwargs",
            )
        if not self._knows_developer:
            messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        messages = self._history.shape(messages)
        variables = {
            **self._special_tokens,
            **(arguments or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # A template is third-party code that can raise any exception.
            raise InvalidRequest(
                f"The model's chat template cannot write these messages: {error}", param="messages"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """Jinja extension that replaces ``{% generation %}`` … ``{% endgeneration %}`` by the content of the block."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parses the block; Jinja calls this method at the name of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: object, indent: int | None = None, **options: Any) -> str:  # noqa: ANN401 - json's own
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

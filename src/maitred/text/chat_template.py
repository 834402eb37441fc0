"""Chat template of a model: the Jinja program that writes a conversation as the prompt it was trained on.

Templates come with model weights from third parties, so they run in Jinja's sandbox. They use the conventions of
Hugging Face's `apply_chat_template`: blocks are trimmed, loops have `break` and `continue`, `tojson` does not escape
for HTML, `raise_exception` rejects a conversation, `strftime_now` returns the date, and ``{% generation %}`` marks the
model's own text for training.

The module converts the messages of a conversation to the forms that the template expects. Some templates reject or pass
over what OpenAI's API allows, although the same history can be written in another form:

* DeepSeek's templates write a call only where the message's content is null, and join its arguments, as text, to other
  text; most others expect an object. Which forms a template takes is tried out when it is loaded.
* Llama 3's templates write one call per message. Several calls are split into several messages, each followed by its
  result.
* Mistral's templates require ids of nine letters or digits. Other ids are replaced.
* Templates of models that also read images take content as a list of parts.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from maitred.core.errors import ConfigInvalid, InvalidRequest
from maitred.text.control_tokens import CLOSE_MARK, OPEN_MARK

_TIME_CALL = re.compile(r"""strftime_now\s*\((?:\s*(["'])(.*?)\1\s*\))?""")
"""Call that writes the time, with its pattern if it is written out."""
_ONE_CALL = re.compile(r"tool_calls\s*\|\s*length\s*!=\s*1|single tool-calls")
_SHORT_IDS = re.compile(r"length\s*!=\s*9")
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WORD = re.compile(r"\w+")
_ESCAPED = re.compile(rf"[^\x00-~{OPEN_MARK}{CLOSE_MARK}]")
"""Characters that JSON of ASCII escapes, without the marks of control tokens, which are no part of the text."""
_END_MARK = "\udff2 "
"""Mark behind the content of a message that the model continues: half of a surrogate pair, which no request has."""
_Message = Mapping[str, Any]


_Render = Callable[[Sequence[_Message]], str]

_ASKED, _SAID, _CITY, _TOWN = "quaestio", "responsum", "urbem", "oppidum"
"""Words that no template writes by itself: what is in a prompt of them came from the messages."""
_QUESTION: _Message = {"role": "user", "content": _ASKED}
_ID = "aB3dE6gH9"


class ToolHistory:
    """Adapter that converts the messages of a conversation to the forms that one chat template expects.

    Templates differ in whether a call's message may have text, no text or an empty one, in whether arguments are an
    object or text, and in whether the content of a message is text or a list of parts. The forms are found out with
    conversations that the template is given once: the form that a template expects is the one whose prompt has all
    that was said. What clients send, content null and arguments as text, goes first.

    Args:
        template: Source of the template.
        render: Renders messages with the template; raises an exception if the template rejects them.
    """

    def __init__(self, template: str, render: _Render) -> None:
        self._short_ids = _SHORT_IDS.search(template) is not None
        self._parts = not _shows(render, [_QUESTION], _ASKED) and _shows(render, [_in_parts(_QUESTION)], _ASKED)
        forms = [(content, text) for text in (False, True) for content in (None, "")]
        taken = [form for form in forms if self._shows_calls(render, *form)]
        self._contents = [content for content, text in taken if text == taken[0][1]]
        """Contents of a message with calls and without text: None, an empty text, or either."""
        self._text_arguments = bool(taken) and taken[0][1]
        self._calls_apart = bool(taken) and not self._shows_calls(render, _SAID, self._text_arguments)
        """Whether calls are shown only without a text beside them."""
        self._one_call = _ONE_CALL.search(template) is not None or (
            bool(taken) and not self._shows_calls(render, *taken[0], _CITY, _TOWN)
        )

    def shape(self, messages: Sequence[_Message]) -> Sequence[_Message]:
        """Returns the messages in the form that the template accepts."""
        for message in messages:
            if "tool_calls" in message or "tool_call_id" in message:
                messages = self._with_call_forms(messages)
                break
        return [_in_parts(message) for message in messages] if self._parts else messages

    def _with_call_forms(self, messages: Sequence[_Message]) -> Sequence[_Message]:
        if self._calls_apart:
            messages = list(_text_apart(messages))
        if self._one_call:
            messages = list(_one_by_one(messages))
        if self._short_ids:
            messages = [_with_short_ids(message) for message in messages]
        return [self._with_call_form(message) if message.get("tool_calls") else message for message in messages]

    def _with_call_form(self, message: _Message) -> _Message:
        """Returns a message with calls whose content and arguments have the form that the template expects."""
        content = message.get("content")
        if not content and content not in self._contents:
            content = next(iter(self._contents), "")
        calls = [_with_arguments(call, text=self._text_arguments) for call in message["tool_calls"]]
        return {**message, "content": content, "tool_calls": calls}

    def _shows_calls(self, render: _Render, content: str | None, text: bool, *names: str) -> bool:
        """Returns whether the prompt has calls with these names and their arguments."""
        calls = [
            {"id": _ID[:-1] + name[0], "type": "function", "function": {"name": name, "arguments": '{"ubi": "Roma"}'}}
            for name in names or (_CITY,)
        ]
        answer = {"role": "assistant", "content": content, "tool_calls": [_with_arguments(c, text=text) for c in calls]}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "sol"} for call in calls]
        messages = [_QUESTION, answer, *results]
        try:
            prompt = render([_in_parts(message) for message in messages] if self._parts else messages)
        except Exception:  # A template is third-party code that can raise any exception.
            return False
        if content is None and "None" in prompt:
            return False
        # Python's own form of an object, and JSON within JSON, are no form that a model was trained on.
        return "ubi" in prompt and not re.search(r"['\\\\]\"?ubi", prompt) and all(name in prompt for name in names)


def _shows(render: _Render, messages: Sequence[_Message], word: str) -> bool:
    """Returns whether a template takes the messages, and writes a word of them into the prompt."""
    try:
        return word in render(messages)
    except Exception:  # A template is third-party code that can raise any exception.
        return False


def _in_parts(message: _Message) -> _Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_arguments(call: _Message, *, text: bool) -> _Message:
    """Returns a call whose arguments are text, as clients send them, or an object.

    A model wrote the arguments, so they may be invalid JSON, which the template gets unchanged.
    """
    function = call["function"]
    arguments = function["arguments"]
    if text:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        arguments = arguments.strip() or "{}"
    elif isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments.strip() or "{}")
        except (msgspec.DecodeError, RecursionError):
            return call
    return {**call, "function": {**function, "arguments": arguments}}


def _text_apart(messages: Sequence[_Message]) -> Iterator[_Message]:
    """Yields the messages, with the text of a message that has calls in a message of its own."""
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            yield {name: value for name, value in message.items() if name != "tool_calls"}
            yield {**message, "content": None}
        else:
            yield message


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
        tool_source: Jinja source of the template for conversations with tools; None: `source`.

    Attributes:
        source: Jinja source of the template.
        tool_source: Jinja source of the template for conversations with tools.
        knows_tools: Whether the template can describe tools to the model.
        literals: Texts that the templates have, each once, with a null character between them.

    Raises:
        ConfigInvalid: The template does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
        tool_source: str | None = None,
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self.knows_tools = re.search(r"\btools\b", self.tool_source) is not None
        self.literals = "\0".join(sorted({*_literals(environment, source), *_literals(environment, self.tool_source)}))
        self._special_tokens = dict(special_tokens)
        self._now = now
        self._time_patterns = sorted(
            {pattern or "%c" for text in (source, self.tool_source) for _, pattern in _TIME_CALL.findall(text)}
        )
        self._plain = _ConversationWriter(environment, source, self._special_tokens)
        self._with_tools = (
            self._plain if tool_source is None else _ConversationWriter(environment, tool_source, self._special_tokens)
        )

    def times(self) -> list[str]:
        """Returns what the templates may write of the time now; empty: they do not ask for it."""
        now = self._now()
        return [now.strftime(pattern) for pattern in self._time_patterns]

    def unread_arguments(self, arguments: Iterable[str]) -> list[str]:
        """Returns the names of further variables that the template does not read, so that they change nothing."""
        words = set(_WORD.findall(self.source)).union(_WORD.findall(self.tool_source))
        return [name for name in arguments if name not in words]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        mark: Callable[[Any], Any] | None = None,
    ) -> str:
        """Renders a conversation as a prompt that includes special tokens.

        The role ``developer`` is OpenAI's newer name of ``system``; templates that do not know it get the old name.
        Earlier tool calls are adapted to the template (see `maitred.text.chat_template`).

        Args:
            messages: Messages in order, each with ``role`` and ``content``.
            add_generation_prompt: Whether the prompt ends where the answer of the model begins.
            tools: Tool definitions, for templates that support tools.
            arguments: Further variables of this template, such as ``enable_thinking`` of the template of Qwen 3.
            continue_final_message: Whether the prompt ends with the content of the last message, which the model
                continues.
            mark: Function that marks control tokens in what the caller says; None: there are none to mark.

        Raises:
            InvalidRequest: The template rejects the conversation or fails on it, or an argument has the name of a
                special token of the model.
        """
        if arguments and (own := self._special_tokens.keys() & arguments.keys()):
            raise InvalidRequest(
                f"{min(own)} is a token of the model's, and not to be told. Remove it from chat_template_kwargs.",
                param="chat_template_kwargs",
            )
        writer = self._plain if tools is None else self._with_tools
        if not writer.knows_developer:
            messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        messages = writer.history.shape(messages)
        if mark is not None:
            messages, tools, arguments = mark(messages), mark(tools), mark(arguments)
        if continue_final_message:
            messages = [*messages[:-1], _with_end_mark(messages[-1])]
        variables = {
            **self._special_tokens,
            "documents": None,
            **(arguments or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            prompt = writer.template.render(variables)
        except Exception as error:  # A template is third-party code that can raise any exception.
            reason = str(error).replace(OPEN_MARK, "").replace(CLOSE_MARK, "")
            raise InvalidRequest(
                f"The model's chat template cannot write these messages: {reason}", param="messages"
            ) from error
        return _until_end_mark(prompt) if continue_final_message else prompt


def _with_end_mark(message: _Message) -> _Message:
    """Returns a message with a mark behind its content, where the prompt is cut for the model to continue it."""
    content = message["content"]
    if isinstance(content, list):
        *before, last = content
        return {**message, "content": [*before, {**last, "text": last["text"] + _END_MARK}]}
    return {**message, "content": content + _END_MARK}


def _until_end_mark(prompt: str) -> str:
    """Returns a prompt up to the end of the content of its last message, as `apply_chat_template` of Transformers.

    A template that strips the content has also stripped the space behind the mark. The space before it goes, too, as
    it would without the mark.
    """
    text, mark, rest = prompt.rpartition(_END_MARK.rstrip())
    if not mark:
        raise InvalidRequest(
            "The model's chat template does not write the end of the last message, so it cannot be continued. Remove "
            "continue_final_message.",
            param="continue_final_message",
        )
    # Some templates write a content more than once.
    text = text.replace(_END_MARK, "").replace(_END_MARK.rstrip(), "")
    return text if rest.startswith(" ") else text.rstrip()


class _ConversationWriter:
    """One compiled template, with the forms of messages that it expects.

    Raises:
        ConfigInvalid: The template does not compile.
    """

    def __init__(self, environment: jinja2.Environment, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self.template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigInvalid(
                f"The model's chat template does not compile: {error}. Replace chat_template in tokenizer_config.json."
            ) from error
        self.knows_developer = "developer" in source
        self.history = ToolHistory(
            source,
            lambda messages: self.template.render(
                {
                    **special_tokens,
                    "documents": None,
                    "messages": messages,
                    "tools": None,
                    "add_generation_prompt": True,
                }
            ),
        )


def _literals(environment: jinja2.Environment, source: str) -> set[str]:
    """Returns the texts in a template, outside of its tags and within."""
    try:
        tree = environment.parse(source)
    except jinja2.TemplateError:
        return set()  # its compilation says what is wrong
    texts = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    return texts | {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}


class _GenerationTag(jinja2.ext.Extension):
    """Jinja extension that replaces ``{% generation %}`` … ``{% endgeneration %}`` by the content of the block."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parses the block; Jinja calls this method at the name of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes a value as JSON; the parameters are those of the filter in `transformers`, in its order."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

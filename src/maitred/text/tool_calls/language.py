"""Grammar rules for tool calls in llguidance's dialect of Lark, which enforce the argument schemas.

A model that may call a tool writes text until its marker, or until characters that can begin only a call. After that
the model must complete the call. The answer ends after its calls. The rules write markers as token ids, so text that
spells a marker stays text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence

from maitred.text.special_tokens import SpecialTokenText
from maitred.text.tool_calls import hermes, llama3, mistral

Rules = dict[str, str]
"""Map from each rule name to its body; upper-case names are regular expressions."""

TEXT = r"/(?s:.+)/"
_SPACE = r"/[ \n]{0,4}/"


class CallLanguage:
    """Grammar of the calls of one answer.

    Args:
        names: Names of the functions that may be called, in order; at least one.
        marks: Markers of the model.
        parallel: Whether the answer may have several calls.
        must: Whether the answer must be a call.
        rules: Rules to which the rules of the calls are added; they contain ``args_0`` and so on, in the order of the
            names.
        said: Name of a rule for the text that may replace a call, or None for any text, which may also precede the
            calls.
    """

    def __init__(
        self,
        names: Sequence[str],
        marks: SpecialTokenText,
        rules: Rules,
        *,
        parallel: bool,
        must: bool,
        said: str | None = None,
    ) -> None:
        self._names = names
        self._marks = marks
        self._rules = rules
        self._parallel = parallel
        self._must = must
        self._said = said

    def hermes(self) -> str:
        """Returns the body of the answer in the style of Hermes and Qwen."""
        objects = self._objects("arguments")
        body, close = f'"\\n" {objects} "\\n"', self._marker(hermes.CLOSE)
        return self._marker_grammar(
            hermes.OPEN, f"{body} {close}", f"{_SPACE} {self._marker(hermes.OPEN)} {body} {close}"
        )

    def mistral(self) -> str:
        """Returns the body of the answer in Mistral's style.

        This is the newer style if the vocabulary has a token for it.
        """
        if self._marks.tokens.get(mistral.ARGUMENTS) is None:
            objects = self._objects("arguments")
            more = f'("," " "? {objects})*' if self._parallel else ""
            return self._marker_grammar(mistral.OPEN, f'" "? "[" {objects} {more} "]"', None)
        given = self._marker(mistral.ARGUMENTS)
        calls = self._one_of(lambda name, arguments: f"{_quote(name)} {given} {arguments}")
        return self._marker_grammar(mistral.OPEN, calls, f"{self._marker(mistral.OPEN)} {calls}")

    def llama3(self) -> str:
        """Returns the body of the answer in the style of Llama 3."""
        if self._must:
            objects = self._objects("parameters")
            tag = "" if self._marks.tokens[llama3.TAG] is None else f"{self._marker(llama3.TAG)}?"
            more = self._more('";" " "? ' + objects)
            return f"{tag} {objects} {more}"
        objects = self._objects_behind_heads()
        calls = f"{objects} " + self._more('";" ' + objects)
        if self._said is not None:
            return f"{self._said} | {calls}"
        escaped = "|".join(_escape(name) for name in self._names)
        begins = rf'/[ \n]{{0,4}}\{{[ \n]?"name"[ \n]?:[ \n]?"({escaped})"(?s:.*)/'
        self._rules["NO_CALL"] = f"{TEXT} & ~{begins}"
        tagged = "" if self._marks.tokens[llama3.TAG] is None else f"| NO_CALL? {self._marker(llama3.TAG)} {calls}"
        return f"NO_CALL | {calls} {tagged}"

    def _marker_grammar(self, marker: str, first: str, further: str | None) -> str:
        """Returns the grammar of an answer with a marker before its calls.

        `further` is the grammar of a later call with its marker.
        """
        more = "" if further is None else self._more(further)
        if self._must or self._said is not None:
            calls = f"{self._marker(marker)} {first} {more}"
            return calls if self._must else f"{self._said} | {calls}"
        self._rules["TEXT"] = TEXT
        if self._marks.tokens[marker] is not None:
            return f"TEXT | TEXT? {self._marker(marker)} {first} {more}"
        self._rules["until_call[lazy]"] = rf"/(?s:.*){_escape(marker)}/"
        return f"TEXT | until_call {first} {more}"

    def _more(self, further: str) -> str:
        return f"({further})*" if self._parallel else ""

    def _objects(self, key: str) -> str:
        """Returns the grammar of a call as a JSON object, with the spacing of chat templates."""

        def call(name: str, arguments: str) -> str:
            head = f'{{"name": {json.dumps(name)}, "{key}": '
            return f'{_quote(head)} {arguments} "}}"'

        return self._one_of(call)

    def _objects_behind_heads(self) -> str:
        """Returns the grammar of a call without a marker, with free spacing.

        Such a call is recognised by its beginning.
        """
        for number, name in enumerate(self._names):
            self._rules[f"HEAD_{number}"] = (
                rf'/[ \n]{{0,4}}\{{[ \n]?"name"[ \n]?:[ \n]?"{_escape(name)}"[ \n]?,[ \n]?"parameters"[ \n]?:[ \n]?/'
            )
        return (
            "(" + " | ".join(f"HEAD_{number} args_{number} /[ \\n]?\\}}/" for number in range(len(self._names))) + ")"
        )

    def _one_of(self, call: Callable[[str, str], str]) -> str:
        return "(" + " | ".join(call(name, f"args_{number}") for number, name in enumerate(self._names)) + ")"

    def _marker(self, marker: str) -> str:
        return marker_rule(self._marks, marker)


def marker_rule(marks: SpecialTokenText, marker: str) -> str:
    """Returns a marker as its token id, or as text if the marker has no token."""
    token = marks.tokens[marker]
    return _quote(marker) if token is None else f"<[{token}]>"


def format_grammar(start: str, rules: Mapping[str, str]) -> str:
    """Formats rules as a grammar in Lark."""
    return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in rules.items()), ""])


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escape(text: str) -> str:
    r"""Escapes a text for a regular expression between slashes.

    Characters are written by their numbers, as a backslash gives some of them a meaning: ``\<`` begins a word.
    """
    return re.sub(r"[^a-zA-Z0-9_]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)

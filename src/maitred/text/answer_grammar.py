"""Grammar of a whole answer: optional free reasoning, then tool calls or text, as the request demands.

    answer  = [ thought ]  calls                  a call is required
            | [ thought ]  ( text  [ calls ] )    it may call
            | [ thought ]  said                   a form of the answer was asked for
            | [ thought ]  ( said | calls )       both

The notation is llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance, docs/syntax.md).
"""

from collections.abc import Mapping

from maitred.core.grammar import Grammar
from maitred.core.tools import ToolRules
from maitred.text.answer_format import AnswerFormat
from maitred.text.reasoning import CLOSE as THOUGHT_ENDS
from maitred.text.reasoning import OPEN as THOUGHT_BEGINS
from maitred.text.tool_calls.language import TEXT, CallLanguage, Rules, format_grammar, marker_rule

_SPACE = r"/[ \n]{0,4}/"


def answer_grammar(
    answers: AnswerFormat,
    *,
    inside: bool,
    said: Grammar | None = None,
    tools: ToolRules | None = None,
    arguments: Mapping[str, Grammar] | None = None,
) -> Grammar | None:
    """Makes the grammar of an answer, or returns None if the answer is unconstrained.

    Args:
        answers: Format in which the model writes calls and reasoning.
        inside: Whether the prompt ends within an open reasoning block.
        said: Grammar of the text of the answer, or None for any text.
        tools: Tools that the answer may call, or None if it cannot call tools.
        arguments: Maps the name of each callable function to the grammar of its arguments.
    """
    callable_ = () if tools is None or answers.calls is None else tools.callable
    if not callable_ and (said is None or answers.reasoning is None):
        return said
    rules: Rules = {}
    if said is not None:
        rules["said"] = _embed_rule(said)
    if not callable_:
        answer = "said"
    else:
        assert tools is not None
        assert arguments is not None
        rules |= {f"args_{number}": _embed_rule(arguments[tool.name]) for number, tool in enumerate(callable_)}
        language = CallLanguage(
            [tool.name for tool in callable_],
            answers.marks,
            rules,
            parallel=tools.parallel,
            must=tools.must,
            said=None if said is None else "said",
        )
        write = {"hermes": language.hermes, "llama3_json": language.llama3, "mistral": language.mistral}
        assert answers.calls is not None
        answer = write[answers.calls]()
    if answers.reasoning is None:
        return Grammar("lark", format_grammar(answer, rules))
    rules["answer"] = answer
    return Grammar("lark", format_grammar(f"{_thought(answers, rules, inside=inside)} answer", rules))


def _thought(answers: AnswerFormat, rules: Rules, *, inside: bool) -> str:
    """Returns the rule of a reasoning block with the white space around it.

    The block is optional unless the prompt has opened it.
    """
    marks = answers.marks
    close = marker_rule(marks, THOUGHT_ENDS)
    if marks.tokens[THOUGHT_ENDS] is None:
        rules["thought[lazy]"] = r"/(?s:.*)<\/think>/"
        rest = f"thought {_SPACE}"
    else:
        rules["THOUGHT"] = TEXT
        rest = f"THOUGHT? {close} {_SPACE}"
    return rest if inside else f"({_SPACE} {marker_rule(marks, THOUGHT_BEGINS)} {rest})?"


def _embed_rule(grammar: Grammar) -> str:
    """Returns a grammar as the body of a rule."""
    match grammar.kind:
        case "json_schema":
            return f"%json {grammar.text}"
        case "regex":
            return "/" + _slashes_escaped(grammar.text) + "/"
        case "lark":
            return f"%lark {{\n{grammar.text}\n}}"


def _slashes_escaped(pattern: str) -> str:
    """Escapes the unescaped slashes in a regular expression that will stand between slashes."""
    result, escaped = [], False
    for character in pattern:
        result.append("\\/" if character == "/" and not escaped else character)
        escaped = character == "\\" and not escaped
    return "".join(result)

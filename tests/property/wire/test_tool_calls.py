"""However an answer is cut into pieces, it is the same calls and the same text; and nothing of it is lost."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from maitred.text.json_scan import JsonScan
from maitred.text.special_tokens import SpecialTokenText
from maitred.text.tool_calls.events import TextEvent, ToolCallArguments, ToolCallStart, merge_events
from maitred.text.tool_calls.hermes import HermesParser
from maitred.text.tool_calls.llama3 import Llama3Parser
from maitred.text.tool_calls.mistral import MistralParser

NAMES = frozenset({"look", "look_up", "go"})
MARKERS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
WITHOUT_TOKENS = SpecialTokenText(dict.fromkeys(MARKERS))
WITH_TOKENS = SpecialTokenText({marker: number for number, marker in enumerate(MARKERS)})
PARSERS = (HermesParser, Llama3Parser, MistralParser)

arguments = st.dictionaries(
    st.text(max_size=4), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4)
)
values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
pieces = st.one_of(
    st.sampled_from(
        [
            *MARKERS,
            *(
                '{"name": "look", ',
                '"parameters": {"at": 1}}',
                '"arguments": {}}',
                "; ",
                ", ",
                " [",
                "]",
                "\n",
                "look",
                "go",
            ),
            *('{"name": "no", "arguments": {}}', '{"name": "look"}', "{", "}", '"', "[TOOL", "<tool_", "a{", " "),
            '{"arguments": {"b": "}"}, "name": "look_up"}',
            '{"name": "go", "arguments": "{\\"a\\": 1}"}',
            '{"name": "go", "parameters": null}',
        ]
    ),
    st.text(max_size=5),
    arguments.map(json.dumps),
    st.builds(
        lambda name, given: json.dumps({"name": name, "arguments": given}), st.sampled_from(sorted(NAMES)), arguments
    ),
)
answers = st.lists(pieces, max_size=12)
cuts = st.lists(st.integers(1, 9), min_size=1, max_size=30)


def read(parser, chunks):
    events = []
    for chunk in chunks:
        events += parser.push(chunk)
    return merge_events([*events, *parser.flush()])


def cut(text, lengths):
    chunks, at, number = [], 0, 0
    while at < len(text):
        length = lengths[number % len(lengths)]
        chunks.append(text[at : at + length])
        at, number = at + length, number + 1
    return chunks


def written(parts, marks):
    return "".join(marks[part] if part in MARKERS else part for part in parts)


@given(answers, cuts, st.sampled_from(PARSERS), st.sampled_from([WITHOUT_TOKENS, WITH_TOKENS]))
@example(["[TOOL_CALLS]", " [", '{"name": "look", ', '"arguments": {}}', ", ", "]"], [1], MistralParser, WITH_TOKENS)
@example(["<|python_tag|>", "hello"], [3], Llama3Parser, WITHOUT_TOKENS)
def test_cutting_changes_nothing(parts, lengths, parser, marks):
    text = written(parts, marks)
    whole = read(parser(NAMES, marks), [text])
    assert read(parser(NAMES, marks), cut(text, lengths)) == whole
    assert read(parser(NAMES, marks), text) == whole


@given(answers, st.sampled_from(PARSERS))
def test_calls_name_tools_and_begin_before_they_are_given_anything(parts, parser):
    begun = False
    for event in read(parser(NAMES, WITH_TOKENS), [written(parts, WITH_TOKENS)]):
        match event:
            case ToolCallStart(name):
                assert name in NAMES
                begun = True
            case ToolCallArguments():
                assert begun


@given(st.lists(st.text(max_size=8)), st.sampled_from(PARSERS))
def test_an_answer_without_markers_is_text_as_it_stands(parts, parser):
    text = "So: " + "".join(parts)
    assert read(parser(NAMES, WITH_TOKENS), (parts and ["So: ", *parts]) or [text]) == [TextEvent(text)]


@given(st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments), min_size=1, max_size=4), cuts, st.data())
def test_what_was_called_comes_out_as_it_was_written(calls, lengths, data):
    mark = WITH_TOKENS
    objects = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    readers = {
        HermesParser: "Well.\n"
        + "\n".join(f"{mark['<tool_call>']}\n{call}\n{mark['</tool_call>']}" for call in objects),
        Llama3Parser: "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls),
        MistralParser: "".join(
            f"{mark['[TOOL_CALLS]']}{name}{mark['[ARGS]']}{json.dumps(given)}" for name, given in calls
        ),
    }
    parser = data.draw(st.sampled_from(PARSERS))
    events = read(parser(NAMES, mark), cut(readers[parser], lengths))
    assert [event for event in events if isinstance(event, TextEvent)] == [TextEvent("Well.")] * (
        parser is HermesParser
    )
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    given = [json.loads(event.arguments) for event in events if isinstance(event, ToolCallArguments)]
    assert list(zip(names, given, strict=True)) == calls


@given(values, st.booleans(), cuts)
def test_a_json_value_ends_where_it_ends(value, ascii_only, lengths):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1 if ascii_only else None)
    scan = JsonScan()
    read_to = sum(scan.push(chunk) for chunk in cut(text, lengths))
    assert (read_to, scan.broken) == (len(text), False)
    scan.push("x")
    assert scan.done


@given(st.text(alphabet='{}[]":,0123456789.eE+-truefalsn\\u \n', max_size=20))
def test_what_is_taken_for_json_is_json(text):
    scan = JsonScan()
    end = scan.push(text + "\x00")
    try:
        json.loads(text)
    except ValueError:
        assert not (scan.done and not text[end:].strip())
    else:
        assert scan.done
        assert not text[end:].strip()

"""What a model's answers are made of, and earlier calls as its template takes them."""

import pytest

from maitred.config.tree import BUNDLED_MODEL
from maitred.text.answer_format import AnswerFormat
from maitred.text.answer_reader import AnswerParser
from maitred.text.chat_template import ToolHistory
from maitred.text.tokenizer import Detokenizer, Tokenizer
from tests.support.tool_models import save_tool_tokenizer


@pytest.mark.parametrize(
    ("family", "calls", "reasoning"),
    [
        ("hermes", "hermes", None),
        ("thinking", "hermes", "think"),
        ("llama", "llama3_json", None),
        ("mistral", "mistral", None),
        ("old_mistral", "mistral", None),
    ],
)
def test_the_template_tells(tmp_path, family, calls, reasoning):
    tokenizer = save_tool_tokenizer(tmp_path, family)
    answers = AnswerFormat.of(tokenizer)
    assert (answers.calls, answers.reasoning) == (calls, reasoning)
    silent = AnswerFormat.of(tokenizer, "none", "none")
    assert (silent.calls, silent.reasoning, silent.marks.tokens) == (None, None, {})
    answer_format = AnswerFormat.of(tokenizer, "mistral", "think")
    assert (answer_format.calls, answer_format.reasoning) == ("mistral", "think")


def test_a_model_whose_template_has_no_place_for_tools_knows_none():
    answers = AnswerFormat.of(Tokenizer.load(BUNDLED_MODEL), "hermes")
    assert answers.calls is None
    assert answers.call_parser({"look"}) is None


def test_markers_show_only_where_they_are_looked_for(tmp_path):
    tokenizer = save_tool_tokenizer(tmp_path, "mistral")
    answers = AnswerFormat.of(tokenizer)
    tokens = tokenizer.encode("Hi [TOOL_CALLS]go[ARGS]{}", add_special_tokens=False)
    assert Detokenizer(tokenizer).push(tokens) == "Hi go{}"
    marked = Detokenizer(tokenizer, marks=answers.marks.bytes_of).push(tokens)
    assert len(marked) == len("Hi go{}") + 2
    assert answers.marks.literal(marked) == "Hi [TOOL_CALLS]go[ARGS]{}"
    spelt = [tokenizer.encode(character, add_special_tokens=False)[0] for character in "[TOOL_CALLS]"]
    assert Detokenizer(tokenizer, marks=answers.marks.bytes_of).push(spelt) == "[TOOL_CALLS]", "text stays text"


@pytest.mark.parametrize("family", ["hermes", "thinking", "mistral"])
def test_no_text_is_taken_for_a_marker(tmp_path, family):
    tokenizer = save_tool_tokenizer(tmp_path, family)
    answers = AnswerFormat.of(tokenizer)
    byte_tokens = {tokenizer.token_bytes(token): token for token in range(4096)}
    noncharacters = "".join(map(chr, range(0xFDD0, 0xFDF0))) + "\ufffe\U0001ffff"
    halves = b"".join(chr(0xD800 + number).encode("utf-8", "surrogatepass") for number in range(32))
    call = '{"name": "go", "arguments": {}}'
    for written in (*(noncharacter.encode() for noncharacter in noncharacters), noncharacters.encode(), halves):
        tokens = [byte_tokens[bytes([byte])] for byte in written + call.encode()]
        shown = Detokenizer(tokenizer, marks=answers.marks.bytes_of)
        parser = AnswerParser(answers.reasoning_parser(inside=False), answers.call_parser({"go"}), answers.marks)
        for token in tokens:
            parser.push(shown.push([token]))
        parser.push(shown.flush())
        parser.flush()
        segments = parser.take()
        assert "".join(segment.text for segment in segments) == written.decode("utf-8", "replace") + call
        assert not any(segment.calls or segment.thought for segment in segments)


def test_a_character_that_a_marker_cuts_stays_incomplete(tmp_path):
    tokenizer = save_tool_tokenizer(tmp_path, "hermes")
    answers = AnswerFormat.of(tokenizer)
    byte_tokens = {tokenizer.token_bytes(token): token for token in range(4096)}
    (marker,) = tokenizer.encode("<tool_call>", add_special_tokens=False)
    shown = Detokenizer(tokenizer, marks=answers.marks.bytes_of)
    text = shown.push([byte_tokens[b"\xe2"], marker, byte_tokens[b"\x82"], byte_tokens[b"a"]])
    assert answers.marks.literal(text) == "\ufffd<tool_call>\ufffda"


def test_a_prompt_may_have_opened_the_thought(tmp_path):
    tokenizer = save_tool_tokenizer(tmp_path, "thinking")
    answers = AnswerFormat.of(tokenizer)
    for prompt, opened in (
        ("<|assistant|><think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("<|assistant|>", False),
    ):
        assert answers.opens_thought(tokenizer, tokenizer.encode(prompt, add_special_tokens=False)) is opened
    assert not AnswerFormat.of(tokenizer, reasoning="none").opens_thought(tokenizer, [4098])


def call(id_):
    return {"id": id_, "type": "function", "function": {"name": "look", "arguments": {}}}


def reject(messages):
    raise ValueError


def result(id_):
    return {"role": "tool", "tool_call_id": id_, "content": id_}


def test_several_calls_become_one_to_a_message():
    history = ToolHistory("{%- if message.tool_calls | length != 1 %}", reject)
    first, last = {"role": "user", "content": "?"}, {"role": "user", "content": "And?"}
    asked = {"role": "assistant", "content": "Let me see.", "tool_calls": [call("a"), call("b"), call("c")]}
    shaped = history.shape([first, asked, result("b"), result("a"), result("x"), last])
    assert shaped == [
        first,
        {**asked, "tool_calls": [call("a")]},
        result("a"),
        {**asked, "content": "", "tool_calls": [call("b")]},
        result("b"),
        {**asked, "content": "", "tool_calls": [call("c")]},
        result("x"),
        last,
    ]
    assert ToolHistory("", reject).shape([first, asked]) == [first, asked]


def test_ids_are_shortened_alike():
    history = ToolHistory("{%- if call.id | length != 9 %}", reject)
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call("call-1"), call("abcDEF123")]},
        result("call-1"),
    ]
    answer_format, answered = history.shape(messages)
    short, kept = (tool_call["id"] for tool_call in answer_format["tool_calls"])
    assert kept == "abcDEF123"
    assert len(short) == 9
    assert short.isalnum()
    assert answered["tool_call_id"] == short

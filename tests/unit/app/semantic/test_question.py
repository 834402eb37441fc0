"""Question of a request: its last text alone may be said in other words; all else separates questions."""

import pytest
from msgspec.structs import replace

from maitred.app.request.tokenized import TokenizedRequest
from maitred.app.request.upstream_request import UpstreamRequest
from maitred.app.semantic.question import make_question
from maitred.cache import answer_key
from maitred.core.inference import Conversation, InferenceRequest
from maitred.core.request import SamplingParams
from maitred.core.tools import Tool, ToolRules
from tests.unit.cache.test_answer_key import (
    OTHER_CONVERSATION,
    OTHER_REQUEST,
    OTHER_RULES,
    OTHER_SAMPLING,
    OTHER_TOOL,
    RULES,
)

TEXT = "How can I order a new card for the savings account of my wife?"
OTHER_TEXT = "What must I do so that my wife gets another card for her savings account?"
SYSTEM = {"role": "system", "content": "You answer customers of a bank."}
HISTORY = [
    SYSTEM,
    {"role": "user", "content": "Hello, is anybody there?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "greet"}}]},
    {"role": "tool", "tool_call_id": "a", "content": "the customer is known"},
    {"role": "assistant", "content": "Good morning. How can I help you?"},
]
PARTS, SCOPE = [b"producer", "epoch"], ["a-model", "tenant", "acme"]


def user(content=TEXT, **others):
    return {"role": "user", "content": content, **others}


def at_engine(messages=None, *, rules=RULES, choices=1, request=None, **conversation):
    """A request to an engine of this gateway, whose tokens do not matter here."""
    prompt = Conversation([*HISTORY, user()] if messages is None else messages, **conversation)
    request = replace(request or InferenceRequest("a-model", [], SamplingParams(0, 0)), prompts=[prompt])
    return TokenizedRequest(None, None, request, [[1]], 1, choices, [16], rules)


def at_server(messages=None, *, choices=1, request=None, **fields):
    """A request to a server of others."""
    messages = [*HISTORY, user()] if messages is None else messages
    request = replace(
        request or InferenceRequest("a-model", [], SamplingParams(0, 0)), prompts=[Conversation(messages)]
    )
    return UpstreamRequest(None, None, request, {"messages": messages, **fields}, [[1]], [16], 1, choices, None)


BOTH = pytest.mark.parametrize("prepare", [at_engine, at_server])


def question_of(prepared, parts=PARTS, scope=SCOPE):
    return make_question(prepared, parts, scope)


def partition(prepared):
    return question_of(prepared).partition


@BOTH
def test_the_last_text_alone_changes_nothing_but_the_text(prepare):
    first, second = question_of(prepare()), question_of(prepare([*HISTORY, user(OTHER_TEXT)]))
    assert (first.text, second.text) == (TEXT, OTHER_TEXT)
    assert first.wording != second.wording
    assert (first.partition, first.scope, first.model) == (second.partition, second.scope, "a-model")
    assert first.scope == '["a-model","tenant","acme"]'


@BOTH
def test_a_text_in_parts_is_the_same_question(prepare):
    parts = [{"type": "text", "text": part} for part in TEXT.rsplit(" ", 1)]
    found = question_of(prepare([*HISTORY, user(parts)]))
    assert found.text.split() == TEXT.split()
    assert found.partition == partition(prepare())


@BOTH
@pytest.mark.parametrize(
    "messages",
    [
        [*HISTORY[1:], user()],
        [{**SYSTEM, "content": f"{SYSTEM['content']} "}, *HISTORY[1:], user()],
        [{**SYSTEM, "role": "developer"}, *HISTORY[1:], user()],
        [*HISTORY[:1], user(" Hello, is anybody there?"), *HISTORY[2:], user()],
        [*HISTORY[:3], {**HISTORY[3], "content": "the customer is not known"}, HISTORY[4], user()],
        [*HISTORY[:3], {**HISTORY[3], "tool_call_id": "b"}, HISTORY[4], user()],
        [*HISTORY, HISTORY[4], user()],
        [*HISTORY[:4], {**HISTORY[4], "content": "Good morning.  How can I help you?"}, user()],
        [HISTORY[0], *HISTORY[4:], *HISTORY[1:4], user()],
        [*HISTORY, user(name="Ann")],
        [user()],
    ],
)
def test_whatever_stands_before_the_last_text_or_beside_it_separates(prepare, messages):
    assert partition(prepare(messages)) != partition(prepare())


@BOTH
def test_what_computes_the_answer_and_who_shares_it_separates(prepare):
    assert question_of(prepare(), [b"another producer", "epoch"]).partition != partition(prepare())
    assert question_of(prepare(), [*PARTS, "tenant", "other"]).partition != partition(prepare())
    assert question_of(prepare(), scope=["a-model", "tenant", "other"]).scope != question_of(prepare()).scope


@BOTH
@pytest.mark.parametrize("name", InferenceRequest.__struct_fields__)
def test_a_field_of_a_request_separates_or_stands_on_the_list(prepare, name):
    if name == "prompts":
        return  # see the messages
    other = replace(InferenceRequest("a-model", [], SamplingParams(0, 0)), **{name: OTHER_REQUEST[name]})
    assert (partition(prepare(request=other)) != partition(prepare())) is (name not in answer_key.EXCLUDED_FIELDS)


@BOTH
@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_every_sampling_parameter_separates(prepare, name):
    sampling = replace(SamplingParams(0, 0), **{name: OTHER_SAMPLING[name]})
    other = InferenceRequest("a-model", [], sampling)
    assert partition(prepare(request=other)) != partition(prepare())


@pytest.mark.parametrize("name", sorted(set(Conversation.__struct_fields__) - {"messages", "continue_final_message"}))
def test_a_field_of_a_conversation_separates(name):
    assert partition(at_engine(**{name: OTHER_CONVERSATION[name]})) != partition(at_engine())


@pytest.mark.parametrize("name", ToolRules.__struct_fields__)
def test_every_rule_for_tools_separates(name):
    assert partition(at_engine(rules=replace(RULES, **{name: OTHER_RULES[name]}))) != partition(at_engine())
    assert partition(at_engine(rules=None)) != partition(at_engine())


@pytest.mark.parametrize("name", Tool.__struct_fields__)
def test_a_field_of_a_tool_separates_or_stands_on_the_list(name):
    (tool,) = RULES.tools
    other = replace(RULES, tools=(replace(tool, **{name: OTHER_TOOL[name]}),))
    differs = partition(at_engine(rules=other)) != partition(at_engine())
    assert differs is (name not in answer_key.EXCLUDED_TOOL_FIELDS)


def test_any_field_that_a_server_gets_separates_unless_it_stands_on_the_list():
    assert partition(at_server(a_new_field=1)) != partition(at_server())
    assert partition(at_server(tools=[{"type": "function"}])) != partition(at_server())
    for name in answer_key.EXCLUDED_SENT_FIELDS:
        assert partition(at_server(**{name: "x"})) == partition(at_server())


@BOTH
@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
        [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}],
        [TEXT],
        "",
        "And for my wife?",
        "it is not what I wanted to have for my account and my wife",
        "Wie bekomme ich eine neue Karte für mein Konto",
        "What is the way to do this? " * 20,
    ],
)
def test_these_contents_are_no_question(prepare, content):
    assert question_of(prepare([*HISTORY, user(content)])) is None


@BOTH
def test_only_the_last_text_of_a_user_with_one_answer_is_a_question(prepare):
    assert question_of(prepare([*HISTORY])) is None, "an assistant has the last word"
    assert question_of(prepare([SYSTEM, {"role": "tool", "content": TEXT}])) is None
    assert question_of(prepare([])) is None
    assert question_of(prepare(choices=2)) is None


def test_a_prompt_without_messages_is_no_question():
    request = InferenceRequest("a-model", [TEXT], SamplingParams(0, 0))
    assert question_of(TokenizedRequest(None, None, request, [[1]], 1, 1, [16])) is None


def test_an_answer_that_is_begun_is_continued_for_its_own_question():
    assert question_of(at_engine(continue_final_message=True)) is None


@BOTH
def test_a_short_question_needs_no_history_and_a_short_follow_up_has_none_of_its_own(prepare):
    short = "How do I get a card?"
    assert question_of(prepare([SYSTEM, user(short)])) is not None
    assert question_of(prepare([*HISTORY, user(short)])) is None


@BOTH
def test_what_has_no_place_in_a_digest_makes_no_question(prepare):
    assert question_of(prepare([{"role": "system", "content": "\ud800"}, user()])) is None
    assert question_of(prepare([{**SYSTEM, "number": 1 << 80}, user()])) is None

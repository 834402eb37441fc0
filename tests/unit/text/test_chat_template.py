"""Chat templates as model publishers write them."""

from datetime import datetime

import pytest
from transformers.utils import chat_template_utils

from maitred.core.errors import ConfigInvalid, InvalidRequest
from maitred.text.chat_template import ChatTemplate
from tests.support.tokenizers import byte_level

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def render(source, messages=TURNS, **extra):
    now = datetime(2024, 7, 26).astimezone
    return ChatTemplate(source, {"eos_token": "</s>"}, now=now).render(messages, **extra)


def test_the_bundled_template():
    template = byte_level().chat_template
    assert template.render(TURNS[:1]) == "<|begin|><|user|>a<|end|><|assistant|>"
    assert template.render(TURNS, add_generation_prompt=False) == "<|begin|><|user|>a<|end|><|assistant|>b<|end|>"


def test_blocks_leave_no_lines_behind():
    source = "{% for m in messages %}\n    {%- if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    assert render(source) == "a\n"


def test_loops_can_be_left():
    assert render("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}") == "a"


def test_a_template_gets_its_own_arguments():
    source = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ style }}"
    assert render(source) == ""
    assert render(source, arguments={"enable_thinking": False, "style": [1]}) == "<think></think>[1]"
    assert render("{{ messages | length }}", arguments={"messages": []}) == "2"
    with pytest.raises(InvalidRequest, match="eos_token is a token of the model's") as refusal:
        render(source, arguments={"eos_token": "x"})
    assert refusal.value.param == "chat_template_kwargs"


def test_json_is_not_escaped_for_html():
    assert render("{{ messages[0] | tojson }}", [{"role": "user", "content": "<é>"}]) == (
        '{"role": "user", "content": "<é>"}'
    )
    assert render("{{ tools | tojson(indent=1) }}", tools=[{"a": 1}]) == '[\n {\n  "a": 1\n }\n]'


@pytest.mark.parametrize(
    "options",
    ["", "ensure_ascii=False", "ensure_ascii=True", "False, 2", "indent=2", "separators=(',', ':')", "sort_keys=True"],
)
def test_json_is_written_as_by_the_reference(options):
    source = "{{ messages[0] | tojson(" + options + ") }}"
    oracle = chat_template_utils._compile_jinja_template(source)
    messages = [{"role": "user", "content": "Köln <é> 世"}]
    assert render(source, messages) == oracle.render(messages=messages)


CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"Köln"}'}},
    {"id": "c2", "type": "function", "function": {"name": "hear", "arguments": '{"at":"Rome"}'}},
]
ONE_CALL = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": CALLS[:1]}]
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<|U|>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m['content'] is none %}<|A|>{% for c in m.tool_calls %}CALL "
    "{{ c['function']['name'] + ' ' + c['function']['arguments'] }}{% endfor %}<|e|>{% endif %}"
    "{% if m.role == 'assistant' and m['content'] is not none %}<|A|>{{ m['content'] }}<|e|>{% endif %}"
    "{% if m.role == 'tool' %}OUT {{ m.content }}{% endif %}{% endfor %}"
)
QWEN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content + '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}'
    "{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content %}<|{{ m.role }}|>{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}"
)
FIRST = (
    "{% for m in messages %}{% if m.tool_calls %}CALL {{ m.tool_calls[0].function.name }} "
    "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
)
RESULTS = [
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
    {"role": "tool", "tool_call_id": "c2", "content": "2"},
]


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (DEEPSEEK, '<|U|>a<|A|>CALL look {"at":"Köln"}<|e|>'),
        (QWEN, '<|user|>a<|assistant|><tool_call>{"name": "look", "arguments": {"at": "Köln"}}'),
        (EITHER, "<|user|>aCALL look at=Köln"),
        (FIRST, '<|user|>aCALL look {"at": "Köln"}'),
    ],
)
def test_a_call_without_text_is_told_as_the_template_expects(source, shown, content):
    assert render(source, [ONE_CALL[0], {**ONE_CALL[1], "content": content}]) == shown


def test_a_text_beside_calls_is_told_apart_where_the_template_would_drop_the_calls():
    said = [TURNS[0], {**ONE_CALL[1], "content": "Let me see."}]
    assert render(DEEPSEEK, said) == '<|U|>a<|A|>Let me see.<|e|><|A|>CALL look {"at":"Köln"}<|e|>'
    assert render(QWEN, said).startswith("<|user|>a<|assistant|>Let me see.<tool_call>")


def test_calls_that_a_template_would_drop_are_told_one_by_one():
    asked = {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert render(FIRST, [TURNS[0], asked, *RESULTS]) == (
        '<|user|>aCALL look {"at": "Köln"}<|tool|>1CALL hear {"at": "Rome"}<|tool|>2'
    )
    assert render(DEEPSEEK, [TURNS[0], asked, *RESULTS]).count("CALL") == 2


def test_arguments_that_are_no_json_are_told_as_they_are():
    broken = [TURNS[0], {**ONE_CALL[1], "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": "{a"}}]}]
    assert render(FIRST, broken) == '<|user|>aCALL look "{a"'


def test_content_is_a_list_of_parts_where_the_template_reads_only_those():
    source = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    )
    assert render(source + "{% endfor %}", TURNS) == "ab"


def test_conversations_with_tools_have_a_template_of_their_own():
    template = ChatTemplate("plain", {}, tool_source="{{ tools | tojson }}")
    assert template.knows_tools
    assert template.render(TURNS) == "plain"
    assert template.render(TURNS, tools=[]) == "[]"


def test_templates_know_the_date_and_further_variables():
    assert render("{{ strftime_now('%d %B %Y') }} {{ thinking }} {{ eos_token }}", arguments={"thinking": True}) == (
        "26 July 2024 True </s>"
    )


@pytest.mark.parametrize(
    ("source", "times"),
    [
        ("{{ strftime_now('%d %B %Y') }} {{ strftime_now( \"%H\" ) }}", ["15", "26 July 2024"]),
        ("{% if strftime_now is defined %}{% endif %}", []),
        ("{% set how = '%Y' %}{{ strftime_now(how) }}", [datetime(2024, 7, 26, 15).strftime("%c")]),
    ],
)
def test_what_a_template_may_write_of_the_time_is_known(source, times):
    assert ChatTemplate(source, {}, now=lambda: datetime(2024, 7, 26, 15)).times() == times


def test_generation_marks_show_what_is_between():
    assert render("{% generation %}{{ messages[1].content }}{% endgeneration %}!") == "b!"


@pytest.mark.parametrize(
    ("source", "shown"),
    [("{{ messages[0].role }}", "system"), ("{# developer #}{{ messages[0].role }}", "developer")],
)
def test_developers_are_the_system_where_the_template_knows_none(source, shown):
    assert render(source, [{"role": "developer", "content": "a"}]) == shown


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('Turns must alternate.') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_failing_templates_are_a_fault_of_the_messages(source):
    with pytest.raises(InvalidRequest, match="chat template cannot write these messages") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_says_why_it_refuses():
    with pytest.raises(InvalidRequest, match=r"messages: Turns must alternate\."):
        render("{{ raise_exception('Turns must alternate.') }}")


def test_a_template_that_does_not_compile_is_the_operators():
    with pytest.raises(ConfigInvalid, match="does not compile"):
        ChatTemplate("{% if %}", {})


CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA2 = """{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}
{%- else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
TRIMMED = """{% for m in messages %}<{{ m.role }}>
{{ m.content | trim }}</{{ m.role }}>{% endfor %}"""
TWICE = "{% for m in messages %}{{ m.content }}|{{ m.content }}</s>{% endfor %}"
PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}</s>{% endfor %}"


@pytest.mark.parametrize("begun", ["b", "The answer is", "b ", " b\n", "b<|im_end|>", ""])
@pytest.mark.parametrize("source", [CHATML, LLAMA2, TRIMMED, TWICE], ids=["chatml", "llama2", "trimmed", "twice"])
def test_a_message_is_continued_as_by_the_reference(source, begun):
    messages = [TURNS[0], {"role": "assistant", "content": begun}]
    (expected,), _ = chat_template_utils.render_jinja_template(
        [messages], chat_template=source, continue_final_message=True, eos_token="</s>"
    )
    shown = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert shown == expected.replace("CONTINUE_FINAL_MESSAGE_TAG ", "")


def test_a_message_in_parts_is_continued():
    assert render(PARTS, add_generation_prompt=False, continue_final_message=True) == "a</s>b"


def test_a_message_that_the_template_leaves_out_is_not_continued():
    with pytest.raises(InvalidRequest, match="does not write the end of the last message") as refusal:
        render("{{ messages[0].content }}", add_generation_prompt=False, continue_final_message=True)
    assert refusal.value.param == "continue_final_message"

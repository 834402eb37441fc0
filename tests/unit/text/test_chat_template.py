"""Chat templates as model publishers write them."""

from datetime import datetime

import pytest

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


def test_templates_know_the_date_and_further_variables():
    assert render("{{ strftime_now('%d %B %Y') }} {{ thinking }} {{ eos_token }}", arguments={"thinking": True}) == (
        "26 July 2024 True </s>"
    )


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

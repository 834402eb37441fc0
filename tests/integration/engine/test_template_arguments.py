"""What a caller tells the chat template, from the request to the tokens that the model reads."""

import shutil

import httpx
import pytest

from maitred.config.tree import BUNDLED_MODEL
from maitred.testing.server_process import serving

TEMPLATE = """{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{%- endif %}{%- endif %}"""
"""The part of Qwen 3's that matters here."""
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "thinker"
    shutil.copytree(BUNDLED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(str(folder), "--kv-memory", "32MiB", "--max-sequences", "4") as running:
        yield running


def prompt_of(server, **fields):
    """What a chat request with these fields makes the model read, and the request's own count of it."""
    with httpx.Client(base_url=server.url, timeout=300) as client:
        body = {"model": "thinker", "messages": MESSAGES, "max_tokens": 1, **fields}
        count = client.post("/v1/chat/completions", json=body).raise_for_status().json()["usage"]["prompt_tokens"]
        arguments = {"enable_thinking": fields["enable_thinking"]} if "enable_thinking" in fields else {}
        arguments |= fields.get("chat_template_kwargs", {})
        body = {"messages": MESSAGES, "chat_template_kwargs": arguments}
        tokens = client.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        return client.post("/detokenize", json={"tokens": tokens}).json()["prompt"], len(tokens) == count


@pytest.mark.parametrize(
    "fields", [{"chat_template_kwargs": {"enable_thinking": False, "unknown": 1}}, {"enable_thinking": False}]
)
def test_the_model_reads_what_its_template_makes_of_it(server, fields):
    plain, counted = prompt_of(server)
    assert counted
    assert "<think>" not in plain
    arguments, counted = prompt_of(server, **fields)
    assert arguments == plain + "<think></think>"
    assert counted


def test_thinking_is_left_on_where_it_is_asked_for(server):
    assert prompt_of(server, enable_thinking=True) == prompt_of(server)


def test_what_is_not_the_callers_to_say_is_refused(server):
    body = {"model": "thinker", "messages": MESSAGES, "chat_template_kwargs": {"tools": []}}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"enable_thinking": False}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": 1, "effort": 2}, "verbosity": "low"},
            "verbosity, chat_template_kwargs.thinking, chat_template_kwargs.effort",
        ),
    ],
)
def test_what_the_template_does_not_read_is_named(server, fields, named):
    body = {"model": "thinker", "messages": MESSAGES, "max_tokens": 1, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).raise_for_status()
    assert answer.headers.get("x-maitred-ignored") == named

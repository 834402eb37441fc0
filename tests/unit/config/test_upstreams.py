"""Models on other servers, as they are configured."""

import pytest

from maitred.config.loader import load
from maitred.config.render import to_yaml
from maitred.core.errors import ConfigInvalid

SOUND = """
models:
  far:
    context_tokens: 4096
    upstreams:
      - url: https://api.example.com/v1
        dialect: openai
        model: theirs
        api_key: {env: FAR_KEY}
        headers: {OpenAI-Organization: org}
        parameters: {temperature: 0.5, chat_template_kwargs: {enable_thinking: false}, stop: [a, "1"]}
      - {url: "http://127.0.0.1:8000/v1", api_key: {env: FAR_KEY}, idle_timeout_s: 500ms}
"""
ENV = {"FAR_KEY": "sk-very-secret"}


def read(tmp_path, text, env=ENV):
    path = tmp_path / "maitred.yaml"
    path.write_text(text)
    return load(path, env)


def faults(tmp_path, upstream):
    with pytest.raises(ConfigInvalid) as caught:
        read(tmp_path, f"models: {{far: {{upstreams: {upstream}}}}}")
    return caught.value.message


def test_a_sound_one(tmp_path):
    loaded = read(tmp_path, SOUND)
    first, second = loaded.config.models["far"].upstreams
    assert (first.dialect, first.model, first.api_key.reveal()) == ("openai", "theirs", "sk-very-secret")
    assert first.parameters == {
        "temperature": 0.5,
        "chat_template_kwargs": {"enable_thinking": False},
        "stop": ["a", "1"],
    }
    assert (second.dialect, second.idle_timeout_s) == ("generic", 0.5)
    assert not loaded.config.has_engine


def test_the_engine_runs_where_a_model_is_named_for_it(tmp_path):
    assert read(tmp_path, "{}").config.has_engine
    assert read(tmp_path, SOUND + "\nmodel: {path: ./mine}").config.has_engine
    assert read(tmp_path, SOUND + "\nmodel: {engine_address: 'tcp:127.0.0.1:9000'}").config.has_engine


def test_what_is_shown_can_be_read_back_and_has_no_secret(tmp_path):
    loaded = read(tmp_path, SOUND)
    shown = to_yaml(loaded)
    assert "sk-very-secret" not in shown + repr(loaded)
    assert read(tmp_path, shown).config.models == loaded.config.models


@pytest.mark.parametrize(
    ("upstream", "text"),
    [
        ("[]", "Must name at least one server."),
        ("[{url: 'ftp://there/v1'}]", "is not the URL of an HTTP server"),
        ("[{url: 'there:8000'}]", "is not the URL of an HTTP server"),
        ("[{url: 'http://there:99999/v1'}]", "is not a URL"),
        ("[{url: 'https://me:pass@there/v1'}]", "Give the credential as `api_key`"),
        ("[{url: 'https://there/v1#x'}]", "has a fragment"),
        ("[{url: 'http://there/v1', api_key: {env: FAR_KEY}}]", "would go over the network in the open"),
        ("[{url: 'https://there/v1', api_key: sk-very-secret}]", "Secrets are given by reference"),
        ("[{url: 'https://there/v1', api_key: {env: NONE}}]", "The environment variable NONE is not set"),
        ("[{url: 'https://there/v1', headers: {Authorization: x}}]", "holds a credential"),
        ("[{url: 'https://there/v1', headers: {x team: a}}]", "no name of a header"),
        ('[{url: "https://there/v1", headers: {x-team: "a\\r\\nhost: b"}}]', "control character"),
        ("[{url: 'https://there/v1', headers: {Host: x}}]", "is set by the connection itself"),
        ("[{url: 'https://there/v1'}, {url: 'https://there/v2'}]", "Another upstream of this model is called 'there'"),
        ("[{url: 'https://there/v1', dialect: vlm}]", "did you mean vllm?"),
        ("[{dialect: vllm}]", "Must be set"),
    ],
)
def test_faults_are_reported(tmp_path, upstream, text):
    message = faults(tmp_path, upstream)
    assert text in message
    assert "pass@" not in message
    assert "sk-very-secret" not in message


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
def test_answers_go_on_by_their_text_where_the_server_can(tmp_path, dialect):
    upstream = f"{{url: 'http://127.0.0.1:1/v1', dialect: {dialect}}}"
    loaded = read(tmp_path, f"models: {{far: {{continuation: reprompt, upstreams: [{upstream}]}}}}")
    assert loaded.config.models["far"].reprompts


@pytest.mark.parametrize("how", ["dialect: generic", "dialect: openai", "kind: anthropic"])
def test_and_where_the_operator_says_so(tmp_path, how):
    upstream = f"{{url: 'http://127.0.0.1:1/v1', {how}, continues_answers: true}}"
    loaded = read(tmp_path, f"models: {{far: {{continuation: reprompt, upstreams: [{upstream}]}}}}")
    assert loaded.config.models["far"].reprompts
    assert not loaded.config.models["far"].continues_at_fallback


def test_and_at_a_fallback_whoever_began_them(tmp_path):
    upstream = "{url: 'http://127.0.0.1:1/v1', kind: anthropic}"
    loaded = read(tmp_path, f"models: {{far: {{continuation: fallback, upstreams: [{upstream}]}}}}")
    assert loaded.config.models["far"].continues_at_fallback


@pytest.mark.parametrize("how", ["dialect: generic", "dialect: openai", "kind: anthropic"])
def test_and_nowhere_else(tmp_path, how):
    upstream = f"{{url: 'http://127.0.0.1:1/v1', {how}}}"
    with pytest.raises(ConfigInvalid, match="Those that are: vllm, sglang, llamacpp"):
        read(tmp_path, f"models: {{far: {{continuation: reprompt, upstreams: [{upstream}]}}}}")

"""Declarative files of Kong become ours, and every key has a fate."""

import pytest
import yaml

from maitred.config.loader import load
from maitred.core.errors import ConfigInvalid
from maitred.migration.report import KeyFate
from maitred.migration.target.kong import read_kong, read_kong_file

FILE = """
_format_version: "3.0"
services:
  - name: llm
    url: http://localhost:32000
    routes:
      - name: chat
        paths: [/chat]
        plugins:
          - name: ai-proxy
            config:
              route_type: llm/v1/chat
              auth: {header_name: Authorization, header_value: Bearer sk-literal-secret}
              model: {provider: openai, name: gpt-4o, options: {max_tokens: 512, temperature: 1.0, input_cost: 2.5}}
              logging: {log_statistics: true}
          - name: key-auth
            config: {key_names: [apikey]}
      - name: assistants
        paths: [/assistants]
        plugins:
          - name: ai-proxy-advanced
            config:
              balancer: {algorithm: priority, retries: 2, failover_criteria: [error, timeout]}
              targets:
                - route_type: llm/v1/chat
                  weight: 50
                  auth: {header_name: api-key, header_value: "{vault://env/azure-key}"}
                  model:
                    provider: azure
                    name: gpt-4o
                    options: {azure_instance: house, azure_deployment_id: gpt4o-eu, azure_api_version: "2024-06-01"}
                - route_type: llm/v1/chat
                  weight: 100
                  auth: {header_name: x-api-key, header_value: '${{ env "DECK_ANTHROPIC" }}'}
                  model: {provider: anthropic, name: claude-sonnet-4-5, options: {anthropic_version: "2023-06-01"}}
  - name: vectors
    plugins:
      - name: ai-proxy-advanced
        config:
          targets:
            - route_type: llm/v1/embeddings
              model_alias: embedder
              model: {provider: openai, name: text-embedding-3-small}
            - route_type: llm/v1/chat
              model_alias: talker
              model:
                provider: mistral
                name: m
                options: {mistral_format: ollama, upstream_url: "http://127.0.0.1:11434/v1/chat/completions"}
consumers:
  - username: anna
"""


def test_plugins_become_models_with_their_ranks(tmp_path):
    migration = read_kong(yaml.safe_load(FILE), {})
    file = tmp_path / "maitred.yaml"
    file.write_text(migration.yaml())
    config = load(file, {variable.name: "sk-set-by-hand" for variable in migration.report.variables}).config
    (chat,) = config.models["gpt-4o"].upstreams
    assert (chat.url, chat.parameters) == ("https://api.openai.com/v1", {"max_tokens": 512, "temperature": 1.0})
    assert config.admission.prices["gpt-4o"].prompt == 2.5
    (first,) = config.models["assistants"].upstreams
    (second,) = config.models["assistants (2)"].upstreams
    assert (first.kind, first.model) == ("anthropic", "claude-sonnet-4-5")
    assert (second.url, second.model) == ("https://house.openai.azure.com/openai/v1", "gpt4o-eu")
    assert [target.pool for target in config.routing.names["assistants"]] == ["assistants", "assistants (2)"]
    assert config.models["embedder"].mode == "embedding"
    assert (config.models["talker"].upstreams[0].dialect, config.dispatch.retries) == ("ollama", 2)


def test_credentials_are_references_and_none_is_written():
    migration = read_kong(yaml.safe_load(FILE), {})
    assert "sk-literal" not in migration.yaml() + migration.report.text()
    names = {variable.name for variable in migration.report.variables}
    assert {"AZURE_KEY", "DECK_ANTHROPIC", "OPENAI_API_KEY"} <= names


def test_every_key_has_one_fate():
    report = read_kong(yaml.safe_load(FILE), {}).report
    keys = [key for entry in report.entries for key in entry.keys]
    assert len(keys) == len(set(keys))
    assert [entry.path for entry in report.entries if not entry.is_known] == []
    text = report.text()
    assert "Declare callers and their keys in `tenants`" in text
    fates = {entry.path: entry.fate for entry in report.entries}
    assert fates["consumers"] is KeyFate.UNSUPPORTED


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{route_type: realtime/v1/realtime, model: {provider: openai, name: m}}", "realtime"),
        ("{model: {provider: nobody, name: m}}", "not known here"),
        ("{auth: {aws_access_key_id: a}, model: {provider: bedrock, name: m}}", "AWS_BEARER_TOKEN_BEDROCK"),
        ("{auth: {azure_use_managed_identity: true}, model: {provider: azure, name: m}}", "Entra ID"),
        ("{balancer: {algorithm: semantic}, targets: [{model: {provider: openai, name: m}}]}", "routing.auto"),
        ("{model: {provider: openai, name: m}, invented: 1}", "Not a setting that is known here"),
    ],
)
def test_what_has_no_counterpart_is_said(config, words):
    report = read_kong(yaml.safe_load(f"plugins: [{{name: ai-proxy-advanced, config: {config}}}]"), {}).report
    assert words in report.text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "Not valid YAML"),
        ("since: 2026-99-99", "Not valid YAML: month"),
        ("services: []", "no plugin"),
        ("[]", "no plugin"),
        (None, "No such file"),
    ],
)
def test_a_file_without_models_is_said(text, words, tmp_path):
    file = tmp_path / "kong.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigInvalid, match=words):
        read_kong_file(file, {})

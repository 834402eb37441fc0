"""Configs of Portkey's gateway become ours, and every key has a fate."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.config.loader import load
from maitred.core.errors import ConfigInvalid
from maitred.migration.report import KeyFate
from maitred.migration.source_keys import leaf_paths
from maitred.migration.target.portkey import read_portkey, read_portkey_file

FALLBACK = {
    "strategy": {"mode": "fallback", "on_status_codes": [429, 500]},
    "retry": {"attempts": 3, "on_status_codes": [429]},
    "cache": {"mode": "simple", "maxAge": 600},
    "targets": [
        {
            "strategy": {"mode": "loadbalance"},
            "targets": [
                {
                    "provider": "openai",
                    "apiKey": "sk-first-secret",
                    "weight": 0.7,
                    "overrideParams": {"model": "gpt-5"},
                },
                {
                    "provider": "azure-openai",
                    "virtual_key": "azure-1",
                    "resource_name": "house",
                    "deployment_id": "gpt5-eu",
                    "api_version": "2024-06-01",
                    "weight": 0.3,
                },
            ],
        },
        {
            "provider": "anthropic",
            "api_key": "sk-ant-second-secret",
            "override_params": {"model": "claude-sonnet-4-5", "max_tokens": 512},
            "request_timeout": 30000,
            "input_guardrails": ["x"],
        },
    ],
}


def checked(migration, tmp_path):
    """The configuration as the loader reads it."""
    file = tmp_path / "maitred.yaml"
    file.write_text(migration.yaml())
    return load(file, {variable.name: "sk-set-by-hand" for variable in migration.report.variables}).config


def test_strategies_become_models_and_names(tmp_path):
    migration = read_portkey(FALLBACK, {})
    config = checked(migration, tmp_path)
    first, second = config.models["gpt-5"].upstreams, config.models["gpt-5 (2)"].upstreams
    assert [(one.url, one.dialect, one.model) for one in first] == [
        ("https://api.openai.com/v1", "openai", None),
        ("https://house.openai.azure.com/openai/v1", "azure", "gpt5-eu"),
    ]
    assert [(one.kind, one.model, one.total_timeout_s) for one in second] == [("anthropic", "claude-sonnet-4-5", 30.0)]
    assert second[0].parameters == {"max_tokens": 512}
    assert [target.pool for target in config.routing.names["gpt-5"]] == ["gpt-5", "gpt-5 (2)"]
    assert (config.dispatch.retries, config.cache.ttl_s) == (3, 600)


def test_no_secret_is_written_and_virtual_keys_are_to_be_set():
    migration = read_portkey(FALLBACK, {})
    written = migration.yaml() + migration.report.text()
    assert "secret" not in written
    assert set(migration.environment.values()) == {"sk-first-secret", "sk-ant-second-secret"}
    assert "AZURE_API_KEY" in {variable.name for variable in migration.report.variables}


def test_every_key_has_one_fate():
    report = read_portkey(FALLBACK, {}).report
    keys = [key for entry in report.entries for key in entry.keys]
    assert len(keys) == len(set(keys))
    assert not [entry for entry in report.entries if not entry.is_known]
    fates = {entry.path: entry.fate for entry in report.entries}
    assert fates["targets[1].input_guardrails"] is KeyFate.UNSUPPORTED


def test_a_config_without_a_model_leaves_it_to_the_caller(tmp_path):
    migration = read_portkey({"provider": "openai", "api_key": "sk-x-secret"}, {})
    config = checked(migration, tmp_path)
    (target,) = config.routing.names["*"]
    assert (target.pool, target.model) == ("any model", "*")


def test_targets_of_conditions_are_models_that_clients_name(tmp_path):
    document = {
        "strategy": {
            "mode": "conditional",
            "conditions": [{"query": {"metadata.plan": {"$eq": "paid"}}, "then": "big"}],
            "default": "small",
        },
        "targets": [
            {"name": "big", "provider": "openai", "override_params": {"model": "gpt-5"}},
            {"name": "small", "provider": "groq", "override_params": {"model": "llama"}},
        ],
    }
    migration = read_portkey(document, {})
    config = checked(migration, tmp_path)
    assert set(config.models) == {"big", "small"}
    assert config.routing.aliases == {"default": "small"}
    assert "clients name it" in migration.report.text()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"provider": "openai-of-mars"}, "not known here"),
        ({"virtual_key": "vk-1"}, "Write `provider`"),
        ({"provider": "vertex-ai", "override_params": {"model": "claude-x"}}, "rawPredict"),
        ({"provider": "stability"}, "Images, sound and video"),
    ],
)
def test_what_cannot_be_asked_is_said(target, words):
    report = read_portkey({"strategy": {"mode": "single"}, "targets": [target]}, {}).report
    assert words in report.text()
    assert report.missing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Not valid JSON"),
        ("[]", "neither `targets`"),
        ('{"model_list": []}', "neither `targets`"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_config_is_said(text, words, tmp_path):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigInvalid, match=words):
        read_portkey_file(file, {})


def test_an_answer_of_the_admin_api_is_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"success": True, "data": {"config": FALLBACK}}))
    assert "gpt-5" in read_portkey_file(file, {}).config["models"]


words = st.sampled_from(
    [
        *(
            "strategy",
            "targets",
            "provider",
            "api_key",
            "mode",
            "retry",
            "attempts",
            "cache",
            "override_params",
            "weight",
        ),
        *("fallback", "loadbalance", "openai", "azure-openai", "conditional", "name", "conditions", "default", "other"),
    ]
)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(words, below, max_size=5),
    max_leaves=20,
)


@given(st.dictionaries(words, documents, max_size=6))
@settings(max_examples=200, deadline=None)
def test_whatever_stands_there_has_one_fate_and_nothing_breaks(document):
    migration = read_portkey(document, {})
    keys = [key for entry in migration.report.entries for key in entry.keys]
    assert sorted(keys) == sorted(leaf_paths(document))
    assert yaml.safe_load(migration.yaml()) in (migration.config, None)

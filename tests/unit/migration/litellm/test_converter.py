"""A configuration of LiteLLM's proxy becomes ours, without a secret, and each of its keys has a fate."""

from pathlib import Path

import pytest
import yaml

from maitred.config.loader import load
from maitred.core.errors import ConfigInvalid
from maitred.migration.litellm.converter import Migration, read_litellm, read_litellm_file
from maitred.migration.report import KeyFate
from maitred.migration.source_keys import leaf_paths

SAMPLES = Path(__file__).parents[3] / "data" / "litellm"


def converted(text: str, **env: str) -> Migration:
    return read_litellm(yaml.safe_load(text), env)


def fate_of(migration: Migration, key: str) -> KeyFate:
    (fate,) = [entry.fate for entry in migration.report.entries if key in entry.keys]
    return fate


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_of_a_sample_is_known_and_the_result_passes_all_checks(sample: Path, tmp_path: Path):
    migration = read_litellm_file(sample, {})
    assert [entry.path for entry in migration.report.entries if not entry.is_known] == []
    keys = [key for entry in migration.report.entries for key in entry.keys if ":" not in key]
    assert sorted(keys) == sorted(leaf_paths(yaml.safe_load(sample.read_text())))
    written = tmp_path / "maitred.yaml"
    written.write_text(migration.yaml())
    urls = {each.name: "redis://127.0.0.1:6379" for each in migration.report.variables if each.name.endswith("_URL")}
    loaded = load(written, {**{each.name: "sk-1" for each in migration.report.variables}, **urls})
    assert loaded.config.models
    assert "literal" not in migration.yaml() + migration.report.text()


def test_deployments_of_one_name_are_the_upstreams_of_one_model():
    migration = converted("""
        model_list:
          - model_name: chat
            litellm_params: {model: azure/one, api_base: "https://a.openai.azure.com/", api_key: os.environ/A}
          - model_name: chat
            litellm_params: {model: openai/gpt-4o, api_key: os.environ/B, temperature: 0.2, organization: org-1}
          - model_name: chat
            litellm_params: {model: anthropic/claude-sonnet-4-5, timeout: 20, stream_timeout: 5}
    """)
    assert migration.config["models"]["chat"]["upstreams"] == [
        {"url": "https://a.openai.azure.com/openai/v1", "dialect": "azure", "model": "one", "api_key": {"env": "A"}},
        {
            "url": "https://api.openai.com/v1",
            "dialect": "openai",
            "model": "gpt-4o",
            "api_key": {"env": "B"},
            "parameters": {"temperature": 0.2},
            "headers": {"OpenAI-Organization": "org-1"},
        },
        {
            "url": "https://api.anthropic.com/v1",
            "kind": "anthropic",
            "model": "claude-sonnet-4-5",
            "api_key": {"env": "ANTHROPIC_API_KEY"},
            "total_timeout_s": 20.0,
            "first_part_timeout_s": 5.0,
        },
    ]


def test_deployments_of_a_later_order_are_asked_second():
    migration = converted("""
        model_list:
          - {model_name: chat, litellm_params: {model: openai/second, order: 2}}
          - {model_name: chat, litellm_params: {model: openai/first, order: 1}}
    """)
    models = migration.config["models"]
    assert [models[pool]["upstreams"][0]["model"] for pool in ("chat", "chat (2)")] == ["first", "second"]
    assert migration.config["routing"]["names"]["chat"] == [{"pool": "chat"}, {"pool": "chat (2)"}]


def test_a_literal_key_is_given_by_a_variable_and_kept_in_memory_only():
    migration = converted("""
        model_list:
          - {model_name: gpt-4o, litellm_params: {model: openai/gpt-4o, api_key: sk-very-secret}}
          - {model_name: other, litellm_params: {model: openai/gpt-4o, api_key: sk-very-secret}}
          - {model_name: gpt-4o, litellm_params: {model: openai/gpt-4o-b, api_key: sk-another-one}}
    """)
    assert "secret" not in migration.yaml() + migration.report.text()
    assert migration.environment == {"GPT_4O_API_KEY": "sk-very-secret", "GPT_4O_API_KEY_2": "sk-another-one"}
    assert migration.config["models"]["other"]["upstreams"][0]["api_key"] == {"env": "GPT_4O_API_KEY"}


@pytest.mark.parametrize(
    "params",
    [
        "{model: openai/m, api_base: 'http://10.1.1.1:8000/v1', api_key: sk-very-secret}",
        "{model: openai/m, extra_headers: {Authorization: Bearer sk-very-secret, X-Api-Key: sk-very-secret}}",
        "{model: openai/m, some_token: sk-very-secret, nested: {a: [os.environ/SECRET]}}",
        "{model: bedrock/m, aws_access_key_id: sk-very-secret, aws_secret_access_key: sk-very-secret}",
        "{model: openai/m, extra_body: {password: sk-very-secret}}",
        "{model: openai/m, my_param: sk-very-secret, nested: {a: Bearer sk-very-secret}}",
        "{model: openai/m, extra_headers: {X-Team: sk-very-secret}}",
        "{model: openai/m, api_base: 'https://x.example/v1?key=sk-very-secret'}",
        "{model: openai/m, api_base: 'https://user:sk-very-secret@x.example/v1'}",
    ],
)
def test_what_may_be_a_secret_is_not_written(params: str, tmp_path: Path):
    migration = converted(f"model_list: [{{model_name: m, litellm_params: {params}}}]")
    assert "very-secret" not in migration.yaml() + migration.report.text()
    written = tmp_path / "maitred.yaml"
    written.write_text(migration.yaml())
    load(written, {each.name: "sk-1" for each in migration.report.variables})


@pytest.mark.parametrize(
    ("params", "url", "model"),
    [
        ("{model: groq/llama-3.3-70b}", "https://api.groq.com/openai/v1", "llama-3.3-70b"),
        ("{model: ollama_chat/llama3}", "http://localhost:11434/v1", "llama3"),
        ("{model: hosted_vllm/org/m, api_base: 'http://0.0.0.0:8000/v1'}", "http://127.0.0.1:8000/v1", "org/m"),
        ("{model: gpt-4o}", "https://api.openai.com/v1", "gpt-4o"),
        ("{model: claude-sonnet-4-5}", "https://api.anthropic.com/v1", "claude-sonnet-4-5"),
        ("{model: gemini/gemini-2.5-pro}", "https://generativelanguage.googleapis.com/v1beta/openai", "gemini-2.5-pro"),
        (
            "{model: bedrock/converse/openai.gpt-oss-120b-1:0, aws_region_name: eu-west-1}",
            "https://bedrock-runtime.eu-west-1.amazonaws.com/openai/v1",
            "openai.gpt-oss-120b-1:0",
        ),
        (
            "{model: vertex_ai/gemini-2.5-pro, vertex_project: p, vertex_location: global}",
            "https://aiplatform.googleapis.com/v1/projects/p/locations/global/endpoints/openapi",
            "google/gemini-2.5-pro",
        ),
        (
            "{model: azure/d, api_base: 'https://openai-x.openai.azure.com/openai/deployments/d?api-version=2024-02-01'}",
            "https://openai-x.openai.azure.com/openai/v1",
            "d",
        ),
        (
            "{model: azure_ai/claude-sonnet-4-5, api_base: 'https://r.services.ai.azure.com/anthropic'}",
            "https://r.services.ai.azure.com/anthropic/v1",
            "claude-sonnet-4-5",
        ),
        ("{model: x/m, custom_llm_provider: openai}", "https://api.openai.com/v1", "x/m"),
        ("{model: new-provider/m, api_base: 'https://api.new.example/v1'}", "https://api.new.example/v1", "m"),
    ],
)
def test_providers_are_asked_at_their_own_addresses(params: str, url: str, model: str):
    migration = converted(f"model_list: [{{model_name: name, litellm_params: {params}}}]")
    (upstream,) = migration.config["models"]["name"]["upstreams"]
    assert (upstream["url"], upstream["model"]) == (url, model)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("{model_name: m, litellm_params: {model: sagemaker/m}}", "SageMaker"),
        ("{model_name: m, litellm_params: {model: unheard-of/m}}", "api_base"),
        ("{model_name: m, litellm_params: {model: openai/gpt-realtime}}", "realtime"),
        ("{model_name: m, litellm_params: {model: openai/x}, model_info: {mode: rerank}}", "For ranking"),
        ("{model_name: m, litellm_params: {model: anthropic/x}, model_info: {mode: embedding}}", "mode `embedding`"),
        ("{model_name: m, litellm_params: {model: vertex_ai/claude-sonnet-4}}", "rawPredict"),
        ("{model_name: m}", "names no model"),
        ("{litellm_params: {model: openai/m}}", "model_name"),
    ],
)
def test_what_cannot_be_asked_is_said_with_what_to_do(item: str, words: str):
    migration = converted(f"model_list: [{item}]")
    assert "models" not in migration.config
    assert all(entry.fate is KeyFate.UNSUPPORTED for entry in migration.report.entries)
    assert words in migration.report.text()
    assert migration.report.missing


@pytest.mark.parametrize(
    ("params", "info", "mode", "price"),
    [
        ("{model: openai/text-embedding-3, input_cost_per_token: 2e-8}", "{id: a}", "embedding", {"prompt": 0.02}),
        (
            "{model: azure/speak}",
            "{mode: audio_speech, input_cost_per_character: 1.5e-5}",
            "audio_speech",
            {"characters": 15},
        ),
        ("{model: whisper-1, input_cost_per_second: 1e-4}", "{id: a}", "audio_transcription", {"audio_minute": 0.006}),
        (
            "{model: openai/x, output_cost_per_image: 0.04}",
            "{mode: image_edit}",
            "image_generation",
            {"images": {"*": 0.04}},
        ),
        ("{model: openai/omni-moderation-latest}", "{id: a}", "moderation", None),
        ("{model: openai/tts-1-hd}", "{mode: chat}", "chat", None),
    ],
)
def test_what_a_model_is_for_is_its_mode_or_seen_by_its_name(params: str, info: str, mode: str, price: object):
    migration = converted(f"model_list: [{{model_name: m, litellm_params: {params}, model_info: {info}}}]")
    assert migration.config["models"]["m"].get("mode", "chat") == mode
    assert migration.config.get("admission", {}).get("prices", {}).get("m") == price
    assert not [entry for entry in migration.report.entries if entry.fate is KeyFate.UNSUPPORTED]


def test_deployments_of_one_name_have_one_mode():
    items = [f"{{model_name: m, litellm_params: {{model: openai/{name}}}}}" for name in ("gpt-5", "whisper-1")]
    migration = converted(f"model_list: [{', '.join(items)}]")
    assert len(migration.config["models"]["m"]["upstreams"]) == 1
    assert "a name of its own" in migration.report.text()


def test_an_address_from_the_environment_is_read_now_or_missing():
    text = "model_list: [{model_name: m, litellm_params: {model: openai/m, api_base: os.environ/BASE}}]"
    with_it = converted(text, BASE="https://proxy.example/v1")
    assert with_it.config["models"]["m"]["upstreams"][0]["url"] == "https://proxy.example/v1"
    assert with_it.report.missing == []
    without = converted(text)
    assert without.config["models"]["m"]["upstreams"][0]["url"] == "https://base.invalid"
    assert "Set BASE" in without.report.missing[0]


def test_names_with_a_star_lead_to_the_same_name_there():
    migration = converted("""
        model_list:
          - {model_name: "openai/*", litellm_params: {model: "openai/*"}}
          - {model_name: "*", litellm_params: {model: "*"}}
    """)
    assert migration.config["routing"]["names"] == {
        "openai/*": [{"pool": "openai/*", "model": "*"}],
        "*": [{"pool": "*", "model": "*"}],
    }


def test_fallbacks_name_models_that_exist():
    migration = converted("""
        model_list:
          - {model_name: a, litellm_params: {model: openai/a}}
          - {model_name: b, litellm_params: {model: openai/b}}
        router_settings:
          model_group_alias: {c: b, a: b, d: nowhere}
          fallbacks: [{a: [b, nowhere]}, {nowhere: [a]}]
        litellm_settings:
          context_window_fallbacks: [{b: [a]}]
          default_fallbacks: [b]
    """)
    routing = migration.config["routing"]
    assert routing["aliases"] == {"c": "b"}
    assert routing["names"] == {"a": [{"pool": "b"}]}  # an alias hides the model, as there
    assert routing["fallbacks"] == {"a": {"general": ["b"]}, "b": {"context_length": ["a"]}}
    assert fate_of(migration, "router_settings.fallbacks[0].a[1]") is KeyFate.UNSUPPORTED
    assert fate_of(migration, "router_settings.fallbacks[1].nowhere[0]") is KeyFate.UNSUPPORTED


@pytest.mark.parametrize("enforced", [True, False])
def test_rates_are_limits_only_where_litellm_refuses_by_them(enforced: bool):
    strategy = "usage-based-routing-v2" if enforced else "simple-shuffle"
    migration = converted(f"""
        model_list:
          - {{model_name: a, litellm_params: {{model: openai/a, rpm: 10, tpm: 1000}}}}
          - {{model_name: a, litellm_params: {{model: openai/b, rpm: 5}}}}
        router_settings: {{routing_strategy: {strategy}}}
    """)
    limits = migration.config.get("identity", {}).get("limits", {}).get("models")
    assert limits == ({"a": {"requests_per_minute": 15}} if enforced else None)


def test_settings_become_ours():
    migration = converted("""
        model_list:
          - model_name: a
            litellm_params: {model: openai/a}
            model_info: {input_cost_per_token: 0.000001, output_cost_per_token: 2.0e-06, max_input_tokens: 1000}
        litellm_settings:
          num_retries: 3
          request_timeout: 60
          cache: true
          cache_params: {type: redis, host: cache.example, port: 6379, password: secret, ttl: 600}
          max_budget: 100
          budget_duration: 30d
          drop_params: true
          callbacks: [langfuse]
        general_settings:
          database_url: postgresql://user:secret@db/litellm
          global_max_parallel_requests: 50
          max_request_size_mb: 8
    """)
    config = migration.config
    assert config["models"]["a"]["context_tokens"] == 1000
    assert config["models"]["a"]["upstreams"][0]["total_timeout_s"] == 60.0
    assert config["admission"]["prices"] == {"a": {"prompt": 1.0, "output": 2.0}}
    assert config["dispatch"]["retries"] == 3
    assert config["cache"] == {"mode": "exact", "url": {"env": "MAITRED_CACHE_URL"}, "ttl_s": 600.0}
    assert config["identity"]["limits"] == {"usd_per_month": 100.0, "concurrent_requests": 50}
    assert config["server"] == {"litellm_compatibility": True, "max_body_bytes": 8 << 20}
    assert migration.environment["MAITRED_CACHE_URL"] == "redis://:secret@cache.example:6379/0"
    assert "secret" not in migration.yaml() + migration.report.text()
    assert fate_of(migration, "litellm_settings.drop_params") is KeyFate.HARMLESS
    assert fate_of(migration, "litellm_settings.callbacks[0]") is KeyFate.UNSUPPORTED


def test_the_master_key_goes_on_working():
    migration = converted(
        "model_list: [{model_name: a, litellm_params: {model: openai/a}}]\ngeneral_settings: {master_key: sk-1234}"
    )
    assert migration.config["tenants"]["litellm"]["keys"]["master"] == {
        "secret": {"env": "LITELLM_MASTER_KEY"},
        "foreign": True,
        "scopes": ["admin", "inference", "metrics"],
    }
    assert migration.environment["LITELLM_MASTER_KEY"] == "sk-1234"
    assert "sk-1234" not in migration.yaml() + migration.report.text()


def test_included_files_are_read_from_beside_the_file(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("include: [models.yaml, nowhere.yaml]\nlitellm_settings: {num_retries: 1}\n")
    (tmp_path / "models.yaml").write_text(
        "model_list: [{model_name: a, litellm_params: {model: openai/a, api_key: os.environ/K}}]\n"
    )
    migration = read_litellm_file(tmp_path / "config.yaml", {})
    assert list(migration.config["models"]) == ["a"]
    assert fate_of(migration, "models.yaml:model_list[0].litellm_params.api_key") is KeyFate.MAPPED
    assert fate_of(migration, "include[1]") is KeyFate.UNSUPPORTED


@pytest.mark.parametrize("text", ["models: {}", "- a", "", "model_list: [", "a: b: c"])
def test_other_files_are_refused(text: str, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigInvalid, match=r"config\.yaml"):
        read_litellm_file(tmp_path / "config.yaml", {})


def test_our_loader_recognises_the_file_and_converts_it_in_memory(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "model_list: [{model_name: a, litellm_params: {model: openai/a, api_key: sk-literal}}]\n"
        "environment_variables: {OTHER: x}\n"
    )
    loaded = load(file, {})
    assert loaded.config.models["a"].upstreams[0].api_key is not None
    assert loaded.config.models["a"].upstreams[0].api_key.reveal() == "sk-literal"
    assert loaded.migration is not None
    assert "4 keys: 3 mapped" in loaded.migration.summary()

"""Whatever stands in a configuration of LiteLLM: no crash, one fate for every key, no secret shown, a valid result."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from maitred.config.loader import load
from maitred.migration.litellm.accounts import TABLES
from maitred.migration.litellm.converter import Migration, read_litellm, with_accounts
from maitred.migration.litellm.notes import (
    DEPLOYMENT_NOTES,
    GENERAL_NOTES,
    LITELLM_NOTES,
    MODEL_NOTES,
    ROUTER_NOTES,
    SECTION_NOTES,
)
from maitred.migration.litellm.providers import PROVIDERS, UNSUPPORTED_PROVIDERS
from maitred.migration.source_keys import leaf_paths

SECRET = "hidden-value-of-a-secret"
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10**12),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(["os.environ/NAME", "a", "b", "1d", "30d", "http://10.0.0.1/v1", "https://x.example", "*"]),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "x.y"]), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(["a", "b", "openai/*", "*", "gpt-4o (2)", "c d", ""])
MODELS = st.builds(
    "/".join,
    st.tuples(st.sampled_from([*PROVIDERS, *UNSUPPORTED_PROVIDERS, "new"]), st.sampled_from(["m", "*", "a/b"])),
)
SECRETS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(["api_key", "aws_secret_access_key", "my_token", "client_secret"], st.just(SECRET))
)


def sections(names: list[str], values: st.SearchStrategy[Any] = ANYTHING) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), values, max_size=5)


PARAMETERS = [
    *(*DEPLOYMENT_NOTES, "api_base", "timeout", "rpm", "tpm", "order", "weight", "temperature", "extra_headers"),
    *("extra_body", "custom_llm_provider", "organization", "region_name", "max_tokens", "input_cost_per_token"),
]
DEPLOYMENTS = st.fixed_dictionaries(
    {
        "model_name": NAMES | ANYTHING,
        "litellm_params": st.builds(
            lambda model, secrets, others: {**others, **secrets, "model": model},
            MODELS | ANYTHING,
            SECRETS,
            sections(PARAMETERS),
        )
        | ANYTHING,
    },
    optional={"model_info": sections([*MODEL_NOTES, "mode", "id", "max_input_tokens", "supports_vision"]) | ANYTHING},
)
CHAINS = ["fallbacks", "context_window_fallbacks", "model_group_alias", "default_fallbacks", "num_retries", "timeout"]
REDIS = ["redis_host", "redis_port", "redis_password", "redis_url"]
CACHE = ["cache", "cache_params", "max_budget", "budget_duration", "request_timeout", "json_logs", "allowed_fails"]
DOCUMENTS = st.fixed_dictionaries(
    {"model_list": st.lists(DEPLOYMENTS, max_size=4) | ANYTHING},
    optional={
        "router_settings": sections([*ROUTER_NOTES, *CHAINS, *REDIS, "routing_strategy", "cooldown_time"]) | ANYTHING,
        "litellm_settings": sections([*LITELLM_NOTES, *CHAINS, *CACHE]) | ANYTHING,
        "general_settings": sections([*GENERAL_NOTES, "master_key"]) | ANYTHING,
        "environment_variables": sections(["A", "NAME"]) | ANYTHING,
        "include": ANYTHING,
        "guardrails": ANYTHING,
        **dict.fromkeys(list(SECTION_NOTES)[:3], ANYTHING),
    },
)
FIELDS = [
    *("token", "key_alias", "team_id", "user_id", "budget_id", "models", "blocked", "max_budget", "budget_duration"),
    *("spend", "rpm_limit", "expires", "metadata", "model_max_budget", "allowed_cache_controls", "soft_budget"),
]
ROWS = st.lists(sections(FIELDS) | ANYTHING, max_size=3)
EXPORTS = st.dictionaries(st.sampled_from([*TABLES, *TABLES.values()]), ROWS | ANYTHING, max_size=3)


def counted(migration: Migration) -> Counter[str]:
    return Counter(key for entry in migration.report.entries for key in entry.keys)


@given(DOCUMENTS)
def test_every_key_of_any_document_has_one_fate_and_no_secret_is_shown(document: dict[str, Any]):
    migration = read_litellm(document, {})
    assert counted(migration) == Counter(set(leaf_paths(document)))
    assert SECRET not in migration.yaml() + migration.report.text()


@given(EXPORTS)
def test_so_has_every_field_of_any_export(export: dict[str, Any]):
    migration = with_accounts(read_litellm({"model_list": []}, {}), export, "keys.json")
    keys = Counter(set(leaf_paths({"model_list": []})) | set(leaf_paths(export, "keys.json:")))
    assert counted(migration) == keys
    migration.yaml()


@given(st.lists(DEPLOYMENTS, min_size=1, max_size=4), sections(["model_group_alias", "fallbacks", "num_retries"]))
def test_the_result_passes_all_checks_where_all_variables_are_set(models: list[Any], router: dict[str, Any]):
    migration = read_litellm({"model_list": models, "router_settings": router}, {})
    variables = {each.name: "sk-1" for each in migration.report.variables}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "maitred.yaml"
        file.write_text(migration.yaml())
        load(file, variables)

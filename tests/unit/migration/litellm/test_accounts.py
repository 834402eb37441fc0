"""LiteLLM's keys, teams and budgets become tenants: old keys work, and what is left of a budget is left."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from maitred.config.loader import load
from maitred.core.errors import ConfigInvalid
from maitred.core.limits import LimitKind
from maitred.core.usage import to_nano_usd
from maitred.identity.declared import make_declared_directory
from maitred.identity.keys import matches, parse_foreign
from maitred.migration.litellm.converter import Migration, read_litellm, with_accounts
from maitred.migration.litellm.database import read_accounts
from maitred.migration.source_keys import leaf_paths

CONFIG = {
    "model_list": [{"model_name": name, "litellm_params": {"model": f"openai/{name}"}} for name in ("a", "b")],
    "general_settings": {"master_key": "sk-1234"},
}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


EXPORT: dict[str, Any] = {
    "teams": [
        {"team_id": "t1", "team_alias": "Research & Co", "max_budget": 100.0, "budget_duration": "30d", "spend": 12.5},
        {"team_id": "t2", "team_alias": None, "models": ["a"], "rpm_limit": 60, "blocked": True, "metadata": {}},
    ],
    "users": [{"user_id": "u1", "user_alias": "Ann", "max_budget": 20.0, "spend": 5.25, "models": []}],
    "budgets": [{"budget_id": "b1", "max_budget": 7.0, "tpm_limit": 1000}],
    "keys": [
        {"token": digest("sk-1"), "key_alias": "ci", "team_id": "t1", "spend": 3.0, "max_budget": 10.0, "models": []},
        {"token": digest("sk-2"), "team_id": "t1", "models": ["b"], "tpm_limit": 500, "expires": "2099-01-01T00:00:00"},
        {"token": digest("sk-3"), "key_alias": "personal", "user_id": "u1", "max_parallel_requests": 2},
        {"token": digest("sk-4"), "key_alias": "gone", "blocked": True, "metadata": {"tags": ["x"]}},
        {"token": "sk-5", "budget_id": "b1", "spend": 6.99, "allowed_cache_controls": ["no-cache", "ttl"]},
        {"token": digest("sk-6"), "model_max_budget": {"a": {"budget_limit": 1.5, "time_period": "1d"}}},
        {"token": "no digest"},
        {"token": digest("sk-7"), "team_id": "litellm-dashboard"},
    ],
}


def migrated(export: dict[str, Any] = EXPORT) -> Migration:
    return with_accounts(read_litellm(CONFIG, {}), export, "keys.json")


def test_every_field_has_one_fate_and_no_key_is_shown():
    migration = migrated()
    keys = [key for entry in migration.report.entries for key in entry.keys if key.startswith("keys.json:")]
    assert sorted(keys) == sorted(leaf_paths(EXPORT, "keys.json:"))
    assert [entry.path for entry in migration.report.entries if not entry.is_known] == []
    assert "sk-5" not in migration.yaml() + migration.report.text()


def test_the_result_declares_keys_that_go_on_working(tmp_path: Path):
    migration = migrated()
    file = tmp_path / "maitred.yaml"
    file.write_text(migration.yaml())
    config = load(file, {"LITELLM_MASTER_KEY": "sk-1234", "OPENAI_API_KEY": "sk-x"}).config
    directory = make_declared_directory(config.tenants, config.identity)
    stored = {key.id: key for key in directory.keys}
    for number in range(1, 7):
        public_id, secret = parse_foreign(f"sk-{number}") or ("", "")
        assert matches(secret, stored[public_id].secrets, 0.0)
    assert len(stored) == 7  # and the master key
    disabled = {tenant.id for tenant in directory.tenants if tenant.disabled}
    assert disabled == {"t2", "key-gone"}
    assert {key.tenant for key in directory.keys if "admin" not in key.scopes} == {
        *("key-ci", "key-personal", "key-gone"),
        *(f"key-{digest(f'sk-{number}')[:8]}" for number in (2, 5, 6)),
    }
    spent = {
        (limit.subject.partition(":")[2], limit.kind, limit.value) for limit in directory.limits if limit.kind.spend
    }
    assert spent == {
        ("t1", LimitKind.USD_PER_MONTH, to_nano_usd(100)),
        ("key-ci", LimitKind.USD_TOTAL, to_nano_usd(10)),
        ("user-u1", LimitKind.USD_TOTAL, to_nano_usd(20)),
        (f"key-{digest('sk-5')[:8]}", LimitKind.USD_TOTAL, to_nano_usd(7)),
        (f"key-{digest('sk-6')[:8]}", LimitKind.USD_PER_DAY, to_nano_usd(1.5)),
    }


def test_teams_and_keys_keep_their_models_and_limits():
    tenants = migrated().config["tenants"]
    assert tenants["t1"]["name"] == "Research & Co"
    own = tenants["t1"]["teams"]
    (team,) = [team for team in own.values() if "models" in team]
    assert (team["models"], team["limits"]) == (["b"], {"tokens_per_minute": 500})
    (key,) = team["keys"].values()
    assert key == {"sha256": digest("sk-2"), "expires_at": "2099-01-01T00:00:00Z"}
    assert tenants["t2"] == {"name": "t2", "models": ["a"], "disabled": True, "limits": {"requests_per_minute": 60}}
    assert tenants["user-u1"]["teams"]["key-personal"] == {
        "name": "personal",
        "limits": {"concurrent_requests": 2},
        "keys": {"personal": {"sha256": digest("sk-3")}},
    }
    fifth = tenants["litellm"]["teams"][f"key-{digest('sk-5')[:8]}"]
    assert fifth["keys"][digest("sk-5")[:16]]["cache_controls"] == ["no-cache", "ttl"]
    assert "master" in tenants["litellm"]["keys"]


def test_a_budget_that_is_used_up_leaves_nothing():
    export = {"keys": [{"token": digest("sk-1"), "max_budget": 1.0, "spend": 1.5}]}
    (team,) = migrated(export).config["tenants"]["litellm"]["teams"].values()
    assert (team["limits"], team["spent_usd"]) == ({"usd_total": 1.0}, 1.5)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"models": []}'])
def test_other_files_are_no_exports(text: str, tmp_path: Path):
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(ConfigInvalid, match="keys"):
        read_accounts(str(tmp_path / "keys.json"))


def test_rows_may_stand_below_the_names_of_their_tables(tmp_path: Path):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"LiteLLM_VerificationToken": EXPORT["keys"][:1]}))
    tenants = yaml.safe_load(migrated(read_accounts(str(file))).yaml())["tenants"]
    assert tenants["litellm"]["teams"]["key-ci"]["keys"]["ci"]["sha256"] == digest("sk-1")

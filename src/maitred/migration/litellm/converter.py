"""Converter of LiteLLM's configuration file: our configuration, and what became of every key of theirs."""

import copy
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct
from msgspec.structs import replace

from maitred.core.errors import ConfigInvalid
from maitred.migration.litellm.accounts import AccountsReader
from maitred.migration.litellm.credentials import ENVIRONMENT_PREFIX, CredentialNames
from maitred.migration.litellm.deployment import DeploymentReader
from maitred.migration.litellm.models import read_models
from maitred.migration.litellm.notes import SECTION_NOTES, note_rest
from maitred.migration.litellm.settings import SettingsReader
from maitred.migration.litellm.stored_models import StoredModels
from maitred.migration.report import MigrationReport
from maitred.migration.source_keys import SourceKey, SourceKeys, read_yaml

ReadFile = Callable[[str], str]
"""Returns the text of a file that `include` names; raises OSError if it cannot be read."""


class Migration(Struct, frozen=True):
    """Result of a migration.

    Attributes:
        config: The new configuration, without any secret.
        report: What became of every key.
        environment: Values of the variables that the source has as literals; for use in memory, never to be written.
    """

    config: dict[str, Any]
    report: MigrationReport
    environment: Mapping[str, str]

    def yaml(self) -> str:
        """Returns the new configuration as YAML."""
        head = [f"# Made by `maitred import` from {self.report.source}."]
        head += [f"# Set {variable.name}: {variable.use}." for variable in self.report.variables]
        head += [f"# Missing: {sentence}" for sentence in self.report.missing]
        body = yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True, width=120) if self.config else ""
        return "\n".join(head) + "\n" + body


def is_litellm(sections: Container[object]) -> bool:
    """Whether a document with these sections is a configuration of LiteLLM's proxy: no other has these."""
    return "model_list" in sections or "litellm_settings" in sections


def read_litellm_file(path: Path, env: Mapping[str, str], stored: StoredModels | None = None) -> Migration:
    """Converts a file; files that it includes are looked for beside it.

    Args:
        path: The file.
        env: See `read_litellm`.
        stored: See `read_litellm`.

    Raises:
        ConfigInvalid: It cannot be read, or is no configuration of LiteLLM.
    """
    document = read_yaml(path)
    if not isinstance(document, dict) or not (is_litellm(document) or (stored is not None and stored.entries)):
        raise ConfigInvalid(f"{path}: It has no `model_list`, so it is no configuration of LiteLLM's proxy.")
    return read_litellm(
        document,
        env,
        source=str(path),
        read_file=lambda name: (path.parent / name).read_text(encoding="utf-8"),
        stored=stored,
    )


def read_litellm(
    document: object,
    env: Mapping[str, str],
    *,
    source: str = "config.yaml",
    read_file: ReadFile | None = None,
    stored: StoredModels | None = None,
) -> Migration:
    """Converts a configuration of LiteLLM's proxy.

    Args:
        document: The file, as `yaml.safe_load` reads it.
        env: The environment, for ``os.environ/NAME`` in settings that are no secrets.
        source: Name of the file, for the report.
        read_file: Reads the files of `include`; None: they are not read.
        stored: Models that stand in LiteLLM's database, beside those of the file.
    """
    main = SourceKeys(document)
    parts = [main]
    for item in main.root.child("include").items():
        parts += _read_included(item, read_file)
    missing: list[str] = []
    if stored is not None:
        parts.append(SourceKeys({"model_list": stored.entries}, f"{stored.source}:"))
        missing += [f"The model {name} is blocked in {stored.source}, so it was left out." for name in stored.blocked]
    roots = [part.root for part in parts]
    own = _environment_variables(roots)
    credentials = CredentialNames({**env, **own})
    config: dict[str, Any] = {}
    _convert(config, roots, credentials, missing)
    if not config.get("models"):
        missing.append("No model could be taken over, so `maitred serve` serves the small one that comes with it.")
    _note_environment(roots, credentials)
    for root in roots:
        note_rest(root, SECTION_NOTES)
        for _, section in root.children():
            if section.value is None or section.value in ({}, []):
                section.ignore("It is empty.")
    report = MigrationReport(
        source, [entry for part in parts for entry in part.entries()], credentials.variables(), missing
    )
    return Migration(config, report, {**own, **credentials.values})


def with_accounts(migration: Migration, document: dict[str, Any], source: str) -> Migration:
    """Returns a migration with the keys, teams and budgets of an export added to its tenants.

    Args:
        migration: That of the configuration.
        document: The export; see `maitred.migration.litellm.accounts`.
        source: Name of the export, for the report.
    """
    reader = AccountsReader(document, source)
    config = {**migration.config, "tenants": copy.deepcopy(migration.config.get("tenants", {}))}
    reader.read(config["tenants"])
    entries = [*migration.report.entries, *reader.keys.entries()]
    return replace(migration, config=config, report=replace(migration.report, entries=entries))


def _convert(config: dict[str, Any], roots: list[SourceKey], credentials: CredentialNames, missing: list[str]) -> None:
    """Fills the new configuration."""
    limits_hold = any(_limits_hold(root.child("router_settings")) for root in roots)
    reader = DeploymentReader(credentials, missing, limits_hold=limits_hold)
    models = read_models([root.child("model_list") for root in roots], reader)
    config["server"] = {"litellm_compatibility": True}
    config["models"] = models.models
    for root in roots:
        SettingsReader(config, models, credentials).read(root)
    if models.names:
        config.setdefault("routing", {})["names"] = models.names
    if models.prices:
        config.setdefault("admission", {})["prices"] = models.prices
    if models.limits and limits_hold:
        config.setdefault("identity", {}).setdefault("limits", {})["models"] = models.limits
    if not models.models:
        del config["models"]


def _limits_hold(router: SourceKey) -> bool:
    """Whether LiteLLM refuses what is above a deployment's `rpm` and `tpm`; else it only draws by them."""
    checks = router.child("optional_pre_call_checks").value
    return "usage-based" in str(router.child("routing_strategy").value) or (
        isinstance(checks, list) and "enforce_model_rate_limits" in checks
    )


def _read_included(item: SourceKey, read_file: ReadFile | None) -> list[SourceKeys]:
    """Reads a file that `include` names; its keys stand behind its name."""
    if not isinstance(item.value, str) or read_file is None:
        item.refuse("Import this file by itself, and put both results together.")
        return []
    try:
        document = yaml.safe_load(read_file(item.value))
    except (OSError, ValueError, yaml.YAMLError):
        item.refuse("This file cannot be read. Put it beside the first one, and import again.")
        return []
    item.map_to("")
    return [SourceKeys(document, f"{item.value}:")] if isinstance(document, dict) else []


def _environment_variables(roots: list[SourceKey]) -> dict[str, str]:
    """Returns the variables that the source sets itself, as far as it has their values."""
    return {
        name: str(key.value)
        for root in roots
        for name, key in root.child("environment_variables").children()
        if key.value is not None and not str(key.value).startswith(ENVIRONMENT_PREFIX)
    }


def _note_environment(roots: list[SourceKey], credentials: CredentialNames) -> None:
    """Says of the variables that the source sets which of them are still read."""
    read = {variable.name for variable in credentials.variables()}
    for root in roots:
        for name, key in root.child("environment_variables").children():
            if name in read:
                key.approximate(f"{{env: {name}}}", "Set it in the environment: the file holds references only.")
            else:
                key.refuse("Nothing reads it here. If it is for a logger, see `traces.endpoint` and its headers.")

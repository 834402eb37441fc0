"""Converter of a config of Portkey's gateway: strategies, targets, retries, caches (JSON).

The names of settings are those of Portkey's documentation of gateway configs (portkey.ai/docs/product/ai-gateway/
configs); each may be written with underscores or in camel case.
"""

import json
import re
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from maitred.core.errors import ConfigInvalid
from maitred.migration.litellm.address import upstream_address, upstream_entry
from maitred.migration.litellm.converter import Migration
from maitred.migration.litellm.credentials import CredentialNames, is_secret_name
from maitred.migration.litellm.deployment import mode_of
from maitred.migration.report import MigrationReport
from maitred.migration.source_keys import SourceKey, SourceKeys, read_number
from maitred.migration.target.targets import (
    ANY,
    ImportedConfig,
    ImportedTarget,
    Ranks,
    add_key,
    find_provider,
    note_address,
    read_places,
)

_SAME_AS = {
    "azure-openai": "azure",
    "azure-ai": "azure_ai",
    "azure-ai-inference": "azure_ai",
    "vertex-ai": "vertex_ai",
    "google": "gemini",
    "mistral-ai": "mistral",
    "together-ai": "together_ai",
    "fireworks-ai": "fireworks_ai",
    "perplexity-ai": "perplexity",
    "x-ai": "xai",
    "novita-ai": "novita",
    "lambda": "lambda_ai",
    "nvidia": "nvidia_nim",
    "aws-bedrock": "bedrock",
}
"""Portkey's name of a provider -> the importer's."""
_GUARDRAILS = "There are no guardrails. Check prompts before they are sent, or in a proxy behind this gateway."
_NEXT = "The next is asked after every failure, refusal for want of room and time-out; not after faults of the request."
_NOTES = {
    **dict.fromkeys(
        (
            *("input_guardrails", "output_guardrails", "before_request_hooks", "after_request_hooks"),
            *("default_input_guardrails", "default_output_guardrails", "default_guardrails"),
        ),
        _GUARDRAILS,
    ),
    **dict.fromkeys(
        ("forward_headers",),
        "Nothing that a caller sends has a say in headers of upstreams. Set `upstreams[].headers`.",
    ),
    **dict.fromkeys(
        ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "aws_auth_type", "aws_role_arn"),
        "A Bedrock API key takes the place of signatures: set AWS_BEARER_TOKEN_BEDROCK.",
    ),
    **dict.fromkeys(
        ("vertex_service_account_json",),
        "An access token takes the place of credentials: set VERTEX_ACCESS_TOKEN, and renew it.",
    ),
    **dict.fromkeys(
        ("azure_ad_token", "azure_auth_mode", "azure_managed_client_id", "azure_entra_client_id"),
        "Entra ID is not spoken. Use the key of the resource, or put a proxy with the login before it.",
    ),
    **dict.fromkeys(("cb_config",), "Circuit breakers are set for all servers: `health.breaker`."),
}
"""Setting that has no counterpart -> what to do."""
_HARMLESS = {
    "api_version": "Azure's v1 API has no dated versions.",
    "azure_model_name": "The deployment names the model.",
    "anthropic_version": "The gateway sends the version that it speaks.",
    "metadata": "It only says what is logged.",
    "name": "Servers are called by their host.",
    "strict_open_ai_compliance": "Answers have the form of OpenAI's API, with what the server adds.",
    "passthrough": "Requests go out as they were written.",
}


def read_portkey_file(path: Path, env: Mapping[str, str]) -> Migration:
    """Converts a file with a config of Portkey's gateway.

    Raises:
        ConfigInvalid: It cannot be read, or is no config of Portkey's gateway.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigInvalid(f"{path}: No such file. Pass the path of an existing one.") from None
    except OSError as error:
        raise ConfigInvalid(f"{path}: Cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{path}: Not valid JSON: {error}.") from None
    if isinstance(document, dict) and isinstance(inner := _unwrap(document), dict):
        document = inner
    known = {"targets", "provider", "virtual_key", "virtualKey", "strategy"}
    if not isinstance(document, dict) or known.isdisjoint(document):
        raise ConfigInvalid(
            f"{path}: It has neither `targets` nor `provider`, so it is no config of Portkey's gateway. Export it from "
            "the page of configs, as JSON."
        )
    return read_portkey(document, env, source=str(path))


def _unwrap(document: dict[str, Any]) -> object:
    """Returns the config within what Portkey's admin API answers."""
    inner = document.get("data", document)
    return inner.get("config", inner) if isinstance(inner, dict) else document


def read_portkey(document: dict[str, Any], env: Mapping[str, str], *, source: str = "config.json") -> Migration:
    """Converts a config of Portkey's gateway."""
    keys = SourceKeys(_snake_case(document))
    reader = _ConfigReader(CredentialNames(env))
    reader.read(keys.root)
    imported, credentials = reader.imported, reader.credentials
    config = imported.finish()
    report = MigrationReport(source, keys.entries(), credentials.variables(), imported.missing)
    return Migration(config, report, credentials.values)


def _snake_case(value: object) -> Any:  # noqa: ANN401 - JSON
    """Returns a config with its settings written in one way; what is sent on (`override_params`) stays."""
    if isinstance(value, list):
        return [_snake_case(item) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).lower(): child for name, child in value.items()}
    kept = ("override_params", "conditions", "metadata")
    return {name: child if name in kept else _snake_case(child) for name, child in renamed.items()}


class _ConfigReader:
    """Reader of one config of Portkey's gateway.

    Args:
        credentials: Names of the secrets.
    """

    def __init__(self, credentials: CredentialNames) -> None:
        self.credentials = credentials
        self.imported = ImportedConfig()
        self._leaves = 0

    def read(self, root: SourceKey) -> None:
        strategy = root.child("strategy")
        if strategy.child("mode").value == "conditional":
            self._conditional(root)
        else:
            ranks = self._ranks(root, {})
            models = [target.model for rank in ranks for target in rank]
            self.imported.add(models[0] if models else ANY, ranks)
            if models and models[0] != ANY:
                root.child("strategy").child("mode").map_to("routing.names")
        self._note(root)

    def _conditional(self, root: SourceKey) -> None:
        """Makes a model of each named target: clients name it instead of sending what the conditions look at."""
        strategy = root.child("strategy")
        strategy.child("mode").refuse("Requests are not routed by metadata. Let clients name the model.")
        strategy.child("conditions").refuse(
            "Requests are not routed by conditions. Each target is a model of its own here: let clients name it, or "
            "see `routing.auto`."
        )
        for index, target in enumerate(root.child("targets").items()):
            name = str(target.child("name").value or f"target {index + 1}")
            self.imported.add(name, self._ranks(target, {}))
            target.child("name").map_to(f"models.{name}")
            if strategy.child("default").value == name:
                self.imported.set("routing.aliases", {"default": name})
                strategy.child("default").approximate("routing.aliases.default", "Clients that name `default` get it.")
        strategy.child("default").refuse("No target has this name.")

    def _ranks(self, node: SourceKey, inherited: dict[str, Any]) -> Ranks:
        """Returns the targets of a node in the order in which they are asked."""
        strategy, mode = node.child("strategy"), str(node.child("strategy").child("mode").value or "single")
        self._common(node)
        given = node.child("override_params").value
        inherited = {**inherited, **(given if isinstance(given, dict) else {})}
        node.child("weight").approximate("", "Requests go where they are answered first, by what each has shown.")
        if node.child("targets").value is None:
            target = self._target(node, inherited)
            strategy.child("mode").map_to("models")
            return [] if target is None else [[target]]
        node.child("override_params").approximate("upstreams[].parameters", "They are written to each upstream.")
        branches = [self._ranks(each, inherited) for each in node.child("targets").items()]
        self._note(node)
        if mode == "loadbalance":
            strategy.child("mode").approximate("upstreams", "Weights are not drawn by: each server's room is learnt.")
            return [[target for rank in level for target in rank] for level in zip_longest(*branches, fillvalue=[])]
        if mode == "fallback":
            strategy.child("on_status_codes").approximate("", _NEXT)
            strategy.child("mode").map_to("routing.names")
            return [rank for branch in branches for rank in branch]
        strategy.child("mode").map_to("models")
        return branches[0] if branches else []

    def _target(self, node: SourceKey, inherited: dict[str, Any]) -> ImportedTarget | None:
        """Returns one target; None: it cannot be an upstream, and its keys say why."""
        name = str(node.child("provider").value or "").lstrip("@")
        virtual = node.child("virtual_key").value
        host = node.child("custom_host")
        place = f"upstreams[{self._leaves}]"
        self._leaves += 1
        found = find_provider(name or ("openai" if host.value else ""), _SAME_AS)
        if not name and virtual:
            node.refuse(
                f"Only Portkey knows the provider behind the virtual key {virtual!r}. Write `provider` beside it, and "
                "import again."
            )
            return None
        if isinstance(found, str):
            node.refuse(found)
            return None
        model = str(inherited.get("model") or ANY)
        base = str(host.value or "")
        resource, deployment = node.child("resource_name"), node.child("deployment_id")
        if found.shape in ("azure", "azure_ai") and not base:
            for key in (resource, node.child("azure_resource_name")):
                if key.value:
                    base = f"https://{key.value}.openai.azure.com"
                    key.map_to(f"{place}.url")
        if deployment.value:
            model = str(deployment.value)
            deployment.map_to(f"{place}.model")
        if not base and not found.url:
            base = f"https://{name or 'server'}.invalid"
            self.imported.missing.append(f"{place}.url: the source names no address. Write it there.")
        address = upstream_address(found, base, model, _places(node, place))
        if not note_address(address, node, (node.child("provider"), host), place, "url"):
            return None
        upstream = upstream_entry(address, found)
        self._credential(node, found.key, upstream, name or "SERVER", place)
        self._settings(node, inherited, upstream, place)
        self._note(node)
        return ImportedTarget(upstream, address.model, mode_of("", address.model) or "chat")

    def _credential(self, node: SourceKey, variable: str, upstream: dict[str, Any], name: str, place: str) -> None:
        key, virtual = node.child("api_key"), node.child("virtual_key")
        if key.value:
            add_key(key, str(key.value), upstream, self.credentials, name, place)
        elif variable:
            upstream["api_key"] = self.credentials.variable(variable, f"API key of {place} ({name})")
        virtual.approximate(f"{place}.api_key", "Portkey keeps the provider's key; set the variable to it.")

    def _settings(self, node: SourceKey, inherited: dict[str, Any], upstream: dict[str, Any], place: str) -> None:
        parameters = {name: value for name, value in inherited.items() if name != "model" and not is_secret_name(name)}
        if parameters:
            upstream["parameters"] = parameters
        for name, key in node.child("override_params").children():
            if is_secret_name(name):
                key.refuse("It may be a secret, so it is not written. Give `upstreams[].api_key` by reference.")
            elif name == "model":
                key.map_to(f"{place}.model")
            else:
                key.approximate(
                    f"{place}.parameters.{name}", "Portkey overrides the caller; here it is for requests without it."
                )
        timeout = node.child("request_timeout")
        milliseconds = read_number(timeout.value)
        if milliseconds is not None and 0 < milliseconds <= 86_400_000:
            upstream["total_timeout_s"] = milliseconds / 1000
            timeout.map_to(f"{place}.total_timeout_s")
        for name in ("openai_organization", "openai_project"):
            if (key := node.child(name)).value:
                header = {"openai_organization": "OpenAI-Organization", "openai_project": "OpenAI-Project"}[name]
                upstream.setdefault("headers", {})[header] = str(key.value)
                key.map_to(f"{place}.headers.{header}")

    def _common(self, node: SourceKey) -> None:
        """Reads what a node may say for all that is below it: retries and caches."""
        retry, cache = node.child("retry"), node.child("cache")
        attempts = read_number(retry.child("attempts").value)
        if attempts is not None and 0 <= attempts <= 10:
            self.imported.set("dispatch.retries", int(attempts))
            retry.child("attempts").approximate("dispatch.retries", "Retries are the same for all models.")
        retry.child("on_status_codes").approximate("", _NEXT)
        retry.child("use_retry_after_header").ignore("`Retry-After` is always heeded.")
        mode, max_age = cache.child("mode"), cache.child("max_age")
        if mode.value == "simple":
            self.imported.set("cache.mode", "exact")
            mode.map_to("cache.mode")
        mode.refuse("Similar questions need an encoder here, and are certified: see docs/cache.md.")
        seconds = read_number(max_age.value)
        if seconds is not None and seconds >= 1:
            self.imported.set("cache.ttl_s", seconds)
            max_age.map_to("cache.ttl_s")

    def _note(self, node: SourceKey) -> None:
        for name, key in node.children():
            if name in _NOTES:
                key.refuse(_NOTES[name])
            elif name in _HARMLESS:
                key.ignore(_HARMLESS[name])
            elif is_secret_name(name) and name not in ("api_key", "virtual_key"):
                key.refuse("It may be a secret, so it is not written. Give `upstreams[].api_key` by reference.")


def _places(node: SourceKey, place: str) -> dict[str, str]:
    names = {"REGION": "aws_region", "PROJECT": "vertex_project_id", "LOCATION": "vertex_region"}
    return read_places({part: node.child(name) for part, name in names.items()}, place)

"""Converter of a declarative file of Kong with its plugins `ai-proxy` and `ai-proxy-advanced` (YAML).

The names of settings are those of Kong's documentation of these plugins (developer.konghq.com/plugins) and of their
open schemas.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maitred.core.errors import ConfigInvalid
from maitred.migration.litellm.address import upstream_address, upstream_entry
from maitred.migration.litellm.converter import Migration
from maitred.migration.litellm.credentials import ENVIRONMENT_PREFIX, CredentialNames
from maitred.migration.report import MigrationReport
from maitred.migration.source_keys import SourceKey, SourceKeys, read_number, read_yaml
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

PLUGINS = ("ai-proxy", "ai-proxy-advanced")
_VAULT = re.compile(r"\{vault://env/([\w-]+)(?:/[\w-]+)?\}")
_DECK = re.compile(r"""\$\{\{\s*env\s*["']([\w-]+)["']\s*\}\}""")
_MODES = {
    **dict.fromkeys(("llm/v1/chat", "llm/v1/completions", "llm/v1/responses", "preserve"), "chat"),
    "llm/v1/embeddings": "embedding",
    **dict.fromkeys(("image/v1/images/generations", "image/v1/images/edits"), "image_generation"),
    "audio/v1/audio/speech": "audio_speech",
    **dict.fromkeys(("audio/v1/audio/transcriptions", "audio/v1/audio/translations"), "audio_transcription"),
}
"""Kong's type of a route -> our mode of a model."""
_SAME_AS = {"llama2": "openai", "hugging_face": "huggingface", "vllm": "hosted_vllm"}
_KEYS = "Declare callers and their keys in `tenants`; keys of another gateway go on working (`foreign`)."
_LIMITS = "Set `identity.limits`, or limits of tenants and keys; they count requests, tokens and dollars."
_GUARDRAILS = "There are no guardrails. Check prompts before they are sent, or in a proxy behind this gateway."
_PROXY = "Leave it to the proxy before the gateway, which Kong can remain."
_PLUGIN_NOTES: dict[str, str] = {
    **dict.fromkeys(("key-auth", "key-auth-enc", "basic-auth", "jwt", "hmac-auth", "acl"), _KEYS),
    **dict.fromkeys(
        ("openid-connect", "oauth2"), "Declare the identity provider in `identity.oidc`; see docs/identity.md."
    ),
    **dict.fromkeys(("rate-limiting", "rate-limiting-advanced", "ai-rate-limiting-advanced"), _LIMITS),
    **dict.fromkeys(
        (
            *("ai-prompt-guard", "ai-semantic-prompt-guard", "ai-azure-content-safety", "ai-aws-guardrails"),
            *("ai-sanitizer", "ai-custom-guardrail", "ai-llm-as-judge", "ai-lakera-guard", "ai-gcp-model-armor"),
        ),
        _GUARDRAILS,
    ),
    **dict.fromkeys(
        ("ai-prompt-template", "ai-prompt-decorator", "ai-request-transformer", "ai-response-transformer"),
        "Prompts are not changed. Write them in the client, or into the chat template.",
    ),
    "ai-semantic-cache": "Similar questions need an encoder, and are certified: see docs/cache.md.",
    "ai-rag-injector": "Nothing is searched by the gateway. Search in the client, and send what was found.",
    **dict.fromkeys(("prometheus", "opentelemetry", "zipkin", "datadog"), "See `/metrics` and `traces.endpoint`."),
    "cors": "Set `server.cors_origins`.",
}
_OPTIONS = {"max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
_PRICES = {"input_cost": "prompt", "output_cost": "output"}
_CREDENTIAL_HEADERS = frozenset({"authorization", "api-key", "x-api-key"})


def read_kong_file(path: Path, env: Mapping[str, str]) -> Migration:
    """Converts a declarative file of Kong.

    Raises:
        ConfigInvalid: It cannot be read, or has no such plugin.
    """
    document = read_yaml(path)
    if not isinstance(document, dict) or not list(_plugins(SourceKeys(document).root, "")):
        raise ConfigInvalid(
            f"{path}: It has no plugin `ai-proxy` or `ai-proxy-advanced`, so no model stands in it. Export the whole "
            "gateway with `deck gateway dump`."
        )
    return read_kong(document, env, source=str(path))


def read_kong(document: dict[str, Any], env: Mapping[str, str], *, source: str = "kong.yaml") -> Migration:
    """Converts a declarative file of Kong."""
    keys = SourceKeys(document)
    credentials, imported = CredentialNames(env), ImportedConfig()
    for place, plugin in _plugins(keys.root, ""):
        _PluginReader(plugin, place, credentials, imported).read()
    _note_rest(keys.root)
    report = MigrationReport(source, keys.entries(), credentials.variables(), imported.missing)
    return Migration(imported.finish(), report, credentials.values)


def _plugins(node: SourceKey, place: str) -> Iterator[tuple[str, SourceKey]]:
    """Yields the plugins that name models, with the name of the route or service that they stand at."""
    place = str(node.child("name").value or place)
    for plugin in node.child("plugins").items():
        if plugin.child("name").value in PLUGINS:
            yield place, plugin
    for section in ("services", "routes", "consumers", "consumer_groups"):
        for below in node.child(section).items():
            yield from _plugins(below, place)


def _note_rest(root: SourceKey) -> None:
    """Says of everything that is no model what becomes of it."""
    for node in _nodes(root):
        for plugin in node.child("plugins").items():
            name = str(plugin.child("name").value)
            if name in PLUGINS:
                for word in ("name", "enabled", "protocols", "tags", "id", "instance_name", "ordering"):
                    plugin.child(word).ignore("It only places the plugin.")
            else:
                plugin.refuse(_PLUGIN_NOTES.get(name, f"The plugin {name!r} has no counterpart. {_PROXY}"))
        for word in ("paths", "hosts", "methods", "headers", "strip_path", "url", "host", "port", "protocol", "path"):
            node.child(word).ignore("Requests come at the paths of OpenAI's API, and name their model.")
        for word in ("name", "id", "tags", "enabled", "protocols", "https_redirect_status_code", "regex_priority"):
            node.child(word).ignore("It only names or places the route.")
        for word in (
            "connect_timeout",
            "read_timeout",
            "write_timeout",
            "retries",
            "preserve_host",
            "request_buffering",
        ):
            node.child(word).ignore("It is of the service that the plugin takes the place of.")
        for word in ("response_buffering", "path_handling", "snis", "sources", "destinations"):
            node.child(word).ignore("It is of the service that the plugin takes the place of.")
    for word in ("_format_version", "_transform", "_info", "_comment", "_konnect", "_workspace"):
        root.child(word).ignore("It describes the file.")
    root.child("consumers").refuse(_KEYS)
    root.child("consumer_groups").refuse(_KEYS)
    root.child("vaults").refuse("Secrets come from the environment or from files: `{env: NAME}`, `{file: path}`.")
    for word in ("upstreams", "certificates", "ca_certificates", "snis", "key_sets", "keys"):
        root.child(word).refuse(_PROXY)


def _nodes(node: SourceKey) -> Iterator[SourceKey]:
    yield node
    for section in ("services", "routes"):
        for below in node.child(section).items():
            yield from _nodes(below)


class _PluginReader:
    """Reader of one plugin that names models.

    Args:
        plugin: The plugin.
        place: Name of its route or service; empty: it holds for all.
        credentials: Names of the secrets.
        imported: Takes its models.
    """

    def __init__(self, plugin: SourceKey, place: str, credentials: CredentialNames, imported: ImportedConfig) -> None:
        self._config = plugin.child("config")
        self._place = place
        self._credentials = credentials
        self._imported = imported

    def read(self) -> None:
        """Adds the models of the plugin."""
        config = self._config
        targets = config.child("targets")
        found = [self._target(node) for node in (targets.items() if targets.value is not None else [config])]
        given = [each for each in found if each is not None]
        groups = dict.fromkeys((alias, target.mode) for alias, _, target in given)
        for alias, mode in groups:
            members = [(weight, one) for each, weight, one in given if (each, one.mode) == (alias, mode)]
            ranks = self._ranks(members)
            if ranks:
                first = ranks[0][0].model
                several = len({target.model for _, target in members}) > 1
                self._imported.add(alias or (self._place if several and self._place else first), ranks)
        self._balancer()
        for word in ("response_streaming", "model_name_header", "genai_category", "max_request_body_size"):
            config.child(word).ignore("Streams, names and sizes are as OpenAI's API has them.")
        for word in ("embeddings", "vectordb"):
            config.child(word).refuse("Models are not chosen by likeness. See `routing.auto`.")
        if (form := config.child("llm_format")).value in (None, "openai", "anthropic"):
            form.ignore("Every model answers in OpenAI's and in Anthropic's API.")
        form.refuse("Requests in a provider's own form are not read. Send OpenAI's or Anthropic's.")

    def _ranks(self, members: list[tuple[float, ImportedTarget]]) -> Ranks:
        """Returns the targets in the order in which they are asked: by weight where that is a priority."""
        if self._config.child("balancer").child("algorithm").value != "priority":
            return [[target for _, target in members]] if members else []
        weights = sorted({weight for weight, _ in members}, reverse=True)
        return [[target for weight, target in members if weight == each] for each in weights]

    def _balancer(self) -> None:
        balancer = self._config.child("balancer")
        algorithm = balancer.child("algorithm")
        if algorithm.value == "semantic":
            algorithm.refuse("Models are not chosen by likeness. See `routing.auto`; here all targets share the load.")
        if algorithm.value == "priority":
            algorithm.map_to("routing.names")
        algorithm.approximate("upstreams", "Requests go where they are answered first, by what each server has shown.")
        retries = read_number(balancer.child("retries").value)
        if retries is not None and 0 <= retries <= 10:
            self._imported.set("dispatch.retries", int(retries))
            balancer.child("retries").approximate("dispatch.retries", "Retries are the same for all models.")
        balancer.child("failover_criteria").approximate(
            "", "The next is asked after every failure, refusal for want of room and time-out."
        )
        for word in ("max_fails", "fail_timeout", "slots", "hash_on_header", "tokens_count_strategy"):
            balancer.child(word).ignore("Servers are taken out and back by `health`; conversations keep their server.")
        for word in ("latency_strategy", "connect_timeout", "read_timeout", "write_timeout"):
            balancer.child(word).approximate(
                "", "See `connect_timeout_s`, `first_part_timeout_s` and `idle_timeout_s`."
            )

    def _target(self, node: SourceKey) -> tuple[str, float, ImportedTarget] | None:
        """Returns alias, weight and upstream of a target; None: it cannot be one, and its keys say why."""
        model, kind = node.child("model"), str(node.child("route_type").value or "llm/v1/chat")
        options, name = model.child("options"), str(model.child("provider").value or "")
        mode = _MODES.get(kind)
        if mode is None:
            node.refuse(f"Requests of the type {kind!r} are not passed on. Call the provider directly.")
            return None
        found = find_provider("ollama" if "ollama" in self._formats(options) else name, _SAME_AS)
        if isinstance(found, str):
            node.refuse(found)
            return None
        place = f"upstreams of {self._place or 'all routes'}"
        own_name = str(model.child("name").value or ANY)
        base = str(options.child("upstream_url").value or "")
        options.child("upstream_url").map_to(f"{place}.url")
        if found.shape == "azure":
            if (instance := options.child("azure_instance")).value and not base:
                base = f"https://{instance.value}.openai.azure.com"
                instance.map_to(f"{place}.url")
            if (deployment := options.child("azure_deployment_id")).value:
                own_name = str(deployment.value)
                deployment.map_to(f"{place}.model")
        if not base and not found.url:
            base = f"https://{name or 'server'}.invalid"
            self._imported.missing.append(f"{place}: the source names no address for {name!r}. Write its `url` there.")
        address = upstream_address(found, base, own_name, _places(options, place))
        if not note_address(address, node, (model.child("provider"), model.child("name")), place, "model"):
            return None
        upstream = upstream_entry(address, found)
        node.child("route_type").map_to("models.mode" if mode != "chat" else "models")
        self._credential(node.child("auth"), found.key, upstream, name, place)
        target = ImportedTarget(upstream, address.model, mode, self._options(options, upstream, place))
        node.child("weight").approximate("", "Requests go where they are answered first, by what each has shown.")
        node.child("description").ignore("It describes the target for a choice by likeness.")
        node.child("logging").ignore("Requests are logged without their text, and counted at `/metrics`.")
        node.child("metadata").ignore("It only says what is logged.")
        alias = node.child("model_alias") if node.child("model_alias").value else model.child("model_alias")
        if alias.value:
            alias.map_to(f"models.{alias.value}")
        return str(alias.value or ""), read_number(node.child("weight").value) or 100.0, target

    @staticmethod
    def _formats(options: SourceKey) -> set[object]:
        keys = [options.child(word) for word in ("llama2_format", "mistral_format")]
        for key in keys:
            if key.value in ("openai", "ollama"):
                key.ignore("Both are asked by OpenAI's API.")
            key.refuse("The server must speak OpenAI's API. Name its URL in `upstreams[].url`.")
        return {key.value for key in keys}

    def _options(self, options: SourceKey, upstream: dict[str, Any], place: str) -> dict[str, float]:
        prices: dict[str, float] = {}
        for word, setting in _OPTIONS.items():
            if (key := options.child(word)).value is not None:
                upstream.setdefault("parameters", {})[setting] = key.value
                key.map_to(f"{place}.parameters.{setting}")
        for word, setting in _PRICES.items():
            value = read_number((key := options.child(word)).value)
            if value is not None and value >= 0:
                prices[setting] = value
                key.map_to("admission.prices")
        options.child("azure_api_version").ignore("Azure's v1 API has no dated versions.")
        options.child("anthropic_version").ignore("The gateway sends the version that it speaks.")
        options.child("upstream_path").refuse(
            "Paths are those of OpenAI's API. Write all of the URL before them as `url`."
        )
        for section in ("bedrock", "gemini", "huggingface", "cohere", "dashscope", "databricks", "cerebras"):
            options.child(section).refuse("It is of the provider's own API, which is not spoken. Look at its URL.")
        return prices

    def _credential(self, auth: SourceKey, variable: str, upstream: dict[str, Any], provider: str, place: str) -> None:
        """Adds the credential of a header or a parameter by reference."""
        header, value = auth.child("header_name"), auth.child("header_value")
        is_parameter = not value.value
        if is_parameter:
            header, value = auth.child("param_name"), auth.child("param_value")
        if value.value and (is_parameter or str(header.value).lower() in _CREDENTIAL_HEADERS):
            add_key(value, _secret(str(value.value)), upstream, self._credentials, provider or "SERVER", place)
            if is_parameter:
                header.approximate(f"{place}.api_key", "It goes in a header here.")
            header.map_to(f"{place}.api_key")
        elif variable:
            upstream["api_key"] = self._credentials.variable(variable, f"API key of {place} ({provider})")
        auth.child("param_location").ignore("The key goes in a header.")
        auth.child("allow_override").ignore("A caller's own key never goes to a server.")
        for word, key in auth.children():
            if word.startswith("aws_"):
                key.refuse("A Bedrock API key takes the place of signatures: set AWS_BEARER_TOKEN_BEDROCK.")
            elif word.startswith("gcp_"):
                key.refuse("An access token takes the place of credentials: set VERTEX_ACCESS_TOKEN, and renew it.")
            elif word.startswith("azure_"):
                key.refuse(
                    "Entra ID is not spoken. Use the key of the resource, or put a proxy with the login before it."
                )
            else:
                key.refuse("Credentials are given as `upstreams[].api_key`, by reference; no other header may be one.")


def _places(options: SourceKey, place: str) -> dict[str, str]:
    gemini = options.child("gemini")
    keys = {
        "REGION": options.child("bedrock").child("aws_region"),
        "PROJECT": gemini.child("project_id"),
        "LOCATION": gemini.child("location_id"),
    }
    return read_places(keys, place)


def _secret(value: str) -> str:
    """Returns a credential without its scheme; a reference to a variable as ``os.environ/NAME``."""
    value = value.strip()
    value = value[7:].strip() if value[:7].lower() == "bearer " else value
    if (found := _VAULT.fullmatch(value)) is not None:
        return ENVIRONMENT_PREFIX + found[1].replace("-", "_").upper()
    if (found := _DECK.fullmatch(value)) is not None:
        return ENVIRONMENT_PREFIX + found[1]
    return value

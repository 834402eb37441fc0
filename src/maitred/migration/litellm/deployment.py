"""One deployment of LiteLLM's `model_list` as an upstream of ours."""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from maitred.migration.litellm.address import UpstreamAddress, is_url, may_carry_key, upstream_address, upstream_entry
from maitred.migration.litellm.credentials import ENVIRONMENT_PREFIX, CredentialNames, is_secret_name
from maitred.migration.litellm.notes import DEPLOYMENT_NOTES, MODEL_NOTES, note_rest
from maitred.migration.litellm.providers import PROVIDERS, UNSUPPORTED_PROVIDERS, Provider, split_model
from maitred.migration.source_keys import SourceKey, read_number

_PARAMETERS = frozenset(
    {
        *("temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "logit_bias", "user"),
        *("presence_penalty", "frequency_penalty", "response_format", "tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning_effort", "thinking", "verbosity", "metadata", "store", "modalities", "audio", "prediction"),
        *("web_search_options", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "logprobs"),
        *("top_logprobs", "service_tier", "chat_template_kwargs", "prompt_cache_key"),
    }
)
"""Fields of requests that a deployment may set for those that do not have them."""
_NUMBERS = frozenset({"temperature", "top_p", "top_k", "max_tokens", "seed", "n", "min_p", "repetition_penalty"})
_TIMEOUTS = {"timeout": "total_timeout_s", "stream_timeout": "first_part_timeout_s"}
_LIMITS = {"rpm": "requests_per_minute", "tpm": "tokens_per_minute"}
_UNIT_PRICES = {
    "input_cost_per_second": ("audio_minute", 60),
    "input_cost_per_character": ("characters", 1e6),
    "input_cost_per_image": ("images", 1),
    "output_cost_per_image": ("images", 1),
}
"""LiteLLM's price of a unit -> ours, and what to multiply it with."""
_MODE_OF_PRICE = {
    "audio_minute": "audio_transcription",
    "characters": "audio_speech",
    "images": "image_generation",
}
_PRICES = {
    "input_cost_per_token": "prompt",
    "output_cost_per_token": "output",
    "cache_read_input_token_cost": "cached",
    "cache_creation_input_token_cost": "cache_write",
}
_CREDENTIAL_HEADERS = frozenset({"authorization", "api-key", "x-api-key", "proxy-authorization", "cookie"})
_HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_MODES = {
    **dict.fromkeys(("", "chat", "completion", "responses"), "chat"),
    "embedding": "embedding",
    **dict.fromkeys(("image_generation", "image_edit"), "image_generation"),
    "audio_speech": "audio_speech",
    "audio_transcription": "audio_transcription",
    **dict.fromkeys(("moderation", "moderations"), "moderation"),
}
"""LiteLLM's mode of a model -> ours."""
_MODES_BY_NAME = (
    (re.compile(r"rerank|realtime|sora|(^|/)veo|diffusion|(^|/)flux|text-to-"), ""),
    (re.compile(r"embed"), "embedding"),
    (re.compile(r"whisper|transcribe"), "audio_transcription"),
    (re.compile(r"(^|[-/])tts"), "audio_speech"),
    (re.compile(r"dall-e|gpt-image|imagen"), "image_generation"),
    (re.compile(r"moderation"), "moderation"),
)
"""Modes of models that answer no chat completions, by their names, for entries without a `mode`; empty: not served."""
_NOT_SERVED = (
    "Chat, embeddings, images, speech, transcriptions and moderations are asked of other servers. For ranking, video, "
    "realtime and batches, call the provider directly."
)


class Deployment(Struct, frozen=True):
    """One deployment as an upstream.

    Attributes:
        upstream: The entry of `upstreams`.
        wildcard: The provider's name of the model with its `*`; empty: it has none.
        prices: Entry of `admission.prices`, in dollars a million tokens.
        limits: Requests and tokens a minute that LiteLLM knows of it.
        context_tokens: Longest prompt and answer; None: unknown.
        capabilities: What the model can do; None: all.
        mode: What the model is asked for; see `models.NAME.mode`.
        region: Where it is; empty: nowhere that could be asked for.
    """

    upstream: dict[str, Any]
    wildcard: str = ""
    prices: Mapping[str, Any] = {}
    limits: Mapping[str, int] = {}
    context_tokens: int | None = None
    capabilities: list[str] | None = None
    region: str = ""
    mode: str = "chat"


class DeploymentReader:
    """Reader of deployments, one entry of the list at a time.

    Args:
        credentials: Names of the secrets.
        missing: Takes what must be completed by hand.
    """

    def __init__(self, credentials: CredentialNames, missing: list[str], *, limits_hold: bool) -> None:
        self._credentials = credentials
        self._missing = missing
        self._limits_hold = limits_hold
        self._modes: dict[str, str] = {}
        """Mode of each model."""

    def read(self, item: SourceKey, name: str, pool: str, index: int) -> Deployment | None:
        """Reads a deployment, and says of all its keys what became of them.

        Args:
            item: The entry of `model_list`.
            name: Name that clients use.
            pool: Entry of `models` that it becomes a part of.
            index: Number of the upstream there.

        Returns:
            None if it cannot be an upstream; its keys say why.
        """
        params = item.child("litellm_params")
        place = f"models.{pool}.upstreams[{index}]"
        model = self._text(params.child("model"))
        if not model:
            item.refuse("It names no model (`litellm_params.model`). Name one, or remove the entry.")
            return None
        provider_name, model_name = split_model(model, self._text(params.child("custom_llm_provider")))
        mode = mode_of(self._text(item.child("model_info").child("mode")), model)
        if not mode:
            item.refuse(_NOT_SERVED)
            return None
        if self._modes.setdefault(pool, mode) != mode:
            item.refuse(
                f"An earlier deployment of this name is of the mode `{self._modes[pool]}`, and this one of `{mode}`. "
                "Give it a name of its own."
            )
            return None
        base_key = next((key for key in map(params.child, ("api_base", "base_url")) if key.value), None)
        provider = PROVIDERS.get(provider_name)
        if provider is None:
            if provider_name in UNSUPPORTED_PROVIDERS or base_key is None:
                what = UNSUPPORTED_PROVIDERS.get(
                    provider_name, "Name its URL as `api_base`, if it speaks OpenAI's API, and import again."
                )
                item.refuse(f"Provider {provider_name or model_name!r}: {what}")
                return None
            provider = Provider(why="It is asked as a server with OpenAI's API; look whether it speaks it.")
        if model_name.count("*") > 1:
            item.refuse("A name has one `*` at most. Write the names out.")
            return None
        base = self._base(base_key, provider, place)
        if not base and not provider.url:
            base = f"https://{provider_name.replace('_', '-') or 'server'}.invalid"
            self._missing.append(f"{place}.url: the source names no address (`api_base`). Write it there.")
        address = upstream_address(provider, base, model_name, self._places(params, provider, place))
        if address.fault:
            item.refuse(address.fault)
            return None
        if mode != "chat" and address.kind == "anthropic":
            item.refuse(f"Anthropic's API has no requests of the mode `{mode}`. Name another provider.")
            return None
        return self._deployment(item, params, address, provider, base_key, (name, pool, place))

    def _deployment(
        self,
        item: SourceKey,
        params: SourceKey,
        address: UpstreamAddress,
        provider: Provider,
        base_key: SourceKey | None,
        names: tuple[str, str, str],
    ) -> Deployment:
        """Makes the upstream, now that its address is known."""
        name, pool, place = names
        info = item.child("model_info")
        wildcard = address.model if "*" in address.model else ""
        upstream = upstream_entry(address, provider)
        if not wildcard and address.model != pool:
            upstream["model"] = address.model
        item.child("model_name").map_to(f"models.{pool}" if "*" not in name else f"routing.names.{name}")
        note = " ".join(address.notes)
        target = f"routing.names.{name}" if wildcard else f"{place}.model"
        if note:
            params.child("model").approximate(target, note)
        else:
            params.child("model").map_to(target)
        params.child("custom_llm_provider").map_to(f"{place}.url")
        if base_key is not None:
            if note:
                base_key.approximate(f"{place}.url", note)
            else:
                base_key.map_to(f"{place}.url")
        params.child("api_version").ignore("Azure's v1 API has no dated versions.")
        self._add_key(params.child("api_key"), upstream, provider, address, name, place)
        self._add_parameters(params, upstream, place)
        self._add_headers(params, upstream, place)
        self._add_timeouts(params, upstream, place)
        retries = "Retries are set for all models, in `dispatch.retries`."
        for key_name in ("max_retries", "num_retries"):
            params.child(key_name).approximate("dispatch.retries", retries)
        for key_name in ("weight", "order"):
            self._place_key(params.child(key_name), name, key_name)
        if info.child("id").value is not None:
            upstream["name"] = str(info.child("id").value)[:256]
            info.child("id").map_to(f"{place}.name")
        if self._text(info.child("mode")) == "responses" and address.kind == "openai":
            upstream["responses"] = True
            info.child("mode").map_to(f"{place}.responses")
        mode = self._modes[pool]
        if mode != "chat":
            info.child("mode").map_to(f"models.{pool}.mode")
        info.child("mode").ignore("Chat completions and completions are served by every model.")
        region = self._text(params.child("region_name"))
        params.child("region_name").approximate(f"models.{pool}.region", "All upstreams of a model are in one region.")
        deployment = Deployment(
            upstream,
            wildcard,
            prices=self._prices((info, params), name, mode),
            limits=self._limits((item, params), name),
            context_tokens=self._context(info, pool),
            capabilities=self._capabilities(info, pool),
            region=region,
            mode=mode,
        )
        for word in ("aws_region_name", "vertex_project", "vertex_ai_project", "vertex_location", "vertex_ai_location"):
            params.child(word).ignore("This provider does not read it.")
        note_rest(params, DEPLOYMENT_NOTES)
        note_rest(info, MODEL_NOTES)
        for _, key in info.children():
            key.ignore("It describes the model for `/model/info`.")
        for misplaced in ("model", "api_key", "api_base", "api_version", "base_model"):
            item.child(misplaced).refuse("LiteLLM does not read it here. It belongs into `litellm_params`.")
        return deployment

    def _text(self, key: SourceKey) -> str:
        value = self._credentials.resolve(key.value)
        return value.strip() if isinstance(value, str) else ""

    def _base(self, key: SourceKey | None, provider: Provider, place: str) -> str:
        """Returns `api_base`; one that is not known yet becomes an address that must be replaced."""
        if key is None:
            return self._credentials.env.get(provider.base, "") if provider.base else ""
        raw = str(key.value).strip()
        base = self._text(key)
        if base and is_url(base):
            return base
        if raw.startswith(ENVIRONMENT_PREFIX):
            variable = raw.removeprefix(ENVIRONMENT_PREFIX)
            self._missing.append(
                f"{place}.url: URLs are written out. Set {variable} and import again, or write the address there."
            )
            return f"https://{re.sub(r'[^a-z0-9]+', '-', variable.lower()).strip('-')}.invalid"
        self._missing.append(f"{place}.url: {key.path} is no URL. Write the address there.")
        return "https://address.invalid"

    def _places(self, params: SourceKey, provider: Provider, place: str) -> dict[str, str]:
        """Returns region, project and location, from the deployment or from the environment."""
        found: dict[str, str] = {}
        if provider.shape not in ("bedrock", "vertex"):
            return found
        for part, names, variables in (
            ("REGION", ("aws_region_name",), ("AWS_REGION_NAME", "AWS_REGION", "AWS_DEFAULT_REGION")),
            ("PROJECT", ("vertex_project", "vertex_ai_project"), ("VERTEXAI_PROJECT", "GOOGLE_CLOUD_PROJECT")),
            ("LOCATION", ("vertex_location", "vertex_ai_location"), ("VERTEXAI_LOCATION",)),
        ):
            keys = [params.child(name) for name in names if params.child(name).value]
            for key in keys:
                key.map_to(f"{place}.url")
                if value := self._text(key):
                    found[part] = re.sub(r"[^A-Za-z0-9.:_-]", "-", value)
                else:
                    self._missing.append(f"{place}.url: {key.path} is not known. Set it and import again.")
            for variable in variables:
                if part not in found and (known := self._credentials.env.get(variable)):
                    found[part] = known
        return found

    def _add_key(
        self,
        key: SourceKey,
        upstream: dict[str, Any],
        provider: Provider,
        address: UpstreamAddress,
        name: str,
        place: str,
    ) -> None:
        """Adds the API key by reference."""
        value = str(key.value).strip() if key.value is not None else ""
        if not value or value.lower() in ("none", "null"):
            is_its_own = _host(address.url) == _host(provider.url) or provider.shape in ("azure", "azure_ai", "bedrock")
            if provider.key and (is_its_own or provider.shape == "vertex") and may_carry_key(address.url):
                use = f"API key of {place}, as LiteLLM reads it"
                upstream["api_key"] = self._credentials.variable(provider.key, use)
            key.ignore("It says that there is no key.")
            return
        if not may_carry_key(address.url):
            key.refuse("A key would go over the network in the open. Use https, and set `upstreams[].api_key`.")
            return
        upstream["api_key"] = self._credentials.reference(value, f"{name}_API_KEY", f"the value of {key.path}")
        key.map_to(f"{place}.api_key")

    def _add_parameters(self, params: SourceKey, upstream: dict[str, Any], place: str) -> None:
        """Adds fields that requests get if they do not have them."""
        parameters: dict[str, Any] = {}
        given = [*params.children(), *params.child("extra_body").children()]
        for name, key in given:
            handled = name in _HANDLED or name in DEPLOYMENT_NOTES or key.value is None or name == "extra_body"
            if handled or is_secret_name(name) or _may_be_secret(key.value):
                continue
            if name in _NUMBERS and not isinstance(key.value, int | float):
                key.refuse("It is no number. Write one.")
            elif name == "reasoning_effort" and isinstance(key.value, dict):
                parameters[name] = str(key.value.get("effort", "medium"))
                key.approximate(
                    f"{place}.parameters.{name}", "Only the effort is set for all; callers ask for the rest."
                )
            else:
                parameters[name] = key.value
                if name in _PARAMETERS:
                    key.map_to(f"{place}.parameters.{name}")
                else:
                    key.approximate(
                        f"{place}.parameters.{name}", "It is sent as it stands; look whether the server knows it."
                    )
        if parameters:
            upstream["parameters"] = parameters
        for name, key in params.children():
            if (
                name not in _HANDLED
                and name not in DEPLOYMENT_NOTES
                and (is_secret_name(name) or _may_be_secret(key.value))
            ):
                key.refuse("It may be a secret, so it is not written. Give `upstreams[].api_key` by reference.")
            elif key.value is None:
                key.ignore("It is empty.")

    def _add_headers(self, params: SourceKey, upstream: dict[str, Any], place: str) -> None:
        headers: dict[str, str] = {}
        for section in ("extra_headers", "headers", "default_headers"):
            for name, key in params.child(section).children():
                value = self._credentials.resolve(key.value)
                if (
                    name.lower() in _CREDENTIAL_HEADERS
                    or is_secret_name(name)
                    or not isinstance(value, str)
                    or _may_be_secret(value)
                ):
                    key.refuse(
                        "Credentials are given as `upstreams[].api_key`, by reference; no other header may be one."
                    )
                elif not _HEADER_NAME.fullmatch(name) or not value.isprintable():
                    key.refuse("It is no name or value of a header. Correct it.")
                else:
                    headers[name] = value
                    key.map_to(f"{place}.headers.{name}")
        organization = params.child("organization")
        if organization.value:
            value = self._credentials.resolve(organization.value)
            if isinstance(value, str):
                headers["OpenAI-Organization"] = value
                organization.map_to(f"{place}.headers.OpenAI-Organization")
            else:
                organization.refuse("Write the organisation out in `upstreams[].headers`.")
        if headers:
            upstream["headers"] = headers

    def _add_timeouts(self, params: SourceKey, upstream: dict[str, Any], place: str) -> None:
        for name, setting in _TIMEOUTS.items():
            key = params.child(name)
            seconds = read_number(self._credentials.resolve(key.value))
            if seconds is not None and 0 < seconds <= 86_400:
                upstream[setting] = seconds
                key.approximate(f"{place}.{setting}", "LiteLLM's time ends one attempt; so does this one, to its end.")
            elif key.value is not None:
                key.refuse("It is no time in seconds, up to a day.")

    def _place_key(self, key: SourceKey, name: str, word: str) -> None:
        if word == "order":
            key.approximate(
                f"routing.names.{name}", "Deployments of a later order are asked when all earlier ones fail."
            )
        else:
            key.approximate("", "Requests go where they are answered first, by what each server has shown it can do.")

    def _limits(self, places: tuple[SourceKey, SourceKey], name: str) -> dict[str, int]:
        """Reads requests and tokens a minute, which LiteLLM reads at two places."""
        found: dict[str, int] = {}
        for word, setting in _LIMITS.items():
            for place in places:
                key = place.child(word)
                value = read_number(self._credentials.resolve(key.value))
                if value is None or value < 1:
                    if key.value is not None:
                        key.refuse("It is no number above 0.")
                    continue
                found[setting] = int(value)
                if self._limits_hold:
                    key.approximate(
                        f"identity.limits.models.{name}.{setting}",
                        "It is the limit of all deployments of the name together.",
                    )
                else:
                    key.approximate(
                        "",
                        "LiteLLM draws by it. Here each server's room is learnt, and its 429 is heeded.",
                    )
        return found

    def _prices(self, places: tuple[SourceKey, SourceKey], name: str, mode: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for word, setting in _PRICES.items():
            for place in places:
                key = place.child(word)
                value = read_number(self._credentials.resolve(key.value))
                if value is None:
                    if key.value is not None:
                        key.refuse("It is no number.")
                elif 0 <= value <= 1:
                    found[setting] = float(f"{value * 1e6:.9g}")
                    key.map_to(f"admission.prices.{name}.{setting}")
                else:
                    key.refuse("A token costs from 0 to 1 dollar. Correct it in `admission.prices`.")
        self._add_unit_prices(found, places, name, mode)
        return found

    def _add_unit_prices(
        self, found: dict[str, Any], places: tuple[SourceKey, SourceKey], name: str, mode: str
    ) -> None:
        """Adds the prices of images, characters and sound, to models that are asked for these."""
        for word, (setting, factor) in _UNIT_PRICES.items():
            for place in places:
                key = place.child(word)
                value = read_number(self._credentials.resolve(key.value))
                if value is None or not 0 <= value <= 1000 or mode != _MODE_OF_PRICE[setting]:
                    if key.value is not None:
                        key.refuse(f"A model of the mode `{mode}` has no such price. See `admission.prices`.")
                    continue
                usd = float(f"{value * factor:.9g}")
                found[setting] = {"*": usd} if setting == "images" else usd
                key.map_to(f"admission.prices.{name}.{setting}")

    def _context(self, info: SourceKey, pool: str) -> int | None:
        prompt, output = (read_number(info.child(word).value) for word in ("max_input_tokens", "max_output_tokens"))
        info.child("max_tokens").ignore("The limit of one answer is the server's own.")
        if prompt is None:
            info.child("max_output_tokens").ignore("The limit of one answer is the server's own.")
            return None
        why = "It is of the prompt there, and of prompt and answer together here."
        for word in ("max_input_tokens", "max_output_tokens"):
            info.child(word).approximate(f"models.{pool}.context_tokens", why)
        return max(2, int(prompt + (output or 0)))

    def _capabilities(self, info: SourceKey, pool: str) -> list[str] | None:
        lacking = set()
        for word, capability in (
            ("supports_vision", "vision"),
            ("supports_function_calling", "tools"),
            ("supports_response_schema", "json_schema"),
        ):
            if info.child(word).value is False:
                lacking.add(capability)
                info.child(word).map_to(f"models.{pool}.capabilities")
        for name, key in info.children():
            if name.startswith("supports_"):
                key.ignore("A model is asked for whatever a request needs, until its server says otherwise.")
        return (
            [each for each in ("tools", "json_schema", "vision", "logprobs") if each not in lacking]
            if lacking
            else None
        )


_HANDLED = frozenset(
    {
        *(
            "model",
            "custom_llm_provider",
            "api_base",
            "base_url",
            "api_key",
            "api_version",
            "organization",
            "region_name",
        ),
        *("extra_headers", "headers", "default_headers", "weight", "order", "max_retries", "num_retries"),
        *("aws_region_name", "vertex_project", "vertex_ai_project", "vertex_location", "vertex_ai_location"),
        *_TIMEOUTS,
        *_LIMITS,
        *_PRICES,
        *_UNIT_PRICES,
    }
)
"""Settings of a deployment that are no fields of requests."""


def mode_of(mode: str, model: str) -> str:
    """Returns what a model is asked for; empty: it is not served here."""
    if mode:
        return _MODES.get(mode, "")
    return next((found for pattern, found in _MODES_BY_NAME if pattern.search(model.lower())), "chat")


def _may_be_secret(value: object) -> bool:
    """Whether a value names a variable anywhere, or begins like a key."""
    if isinstance(value, dict):
        return any(map(_may_be_secret, value.values()))
    if isinstance(value, list):
        return any(map(_may_be_secret, value))
    return isinstance(value, str) and value.startswith((ENVIRONMENT_PREFIX, "sk-", "Bearer ", "Basic "))


def _host(url: str) -> str:
    return url.partition("//")[2].partition("/")[0]

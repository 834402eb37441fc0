"""LiteLLM's settings beside its models: routing, retries, caches, keys and budgets."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from maitred.migration.litellm.credentials import CredentialNames
from maitred.migration.litellm.models import ImportedModels
from maitred.migration.litellm.notes import GENERAL_NOTES, LITELLM_NOTES, ROUTER_NOTES, note_rest
from maitred.migration.source_keys import SourceKey, read_number

_CHAINS = {
    "fallbacks": "general",
    "context_window_fallbacks": "context_length",
    "content_policy_fallbacks": "content_policy",
}
_BUDGETS = {"1d": "usd_per_day", "24h": "usd_per_day", "7d": "usd_per_week", "1w": "usd_per_week",
            "30d": "usd_per_month", "1mo": "usd_per_month", "": "usd_total"}  # fmt: skip
_BALANCE = "Each request goes where its first token is predicted first; see docs/replicas.md."
_LEAST_BODY_MIB, _MOST_BODY_MIB = 0.001, 1024.0
_REDIS_PARTS = ("host", "port", "password", "url", "username", "ssl", "db")
_REDIS_PREFIXED = tuple(f"redis_{part}" for part in _REDIS_PARTS)


class SettingsReader:
    """Reader of `router_settings`, `litellm_settings` and `general_settings`.

    Args:
        config: The new configuration, which gets what is read.
        models: Models that it has.
        credentials: Names of the secrets.
    """

    def __init__(self, config: dict[str, Any], models: ImportedModels, credentials: CredentialNames) -> None:
        self._config = config
        self._models = models
        self._credentials = credentials

    def read(self, document: SourceKey) -> None:
        """Reads all three sections, and says of their keys what became of them."""
        router, litellm, general = (document.child(f"{name}_settings") for name in ("router", "litellm", "general"))
        self._aliases((router.child("model_group_alias"), litellm.child("model_group_alias")))
        for section in (router, litellm):
            for word, chain in _CHAINS.items():
                self._fallbacks(section.child(word), chain)
            self._default_fallbacks(section.child("default_fallbacks"))
            self._retries(section.child("num_retries"))
            self._failures(section.child("allowed_fails"), section.child("cooldown_time"))
        self._timeouts((litellm.child("request_timeout"), router.child("timeout"), general.child("request_timeout")))
        self._timeouts((router.child("stream_timeout"),), "first_part_timeout_s")
        router.child("routing_strategy").approximate("routing.balance", _BALANCE)
        router.child("routing_strategy_args").approximate("routing.balance", _BALANCE)
        self._checks(router.child("optional_pre_call_checks"))
        self._redis(router, _REDIS_PREFIXED, "redis_", "counters", "Limits and budgets are counted there.")
        self._cache(litellm)
        self._budget(litellm.child("max_budget"), litellm.child("budget_duration"))
        self._log(litellm.child("json_logs"))
        self._sizes(general)
        self._master_key((general.child("master_key"), litellm.child("master_key")))
        note_rest(router, ROUTER_NOTES)
        note_rest(litellm, LITELLM_NOTES)
        note_rest(general, GENERAL_NOTES)

    def _set(self, path: str, value: object) -> None:
        """Sets a setting by its path; dots separate its parts."""
        *parents, last = path.split(".")
        section = self._config
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value

    def _routing(self, part: str) -> dict[str, Any]:
        section: dict[str, Any] = self._config.setdefault("routing", {}).setdefault(part, {})
        return section

    def _aliases(self, keys: tuple[SourceKey, ...]) -> None:
        """Reads other names of models. As in LiteLLM, an alias hides a model of its name."""
        for section in keys:
            for alias, key in section.children():
                name = key.child("model").value if isinstance(key.value, dict) else key.value
                if not isinstance(name, str) or name not in self._models.all_names or "*" in alias:
                    key.refuse(f"{_word(name)} is no model of the new configuration. Let it stand for one that is.")
                elif alias == name:
                    key.ignore("It stands for itself.")
                elif alias in self._models.all_names:
                    self._models.names[alias] = self._models.names.get(name, [{"pool": name}])
                    key.approximate(f"routing.names.{alias}", "The model of this name is not asked, as in LiteLLM.")
                else:
                    self._routing("aliases")[alias] = name
                    key.child("hidden").refuse("Aliases are listed in `/v1/models`.")
                    key.map_to(f"routing.aliases.{alias}")

    def _fallbacks(self, section: SourceKey, chain: str) -> None:
        """Reads chains: a list of mappings from a model to those that are tried after it."""
        rows = list(section.items()) or ([section] if isinstance(section.value, dict) else [])
        for row in rows:
            for model, key in row.children():
                for name in self._sources(model):
                    self._chain(name, chain, key)
                if not self._sources(model):
                    key.refuse(f"{_word(model)} is no model of the new configuration.")
            row.refuse("It is no mapping from a model to a list of models.")

    def _sources(self, model: str) -> list[str]:
        """Returns the models whose chain it is: the model itself, that of an alias, or all."""
        if model == "*":
            return [name for name in sorted(self._models.all_names) if "*" not in name]
        aliases = self._config.get("routing", {}).get("aliases", {})
        name = aliases.get(model, model)
        return [name] if name in self._models.all_names and "*" not in name else []

    def _chain(self, name: str, chain: str, key: SourceKey) -> None:
        aliases = self._config.get("routing", {}).get("aliases", {})
        steps = list(key.items()) or ([key] if isinstance(key.value, str) else [])
        for step in steps:
            target = aliases.get(step.value, step.value) if isinstance(step.value, str) else None
            target_path = f"routing.fallbacks.{name}.{chain}"
            if target is None or not self._is_servable(target):
                step.refuse(
                    "It is no name of a model of the new configuration. Name one that is."
                    if isinstance(step.value, str)
                    else "A fallback is a name; what it changes in the request goes into `upstreams[].parameters`."
                )
            elif target == name:
                step.ignore("It is the model itself.")
            else:
                chains = self._routing("fallbacks").setdefault(name, {}).setdefault(chain, [])
                if target not in chains:
                    chains.append(target)
                step.map_to(target_path)

    def _is_servable(self, name: str) -> bool:
        """Whether a request may use this name: it is known, or one with a `*` fits it."""
        if name in self._models.all_names:
            return "*" not in name
        for pattern in self._models.names:
            start, star, end = pattern.partition("*")
            if star and len(name) > len(start) + len(end) and name.startswith(start) and name.endswith(end):
                return True
        return False

    def _default_fallbacks(self, section: SourceKey) -> None:
        for name in sorted(self._models.all_names):
            if "*" not in name:
                self._chain(name, "general", section)

    def _retries(self, key: SourceKey) -> None:
        value = _whole(self._credentials.resolve(key.value))
        if value is not None and 0 <= value <= 100:
            self._set("dispatch.retries", value)
            key.map_to("dispatch.retries")
        elif key.value is not None:
            key.refuse("It is no number from 0 to 100. Set `dispatch.retries`.")

    def _failures(self, fails: SourceKey, cooldown: SourceKey) -> None:
        """Reads when a server is left out: by failures in a row here, by failures in a minute there."""
        value = _whole(fails.value)
        if value is not None and value >= 0:
            self._set("health.breaker.max_fails", value + 1)
            fails.approximate(
                "health.breaker.max_fails", "Failures in a row count, and their part of all; see `health`."
            )
        elif fails.value is not None:
            fails.refuse("It is no number. Set `health.breaker.max_fails`.")
        seconds = read_number(cooldown.value)
        if seconds is not None and seconds > 0:
            self._set("health.breaker.first_open_s", seconds)
            most = max(seconds, 60.0)
            if most > 60.0:
                self._set("health.breaker.most_open_s", most)
            cooldown.approximate(
                "health.breaker.first_open_s", "It doubles each time, and one request finds out at its end."
            )
        elif cooldown.value is not None:
            cooldown.approximate(
                "health", "A server that fails is always left out for a moment, but never the last one."
            )

    def _timeouts(self, keys: tuple[SourceKey, ...], setting: str = "total_timeout_s") -> None:
        """Reads times that hold for all models: they become those of all upstreams without one."""
        for key in keys:
            seconds = read_number(self._credentials.resolve(key.value))
            if seconds is not None and 0 < seconds <= 86_400:
                for model in self._models.models.values():
                    for upstream in model["upstreams"]:
                        upstream.setdefault(setting, seconds)
                key.approximate(f"models.*.upstreams[].{setting}", "It is of each upstream, and ends one attempt.")
            elif key.value is not None:
                key.refuse(f"It is no time in seconds, up to a day. Set `upstreams[].{setting}`.")

    def _checks(self, section: SourceKey) -> None:
        for key in section.items():
            if key.value == "enforce_model_rate_limits":
                key.map_to("identity.limits.models")
            else:
                key.ignore("Conversations return to the server that has their prefix, and responses to their model.")

    def _redis(self, section: SourceKey, words: tuple[str, ...], prefix: str, target: str, use: str) -> bool:
        """Reads the address of a Redis; host, port and password become one URL, given by a variable.

        Returns:
            Whether there is one.
        """
        given = {
            word.removeprefix(prefix): section.child(word) for word in words if section.child(word).value is not None
        }
        if "url" not in given and "host" not in given:
            for key in given.values():
                key.refuse("It names no host.")
            return False
        values = {part: self._credentials.resolve(key.value) for part, key in given.items()}
        name = f"MAITRED_{target.upper()}_URL"
        why = f"redis://user:password@host:port of {section.path}.{prefix}*"
        if "url" in given and str(given["url"].value).startswith("os.environ/"):
            reference = self._credentials.reference(str(given["url"].value), name, why)
        else:
            reference = self._credentials.variable(name, why)
            url = _redis_url(values)
            if url is not None:
                self._credentials.values[name] = url
        self._set(f"{target}.url", reference)
        for key in given.values():
            key.approximate(f"{target}.url", f"It is one URL, in the variable {reference['env']}. {use}")
        return True

    def _cache(self, litellm: SourceKey) -> None:
        """Reads the cache of answers."""
        switch, params = litellm.child("cache"), litellm.child("cache_params")
        kind = str(params.child("type").value or "local")
        kind_why = ""
        if switch.value is False:
            self._set("cache.mode", "off")
            switch.map_to("cache.mode")
        elif switch.value is not None:
            self._set("cache.mode", "exact")
            switch.map_to("cache.mode")
        if kind in ("redis", "redis-cluster") and switch.value is not False:
            has_url = self._redis(params, _REDIS_PARTS, "", "cache", "Answers are kept there.")
            kind_why = "" if has_url else "No host is named (LiteLLM reads REDIS_HOST): set `cache.url`."
        elif "semantic" in kind:
            params.child("type").refuse("Similar questions need an encoder here, and are certified: see docs/cache.md.")
        elif kind not in ("local", "in-memory", "in_memory"):
            kind_why = "Answers are kept in memory, or in a Redis (`cache.url`)."
        if kind_why:
            params.child("type").approximate("cache", kind_why)
        params.child("type").map_to("cache")
        for word in ("ttl", "default_in_memory_ttl", "default_in_redis_ttl"):
            seconds = read_number(params.child(word).value)
            if seconds is not None and 0 < seconds <= 30 * 86_400:
                self._set("cache.ttl_s", seconds)
                params.child(word).map_to("cache.ttl_s")
        namespace = params.child("namespace")
        if (
            isinstance(namespace.value, str)
            and namespace.value.replace("-", "").replace("_", "").replace(".", "").isalnum()
        ):
            self._set("cache.namespace", namespace.value[:64])
            namespace.map_to("cache.namespace")
        if params.child("mode").value == "default_off":
            self._set("cache.mode", "off")
            params.child("mode").approximate("cache.mode", "It is off for all; `cache.rules` switch it on for some.")
        for _, key in params.children():
            if key.path.rpartition(".")[2] in ("supported_call_types", "max_connections", "redis_flush_size", "mode"):
                key.ignore("Chat completions, completions, messages and responses are kept; connections are few.")
            key.refuse("It belongs to another kind of cache. See docs/cache.md for the settings of `cache`.")

    def _budget(self, amount: SourceKey, duration: SourceKey) -> None:
        """Reads the budget of the whole proxy."""
        value = read_number(self._credentials.resolve(amount.value))
        window = _BUDGETS.get(str(duration.value or ""))
        if value is None or value <= 0 or window is None:
            amount.refuse("Set `identity.limits.usd_per_month`, or another window.")
            duration.refuse("Budgets are of a day, a week, a month or in all. Set `identity.limits`.")
            return
        self._set(f"identity.limits.{window}", max(value, 1e-9))
        why = "Windows are those of the calendar, in UTC. It needs prices: `admission.prices`."
        amount.approximate(f"identity.limits.{window}", why)
        duration.approximate(f"identity.limits.{window}", why)

    def _log(self, key: SourceKey) -> None:
        if isinstance(key.value, bool):
            self._set("log.format", "json" if key.value else "text")
            key.map_to("log.format")

    def _sizes(self, general: SourceKey) -> None:
        """Reads what the whole proxy takes at a time, and how much of one request."""
        most = general.child("global_max_parallel_requests")
        value = _whole(most.value)
        if value is not None and value > 0:
            self._set("identity.limits.concurrent_requests", value)
            most.map_to("identity.limits.concurrent_requests")
        size = general.child("max_request_size_mb")
        megabytes = read_number(size.value)
        if megabytes is not None and _LEAST_BODY_MIB <= megabytes <= _MOST_BODY_MIB:
            self._set("server.max_body_bytes", int(megabytes * (1 << 20)))
            size.map_to("server.max_body_bytes")

    def _master_key(self, keys: tuple[SourceKey, ...]) -> None:
        """Reads the key that may do everything; it goes on working."""
        for key in keys:
            if isinstance(key.value, str) and key.value.strip() and "tenants" not in self._config:
                secret = self._credentials.reference(
                    key.value.strip(), "LITELLM_MASTER_KEY", f"the value of {key.path}"
                )
                master = {"secret": secret, "foreign": True, "scopes": ["admin", "inference", "metrics"]}
                self._config["tenants"] = {"litellm": {"name": "LiteLLM", "keys": {"master": master}}}
                self._set("server.allow_unauthenticated", False)  # as in LiteLLM, which asks everybody for a key then
                key.approximate(
                    "tenants.litellm.keys.master",
                    "It goes on working. The console wants one of ours: `maitred keys create --scope admin`.",
                )
            elif key.value is not None:
                key.refuse("There is a master key already, or this is none. Make keys by `maitred keys create`.")


def _redis_url(values: Mapping[str, object]) -> str | None:
    """Returns the URL of a Redis; None: not all of its parts are known."""
    if any(value is None for value in values.values()):
        return None
    if "url" in values:
        return str(values["url"])
    login = quote(str(values.get("username", "")), safe="")
    if "password" in values:
        login += f":{quote(str(values['password']), safe='')}"
    scheme = "rediss" if str(values.get("ssl", "")).lower() in ("true", "1") else "redis"
    at = f"{login}@" if login else ""
    return f"{scheme}://{at}{values['host']}:{values.get('port', 6379)}/{values.get('db', 0)}"


def _whole(value: object) -> int | None:
    number = read_number(value)
    return int(number) if number is not None and number == int(number) else None


def _word(name: object) -> str:
    return repr(name) if isinstance(name, str) and len(name) < 200 else "This"

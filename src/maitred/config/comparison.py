"""Comparison of two configurations: what has changed, what of it a reload can apply, and the result.

Most settings can be applied, because the code that uses them reads them again. The others are in `RESTART`, each with
the reason for operators; when one of them has changed, the server keeps the value that it started with. So a reload is
never partial without notice: every changed setting is either applied or named.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from msgspec import NODEFAULT, Struct, inspect
from msgspec.structs import replace

from maitred.config.render import format_value
from maitred.config.tree import Config, TextModelConfig
from maitred.core.secret import Secret

_AT_ENGINE_START = "it is used when an engine starts"
_AT_SERVER_START = "it is opened when the server starts"

RESTART: Mapping[str, str] = {
    "server.host": "the address is bound when the server starts",
    "server.port": "the address is bound when the server starts",
    "server.workers": "the processes are started with the server",
    "model": "its engines and its tokenizer are started with the server",
    "model.autoscaling.enabled": "its replicas are watched from the start of the server on",
    "model.autoscaling.warm_up_s": "its replicas are watched from the start of the server on",
    "engine": _AT_ENGINE_START,
    "engine_link": _AT_ENGINE_START,
    "region": "a process is in one region from its start to its end",
    "agents": _AT_SERVER_START,
    "kubernetes": _AT_SERVER_START,
    "ray": _AT_ENGINE_START,
    "encoder": _AT_ENGINE_START,
    "residency": "the memory is shared out when the server starts",
    "models.*.path": "models with a path are found and measured when the server starts",
    "models.*.pinned": "models with a path are found and measured when the server starts",
    "models.*.memory_bytes": "models with a path are found and measured when the server starts",
    "models.*.engine": _AT_ENGINE_START,
    "models.*.tool_parser": _AT_ENGINE_START,
    "models.*.reasoning_parser": _AT_ENGINE_START,
    "models.*.control_tokens": _AT_ENGINE_START,
    "models.*.trust_request_chat_template": _AT_ENGINE_START,
    "models.*.tokenizer_cache_bytes": _AT_ENGINE_START,
    "models.*.generation_config": _AT_ENGINE_START,
    "dispatch.service": "engines and queues must count alike, and engines are told when they start",
    "identity.oidc": "the keys of the identity providers are fetched from the start on",
    "admission.lease_s": "the clock of the counters is set up with it",
    "admission.grammars.workers": "the processes are started once",
    "admission.grammars.compile_s": "the processes are started once",
    "store": _AT_SERVER_START,
    "counters": _AT_SERVER_START,
    "cache.url": _AT_SERVER_START,
    "cache.namespace": _AT_SERVER_START,
    "cache.answer_timeout_s": _AT_SERVER_START,
    "traces": "the exporter, and engines, are told when they start",
}
"""Settings that need a restart, and why. A name stands for everything below it, except for what `LIVE` has."""

LIVE: frozenset[str] = frozenset(
    {
        "profile",
        "server",
        "model.autoscaling",
        "model.region",
        "model.max_choices",
        "model.degradation",
        "models",
        "identity",
        "tenants",
        "admission",
        "dispatch",
        "routing",
        "health",
        "idempotency",
        "cache",
        "log",
        "metrics",
        "slos",
        "explain",
        "console",
    }
)
"""Settings that a reload applies, except for what `RESTART` names more closely."""


class SettingChange(Struct, frozen=True, kw_only=True):
    """Changed setting, with both values."""

    setting: str
    before: str | None
    """Value as it would stand in the file, secrets as references; None: the setting was not there."""
    after: str | None
    restart: str | None = None
    """Reason why the change needs a restart; None: a reload applies it."""


class ConfigComparison(Struct, frozen=True, kw_only=True):
    """Result of a reload.

    Attributes:
        config: Configuration in force after it.
        changes: Changes that it applies.
        pending: Changes that wait for a restart.
    """

    config: Config
    changes: tuple[SettingChange, ...]
    pending: tuple[SettingChange, ...]


def compare_configs(running: Config, read: Config) -> ConfigComparison:
    """Compares a configuration that was read with the one that is in force."""
    changes = list(_changes(running, read, _ROOT_PATH))
    if running.has_engine != read.has_engine and not any(change.setting.startswith("model.") for change in changes):
        texts = {True: "served", False: "not served"}
        before, after = texts[running.has_engine], texts[read.has_engine]
        changes.append(SettingChange(setting="model", before=before, after=after, restart=RESTART["model"]))
    config = _apply_live(running, read, _ROOT_PATH)
    assert isinstance(config, Config)
    return ConfigComparison(
        config=config,
        changes=tuple(change for change in changes if change.restart is None),
        pending=tuple(change for change in changes if change.restart is not None),
    )


class _SettingPath(NamedTuple):
    """Path of a value in the tree of settings."""

    name: str
    """Name for people: ``models.gpt-4.1.upstreams[0].url``."""
    pattern: str
    """Name for the tables above: ``models.*.upstreams.url``."""

    def child_field(self, field: str) -> "_SettingPath":
        """Returns the path of a setting of the section."""
        return (
            _SettingPath(f"{self.name}.{field}", f"{self.pattern}.{field}") if self.name else _SettingPath(field, field)
        )

    def child_entry(self, entry: str) -> "_SettingPath":
        """Returns the path of an entry whose name the operator chose."""
        return _SettingPath(f"{self.name}.{entry}", f"{self.pattern}.*")

    def child_item(self, index: int) -> "_SettingPath":
        """Returns the path of an entry of a list."""
        return _SettingPath(f"{self.name}[{index}]", self.pattern)


_ROOT_PATH = _SettingPath("", "")


def restart_reason(pattern: str) -> str | None:
    """Returns why a setting needs a restart; None: a reload applies it. The longest matching name decides.

    Args:
        pattern: Its name, with ``*`` for names that the operator chose.

    Raises:
        LookupError: The tables have no matching name.
    """
    words = pattern.split(".")
    for length in range(len(words), 0, -1):
        name = ".".join(words[:length])
        if name in RESTART:
            return RESTART[name]
        if name in LIVE:
            return None
    raise LookupError(f"Nobody has said whether {pattern} needs a restart. Name it in LIVE or in RESTART.")


def _changes(
    running: object, read: object, path: _SettingPath, inherited_reason: str | None = None
) -> Iterator[SettingChange]:
    """Yields each setting that differs."""
    if running == read:
        return
    if isinstance(running, Struct) and isinstance(read, Struct):
        inherited_reason = inherited_reason or _loaded_model_reason(running, read)
        for field in running.__struct_fields__:
            yield from _changes(
                getattr(running, field), getattr(read, field), path.child_field(field), inherited_reason
            )
    elif isinstance(running, dict) and isinstance(read, dict) and _are_sections(running, read):
        for entry in {**running, **read}:
            old, new, entry_path = running.get(entry), read.get(entry), path.child_entry(entry)
            if old is not None and new is not None:
                yield from _changes(old, new, entry_path, inherited_reason)
            else:
                reason = inherited_reason or _loaded_model_reason(old, new) or restart_reason(entry_path.pattern)
                before, after = (None if value is None else _format(value) for value in (old, new))
                yield SettingChange(setting=entry_path.name, before=before, after=after, restart=reason)
    elif isinstance(running, list) and isinstance(read, list) and _are_section_lists(running, read):
        for number, (old, new) in enumerate(zip(running, read, strict=True)):
            yield from _changes(old, new, path.child_item(number), inherited_reason)
    else:
        reason = inherited_reason or restart_reason(path.pattern)
        yield SettingChange(setting=path.name, before=_format(running), after=_format(read), restart=reason)


def _apply_live(running: object, read: object, path: _SettingPath) -> object:
    """Returns the values after a reload: those that were read, or the running ones where a restart is needed."""
    if running == read or _loaded_model_reason(running, read) is not None:
        return running
    if isinstance(running, Struct) and isinstance(read, Struct):
        fields = running.__struct_fields__
        return replace(
            read, **{f: _apply_live(getattr(running, f), getattr(read, f), path.child_field(f)) for f in fields}
        )
    if restart_reason(path.pattern) is not None:
        return running
    if isinstance(running, dict) and isinstance(read, dict) and _are_sections(running, read):
        # In the order of the new configuration; entries that stay until a restart come last
        names = {**read, **running}
        settled = {name: _apply_live(running.get(name), read.get(name), path.child_entry(name)) for name in names}
        return {name: entry for name, entry in settled.items() if entry is not None}
    return read


def _loaded_model_reason(running: object, read: object) -> str | None:
    """Returns why an entry needs a restart: a local model can neither be added nor removed. None: it does not."""
    entries = [entry for entry in (running, read) if isinstance(entry, TextModelConfig)]
    loaded = [entry for entry in entries if entry.path is not None]
    if not loaded or len(loaded) == 2:
        return None
    return RESTART["models.*.path"]


def _are_sections(*mappings: dict[str, Any]) -> bool:
    """Whether all entries of some mappings are sections whose names the operator chose."""
    return all(isinstance(entry, Struct) for mapping in mappings for entry in mapping.values())


def _are_section_lists(running: list[Any], read: list[Any]) -> bool:
    """Whether two lists hold sections and are equally long."""
    return len(running) == len(read) and all(isinstance(entry, Struct) for entry in (*running, *read))


def _format(value: object) -> str:
    return format_value(_without_secrets(value))


def _without_secrets(value: object) -> object:
    """Converts a value to plain data, without secrets and, in sections, without defaults."""
    if isinstance(value, Secret):
        return value.reference
    if isinstance(value, Struct):
        info = inspect.type_info(type(value))
        assert isinstance(info, inspect.StructType)
        fields = {field.name: (getattr(value, field.name), field) for field in info.fields}
        return {
            name: _without_secrets(entry) for name, (entry, field) in fields.items() if entry != _field_default(field)
        }
    if isinstance(value, list | tuple):
        return [_without_secrets(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _without_secrets(entry) for name, entry in value.items()}
    return value


def _field_default(field: inspect.Field) -> object:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()

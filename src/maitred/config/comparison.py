"""Two configurations side by side: what has changed, what of it can change while the server runs, and what comes out.

Most settings can: they are read anew by whatever they concern. Those that cannot are in `RESTART`, each with the reason
that people are told; when they have changed, the server goes on with the value that it started with. So a reload never
ends in a half of something: every setting is either applied or named.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from msgspec import NODEFAULT, Struct, inspect
from msgspec.structs import replace

from maitred.config.render import written
from maitred.config.tree import Config, TextModelConfig
from maitred.core.secret import Secret

_STARTS = "it is used when an engine starts"
_OPENS = "it is opened when the server starts"

RESTART: Mapping[str, str] = {
    "server.host": "the address is bound when the server starts",
    "server.port": "the address is bound when the server starts",
    "server.workers": "the processes are started with the server",
    "model": "its engines and its tokenizer are started with the server",
    "engine": _STARTS,
    "engine_link": _STARTS,
    "encoder": _STARTS,
    "residency": "the memory is shared out when the server starts",
    "models.*.path": "models with a path are found and measured when the server starts",
    "models.*.pinned": "models with a path are found and measured when the server starts",
    "models.*.memory_bytes": "models with a path are found and measured when the server starts",
    "models.*.engine": _STARTS,
    "models.*.tool_parser": _STARTS,
    "models.*.reasoning_parser": _STARTS,
    "models.*.generation_config": _STARTS,
    "dispatch.service": "engines and queues must count alike, and engines are told when they start",
    "identity.oidc": "the keys of the identity providers are fetched from the start on",
    "admission.lease_s": "the clock of the counters is set up with it",
    "admission.grammars.workers": "the processes are started once",
    "admission.grammars.compile_s": "the processes are started once",
    "store": _OPENS,
    "counters": _OPENS,
    "traces": "the exporter, and engines, are told when they start",
}
"""What needs a restart, and why. A name stands for everything below it, but for what `LIVE` has."""

LIVE: frozenset[str] = frozenset(
    {
        "profile",
        "server",
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
        "log",
        "metrics",
        "slos",
        "explain",
        "console",
    }
)
"""What a reload applies, but for what `RESTART` names more closely."""


class SettingChange(Struct, frozen=True, kw_only=True):
    """One setting that is another one than before."""

    setting: str
    before: str | None
    """As it would stand in the file, secrets as references; None: it was not there."""
    after: str | None
    restart: str | None = None
    """Why it needs a restart; None: it does not."""


class ConfigComparison(Struct, frozen=True, kw_only=True):
    """What a reload makes of a configuration.

    Attributes:
        config: What is in force after it.
        changes: What it applies.
        pending: What waits for a restart.
    """

    config: Config
    changes: tuple[SettingChange, ...]
    pending: tuple[SettingChange, ...]


def compare(running: Config, read: Config) -> ConfigComparison:
    """Puts a configuration that was read beside the one that is in force."""
    found = list(_changes(running, read, _ROOT))
    if running.has_engine != read.has_engine and not any(change.setting.startswith("model.") for change in found):
        texts = {True: "served", False: "not served"}
        before, after = texts[running.has_engine], texts[read.has_engine]
        found.append(SettingChange(setting="model", before=before, after=after, restart=RESTART["model"]))
    config = _settled(running, read, _ROOT)
    assert isinstance(config, Config)
    return ConfigComparison(
        config=config,
        changes=tuple(change for change in found if change.restart is None),
        pending=tuple(change for change in found if change.restart is not None),
    )


class _Place(NamedTuple):
    """Where a value stands in the tree."""

    name: str
    """For people: ``models.gpt-4.1.upstreams[0].url``."""
    pattern: str
    """For the tables above: ``models.*.upstreams.url``."""

    def at(self, field: str) -> "_Place":
        """A setting of the section."""
        return _Place(f"{self.name}.{field}", f"{self.pattern}.{field}") if self.name else _Place(field, field)

    def under(self, entry: str) -> "_Place":
        """An entry under a name of somebody's choice."""
        return _Place(f"{self.name}.{entry}", f"{self.pattern}.*")

    def number(self, number: int) -> "_Place":
        """An entry of a list."""
        return _Place(f"{self.name}[{number}]", self.pattern)


_ROOT = _Place("", "")


def why_restart(pattern: str) -> str | None:
    """Why a setting needs a restart; None: a reload applies it. The longest name that the tables have decides.

    Args:
        pattern: Its name, with ``*`` for names of somebody's choice.

    Raises:
        LookupError: The tables have none.
    """
    words = pattern.split(".")
    for length in range(len(words), 0, -1):
        name = ".".join(words[:length])
        if name in RESTART:
            return RESTART[name]
        if name in LIVE:
            return None
    raise LookupError(f"Nobody has said whether {pattern} needs a restart. Name it in LIVE or in RESTART.")


def _changes(running: object, read: object, place: _Place, held: str | None = None) -> Iterator[SettingChange]:
    """Each setting that differs."""
    if running == read:
        return
    if isinstance(running, Struct) and isinstance(read, Struct):
        held = held or _held(running, read)
        for field in running.__struct_fields__:
            yield from _changes(getattr(running, field), getattr(read, field), place.at(field), held)
    elif isinstance(running, dict) and isinstance(read, dict) and _named(running, read):
        for entry in {**running, **read}:
            one, other, there = running.get(entry), read.get(entry), place.under(entry)
            if one is not None and other is not None:
                yield from _changes(one, other, there, held)
            else:
                why = held or _held(one, other) or why_restart(there.pattern)
                before, after = (None if each is None else _text(each) for each in (one, other))
                yield SettingChange(setting=there.name, before=before, after=after, restart=why)
    elif isinstance(running, list) and isinstance(read, list) and _alike(running, read):
        for number, (one, other) in enumerate(zip(running, read, strict=True)):
            yield from _changes(one, other, place.number(number), held)
    else:
        why = held or why_restart(place.pattern)
        yield SettingChange(setting=place.name, before=_text(running), after=_text(read), restart=why)


def _settled(running: object, read: object, place: _Place) -> object:
    """What is in force after a reload: what was read, and what was running where that needs a restart."""
    if running == read or _held(running, read) is not None:
        return running
    if isinstance(running, Struct) and isinstance(read, Struct):
        fields = running.__struct_fields__
        return replace(read, **{f: _settled(getattr(running, f), getattr(read, f), place.at(f)) for f in fields})
    if why_restart(place.pattern) is not None:
        return running
    if isinstance(running, dict) and isinstance(read, dict) and _named(running, read):
        names = {**read, **running}  # in the order of what was read; what is held stands behind it
        settled = {name: _settled(running.get(name), read.get(name), place.under(name)) for name in names}
        return {name: entry for name, entry in settled.items() if entry is not None}
    return read


def _held(running: object, read: object) -> str | None:
    """Why an entry stays as it is, or away, until a restart: what is loaded here can neither come nor go."""
    entries = [entry for entry in (running, read) if isinstance(entry, TextModelConfig)]
    loaded = [entry for entry in entries if entry.path is not None]
    if not loaded or len(loaded) == 2:
        return None
    return RESTART["models.*.path"]


def _named(*mappings: dict[str, Any]) -> bool:
    """Whether these are sections under names of somebody's choice."""
    return all(isinstance(entry, Struct) for mapping in mappings for entry in mapping.values())


def _alike(running: list[Any], read: list[Any]) -> bool:
    """Whether two lists of sections have as many."""
    return len(running) == len(read) and all(isinstance(entry, Struct) for entry in (*running, *read))


def _text(value: object) -> str:
    return written(_told(value))


def _told(value: object) -> object:
    """A value without secrets, of a section what was set in it."""
    if isinstance(value, Secret):
        return value.reference
    if isinstance(value, Struct):
        info = inspect.type_info(type(value))
        assert isinstance(info, inspect.StructType)
        fields = {field.name: (getattr(value, field.name), field) for field in info.fields}
        return {name: _told(entry) for name, (entry, field) in fields.items() if entry != _default_of(field)}
    if isinstance(value, list | tuple):
        return [_told(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _told(entry) for name, entry in value.items()}
    return value


def _default_of(field: inspect.Field) -> object:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()

"""Loader of the configuration from profile, file, environment and flags; the later layer wins, setting by setting."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from maitred.config.checks import ConfigConflict, find_conflicts
from maitred.config.nodes import DEFAULT_ORIGIN, ConfigFault, ConfigNode, merge
from maitred.config.profiles import profile_layer
from maitred.config.sources import parse_yaml, read_environment, read_overrides, read_yaml
from maitred.config.tree import Config
from maitred.config.walker import StructBuilder
from maitred.core.errors import ConfigInvalid
from maitred.migration.litellm.converter import is_litellm, read_litellm_file
from maitred.migration.report import MigrationReport

S = TypeVar("S", bound=Struct)

DEFAULT_FILE = Path("maitred.yaml")
"""File that is read if it exists in the working directory and no other file is named."""


class LoadedConfig(Struct, frozen=True):
    """Valid configuration, with the origin of each setting.

    Attributes:
        config: Its settings.
        origins: Dotted key of every setting -> ``maitred.yaml:3``, ``MAITRED__SERVER__PORT``, ``--port``, ``profile
            team`` or ``default``.
        migration: What became of each key, if the file is one of another gateway.
    """

    config: Config
    origins: Mapping[str, str]
    migration: MigrationReport | None = None


def load(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    sections: Collection[str] | None = None,
) -> LoadedConfig:
    """Loads the configuration from all layers.

    Args:
        path: A YAML file, which must exist; None reads ``./maitred.yaml`` if there is one. A file of LiteLLM's proxy is
            converted in memory.
        env: Environment variables; those named ``MAITRED__SECTION__SETTING`` are settings, and ``{env: NAME}``
            references are looked up here. None is no environment.
        overrides: Dotted keys (``server.port``) -> value, plain or wrapped in `sources.Flag`. Strings are read as they
            would be from the environment.
        sections: Only these sections are read, and the others keep their defaults. An engine beside a gateway finds the
            same file and environment, but must not judge the gateway's settings. The profile is always read.

    Raises:
        ConfigInvalid: The message lists every fault with its origin.
    """
    env = env or {}
    faults: list[ConfigFault] = []
    migration: MigrationReport | None = None
    subject = "The configuration"
    root, found = read_environment(env)
    faults += found
    if path is not None or DEFAULT_FILE.is_file():
        below, found = read_yaml(path or DEFAULT_FILE)
        if isinstance(below.value, dict) and is_litellm(below.value):
            converted = read_litellm_file(path or DEFAULT_FILE, env)
            below, found = parse_yaml(converted.yaml(), f"{path or DEFAULT_FILE}, converted")
            env = {**env, **converted.environment}
            migration = converted.report
            subject = f"The configuration that `maitred import litellm {path or DEFAULT_FILE}` makes"
        faults = found + faults
        root = merge(below, root)
    above, found = read_overrides(overrides or {})
    faults += found
    root = merge(root, above)
    root = merge(profile_layer(root), root)
    if sections is not None and isinstance(root.value, dict):
        root = ConfigNode(
            {name: node for name, node in root.value.items() if name in {"profile", *sections}}, root.origin
        )
    config, origins = build_struct(Config, inherit_engine_settings(root), env, find_conflicts, faults, subject)
    return LoadedConfig(config, origins, migration)


def build_struct(
    kind: type[S],
    root: ConfigNode,
    env: Mapping[str, str],
    rules: Callable[[S], Iterable[ConfigConflict]],
    faults: Sequence[ConfigFault] = (),
    subject: str = "The configuration",
) -> tuple[S, Mapping[str, str]]:
    """Builds the struct that the merged layers describe, and returns it with the origin of each setting.

    Args:
        kind: Struct to build.
        root: Root node of all layers, merged.
        env: Environment in which ``{env: NAME}`` references are looked up.
        rules: Yields the conflicts between settings.
        faults: Faults that were found while the layers were read.
        subject: Name of the document in the list of faults.

    Raises:
        ConfigInvalid: The message lists every fault with its origin.
    """
    walker = StructBuilder(env)
    built = walker.build(kind, root)
    faults = [*faults, *walker.faults]
    if built is not None:
        # A setting that is wrong by itself holds its default now; what this default conflicts with is no fault.
        faulty_keys = {fault.key for fault in faults}
        faults += [
            ConfigFault(_conflict_origin(conflict.keys, walker.origins), conflict.keys[0], conflict.message)
            for conflict in rules(built)
            if faulty_keys.isdisjoint(conflict.keys)
        ]
    if faults or built is None:
        raise ConfigInvalid(format_faults(faults, subject))
    return built, walker.origins


def format_faults(faults: Sequence[ConfigFault], subject: str) -> str:
    """Formats all faults, one a line, below a line that counts them."""
    count = "a fault" if len(faults) == 1 else f"{len(faults)} faults"
    return "\n".join([f"{subject} has {count}:", *(f"  {fault}" for fault in faults)])


def _conflict_origin(keys: tuple[str, ...], origins: Mapping[str, str]) -> str:
    """Returns where a conflict was written: the origin of the first of its settings that was set at all."""
    return next((origins[key] for key in keys if origins[key] != DEFAULT_ORIGIN), "")


def inherit_engine_settings(root: ConfigNode) -> ConfigNode:
    """Adds the settings of `engine` to every `models.NAME.engine` that does not set them itself.

    Each setting keeps the origin that it was written at. Only models with a `path` have an engine; malformed sections
    are left for the struct builder to report.
    """
    sections = root.value
    if not isinstance(sections, dict):
        return root
    engine, models = sections.get("engine"), sections.get("models")
    if engine is None or models is None or not isinstance(models.value, dict):
        return root
    inheriting = {name: _inherit_engine(model, engine) for name, model in models.value.items()}
    return ConfigNode({**sections, "models": ConfigNode(inheriting, models.origin)}, root.origin)


def _inherit_engine(model: ConfigNode, engine: ConfigNode) -> ConfigNode:
    if not isinstance(model.value, dict) or "path" not in model.value:
        return model
    own = model.value.get("engine")
    return ConfigNode({**model.value, "engine": engine if own is None else merge(engine, own)}, model.origin)

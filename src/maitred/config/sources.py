"""Sources of settings: a YAML file, environment variables, and flags.

Each reader returns a tree of nodes and the faults of syntax that it found; the struct builder decides what a key means.
"""

from collections.abc import Mapping
from pathlib import Path

import yaml
from msgspec import Struct

from maitred.config.nodes import ConfigFault, ConfigNode

ENVIRONMENT_PREFIX = "MAITRED__"
_YAML_TEXT = "tag:yaml.org,2002:str"
_YAML_NULLS = frozenset({"", "~", "null", "Null", "NULL"})


class Flag(Struct, frozen=True):
    """Override from the command line; `name` (``--port``) is what a fault points at."""

    name: str
    value: object


def read_yaml(path: Path) -> tuple[ConfigNode, list[ConfigFault]]:
    """Reads a file as nodes. A file that cannot be read or parsed is one fault and an empty tree."""
    empty = ConfigNode({}, str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return empty, [ConfigFault(str(path), "", "No such file. Pass the path of an existing one.")]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return empty, [ConfigFault(str(path), "", f"Cannot be read as UTF-8 text: {reason}.")]
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> tuple[ConfigNode, list[ConfigFault]]:
    """Parses YAML text to nodes; `name` is the file name in origins and faults."""
    try:
        # BaseLoader leaves unquoted scalars as text: `no`, `1:30` and `0777` mean what the setting takes them for.
        document = yaml.compose(text, Loader=yaml.BaseLoader)
        converter = _YamlConverter(name)
        root = converter.convert(document, "") if document is not None else ConfigNode({}, name)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        return ConfigNode({}, name), [ConfigFault(where, "", f"Not valid YAML: {problem}.")]
    except RecursionError:
        return ConfigNode({}, name), [ConfigFault(name, "", "Nested too deeply for a configuration file.")]
    if root.value is None:
        root = ConfigNode({}, name)
    if not isinstance(root.value, dict):
        fault = ConfigFault(
            root.origin, "", "Must hold sections such as `server:`, each with its settings indented below."
        )
        return ConfigNode({}, name), [*converter.faults, fault]
    return root, converter.faults


class _YamlConverter:
    """Converter of PyYAML's nodes to `ConfigNode`, with line numbers and faults."""

    def __init__(self, name: str) -> None:
        self.faults: list[ConfigFault] = []
        self._name = name
        # A YAML alias shares its anchor's node. Converting each once keeps a file of aliases of aliases small.
        self._converted: dict[int, ConfigNode] = {}
        self._in_progress: set[int] = set()

    def convert(self, source: yaml.Node, key: str) -> ConfigNode:
        origin = f"{self._name}:{source.start_mark.line + 1}"
        if id(source) in self._in_progress:
            self.faults.append(ConfigFault(origin, key, "An alias must not lie inside the value that it repeats."))
            return ConfigNode(None, origin)
        if id(source) not in self._converted:
            self._in_progress.add(id(source))
            self._converted[id(source)] = self._convert(source, origin, key)
            self._in_progress.remove(id(source))
        return self._converted[id(source)]

    def _convert(self, source: yaml.Node, origin: str, key: str) -> ConfigNode:
        if isinstance(source, yaml.MappingNode):
            return ConfigNode(self._mapping(source, key), origin)
        if isinstance(source, yaml.SequenceNode):
            return ConfigNode(
                [self.convert(item, f"{key}[{index}]") for index, item in enumerate(source.value)], origin
            )
        assert isinstance(source, yaml.ScalarNode)
        if source.tag != _YAML_TEXT:
            self.faults.append(
                ConfigFault(origin, key, f"Remove the YAML tag {source.tag!r}; the setting knows its type.")
            )
        plain = source.style is None
        if plain and source.value in _YAML_NULLS:
            return ConfigNode(None, origin)
        return ConfigNode(source.value, origin, is_text=plain)

    def _mapping(self, source: yaml.MappingNode, key: str) -> dict[str, ConfigNode]:
        entries: dict[str, ConfigNode] = {}
        for key_node, value_node in source.value:
            origin = f"{self._name}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                self.faults.append(ConfigFault(origin, key, "A key must be a plain name."))
                continue
            name = key_node.value
            path = f"{key}.{name}" if key else name
            if name in entries:
                self.faults.append(ConfigFault(origin, path, f"Set twice; first at {entries[name].origin}. Keep one."))
            child = self.convert(value_node, path)
            # A scalar is reported where its key stands, also when its text starts further down.
            entries[name] = child if isinstance(child.value, dict) else ConfigNode(child.value, origin, child.is_text)
        return entries


def read_environment(env: Mapping[str, str]) -> tuple[ConfigNode, list[ConfigFault]]:
    """Reads the variables named ``MAITRED__SECTION__SETTING`` as nodes.

    Two underscores are required on purpose: ``MAITRED_…`` with one is what Kubernetes sets for a Service of that name.
    """
    faults: list[ConfigFault] = []
    root: dict[str, ConfigNode] = {}
    for name in sorted(env):
        if name.startswith(ENVIRONMENT_PREFIX):
            parts = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            if all(parts):
                _insert(root, parts, ConfigNode(env[name], name, is_text=True), faults)
            else:
                faults.append(ConfigFault(name, "", "Not of the form MAITRED__SECTION__SETTING."))
    return ConfigNode(root, "environment"), faults


def read_overrides(overrides: Mapping[str, object]) -> tuple[ConfigNode, list[ConfigFault]]:
    """Reads dotted keys and their values, which may be wrapped in `Flag`, as nodes."""
    faults: list[ConfigFault] = []
    root: dict[str, ConfigNode] = {}
    for key, given in overrides.items():
        flag = given if isinstance(given, Flag) else Flag("override", given)
        value = flag.value
        if not all(key.split(".")):
            faults.append(ConfigFault(flag.name, key, "Not of the form section.setting."))
        elif value is None or isinstance(value, str | int | float | bool):
            _insert(root, key.split("."), ConfigNode(value, flag.name, is_text=isinstance(value, str)), faults)
        else:
            faults.append(ConfigFault(flag.name, key, f"Cannot be set to a {type(value).__name__} here."))
    return ConfigNode(root, "overrides"), faults


def _insert(root: dict[str, ConfigNode], parts: list[str], leaf: ConfigNode, faults: list[ConfigFault]) -> None:
    """Inserts a leaf below the mappings that its path names."""
    mapping = root
    for part in parts[:-1]:
        child = mapping.setdefault(part, ConfigNode({}, leaf.origin))
        if not isinstance(child.value, dict):
            faults.append(ConfigFault(leaf.origin, ".".join(parts), f"Cannot be set beside {child.origin}. Keep one."))
            return
        mapping = child.value
    if parts[-1] in mapping:
        faults.append(
            ConfigFault(leaf.origin, ".".join(parts), f"Already set by {mapping[parts[-1]].origin}. Keep one.")
        )
        return
    mapping[parts[-1]] = leaf

"""Builder of the configuration's structs from nodes, which reports every fault instead of the first.

A decoder that stops at the first fault makes an operator restart once per typing mistake. The builder goes through the
types and the nodes side by side; where a value is wrong it adds a fault, uses the default instead and goes on. Structs
nest to any depth, also in lists and under names that the operator chooses (``dict[str, Struct]``).
"""

import csv
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import yaml
from msgspec import UNSET, inspect

from maitred.config.nodes import DEFAULT_ORIGIN, SECRET_SOURCES, ConfigFault, ConfigNode
from maitred.config.scalars import NULL_WORDS, READERS, describe_value
from maitred.core.secret import Secret

S = TypeVar("S", bound=msgspec.Struct)


class StructBuilder:
    """Builder of structs from nodes, for one configuration.

    Args:
        env: Environment in which ``{env: NAME}`` references are looked up.

    Attributes:
        faults: Faults that were found, in the order of the structs.
        origins: Dotted key of every leaf -> where its value came from.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.faults: list[ConfigFault] = []
        self.origins: dict[str, str] = {}
        self._env = env

    def build(self, kind: type[S], root: ConfigNode) -> S | None:
        """Builds the struct, with faulty settings at their defaults; None if one of these has no default."""
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        built = self._build_struct(info, root, "")
        return built if isinstance(built, kind) else None

    def _build_struct(self, info: inspect.StructType, node: ConfigNode | None, key: str) -> object:
        entries: dict[str, ConfigNode] = {}
        if node is not None and node.value is not None:  # `server:` with nothing below it is an empty section
            if isinstance(node.value, dict):
                entries = node.value
            else:
                self._add_fault(
                    node, key, f"Is a section: put its settings below it, such as `{info.fields[0].name}:`."
                )
        names = [field.name for field in info.fields]
        for name, child in entries.items():
            if name not in names:
                self._add_fault(child, _join(key, name), f"No such setting.{self._suggestion(key, name, names, info)}")
        values: dict[str, object] = {}
        for field in info.fields:
            parent = node.origin if node is not None else ""
            value = self._build_field(field, entries.get(field.name), _join(key, field.name), parent)
            if value is not UNSET:
                values[field.name] = value
        missing = any(field.required and field.name not in values for field in info.fields)
        return UNSET if missing else info.cls(**values)

    def _build_field(self, field: inspect.Field, node: ConfigNode | None, key: str, parent: str) -> object:
        """Builds the value of a field; UNSET: its default applies. `parent` is where its section was written."""
        kind, unit = unwrap(field.type)
        if isinstance(kind, inspect.StructType):
            return self._build_struct(kind, node, key)
        if node is None:
            self.origins[key] = DEFAULT_ORIGIN
            if field.required:
                self.faults.append(ConfigFault(parent, key, "Must be set; it has no default."))
            return UNSET
        self.origins[key] = node.origin
        return self._build_value(kind, node, key, unit)

    def _build_value(self, kind: inspect.Type, node: ConfigNode, key: str, unit: str) -> object:
        if isinstance(kind, inspect.UnionType):
            if node.value is None or (node.is_text and node.value in NULL_WORDS):
                return None
            kind, inner_unit = unwrap(next(member for member in kind.types if not isinstance(member, inspect.NoneType)))
            return self._build_value(kind, node, key, unit or inner_unit)
        if isinstance(kind, inspect.StructType):
            return self._build_struct(kind, node, key)
        if isinstance(kind, inspect.DictType):
            return self._build_mapping(kind, node, key, unit)
        if isinstance(kind, inspect.ListType | inspect.VarTupleType):
            return self._build_list(kind, node, key)
        if isinstance(kind, inspect.CustomType) and kind.cls is Secret:
            return self._read_secret(node, key)
        if isinstance(kind, inspect.AnyType):
            return plain_value(node)
        reader = READERS.get(type(kind))
        if reader is None:
            raise TypeError(f"{key}: the configuration has no way to read a {type(kind).__name__}.")
        value, expected = reader(kind, node, unit)
        if value is UNSET:
            self._add_fault(node, key, f"Must be {expected}, not {describe_value(node)}.")
        return value

    def _build_mapping(self, info: inspect.DictType, node: ConfigNode, key: str, unit: str) -> object:
        """Builds a mapping whose names the operator chose, or an enumeration's; wrong entries are left out."""
        if node.value is None:
            return {}
        if not isinstance(node.value, dict):
            self._add_fault(node, key, "Must be names with something below each.")
            return UNSET
        enum_type = info.key_type.cls if isinstance(info.key_type, inspect.EnumType) else None
        kind, inner_unit = unwrap(info.value_type)
        built: dict[object, object] = {}
        for name, child in node.value.items():
            entry_key = _join(key, name)
            if enum_type is not None and name not in enum_type._value2member_map_:
                names = [str(member.value) for member in enum_type]
                self._add_fault(child, entry_key, f"No such name.{self._suggestion(key, name, names)}")
                continue
            self.origins[entry_key] = child.origin
            built[enum_type(name) if enum_type else name] = self._build_value(
                kind, child, entry_key, unit or inner_unit
            )
        return {name: value for name, value in built.items() if value is not UNSET}

    def _build_list(self, info: inspect.ListType | inspect.VarTupleType, node: ConfigNode, key: str) -> object:
        """Builds a list in order; wrong entries are left out."""
        entries = node.value if isinstance(node.value, list) else _parse_inline_list(node)
        if entries is None:
            self._add_fault(
                node, key, f"Must be a list, each entry on a line that begins with `- `, not {describe_value(node)}."
            )
            return UNSET
        kind, unit = unwrap(info.item_type)
        built = [self._build_value(kind, child, f"{key}[{index}]", unit) for index, child in enumerate(entries)]
        collect = tuple if isinstance(info, inspect.VarTupleType) else list
        return collect(value for value in built if value is not UNSET)

    def _read_secret(self, node: ConfigNode, key: str) -> object:
        """Reads the secret that a reference points at.

        Faults never show the node's value: it may be the secret itself.
        """
        entries = node.value if isinstance(node.value, dict) else {}
        if len(entries) != 1 or not entries.keys() <= SECRET_SOURCES:
            self._add_fault(node, key, "Secrets are given by reference: `{env: NAME}` or `{file: path}`.")
            return UNSET
        ((source, target),) = entries.items()
        self.origins[key] = target.origin
        if not isinstance(target.value, str) or not target.value:
            self._add_fault(target, key, f"`{source}` must name {'a variable' if source == 'env' else 'a file'}.")
            return UNSET
        try:
            value = self._env[target.value] if source == "env" else Path(target.value).read_text(encoding="utf-8")
        except KeyError:
            self._add_fault(target, key, f"The environment variable {target.value} is not set.")
            return UNSET
        except (OSError, ValueError):
            self._add_fault(target, key, f"The file {target.value!r} cannot be read as text.")
            return UNSET
        if not value.strip():
            self._add_fault(target, key, f"The secret in {source} {target.value} is empty.")
            return UNSET
        return Secret(value.rstrip("\r\n"), f"{{{source}: {target.value}}}")

    def _suggestion(self, parent: str, name: str, names: list[str], info: inspect.StructType | None = None) -> str:
        close = difflib.get_close_matches(name[:64], names, n=1)
        if close:
            return f" Did you mean {_join(parent, close[0])}?"
        # The right name too high, such as `port` at the top. Whoever names a section means it, so others are not meant.
        if info is not None:
            keys = leaf_keys(info, parent)
            if found := [key for key in keys if key.rpartition(".")[2] == name]:
                return f" Did you mean {min(found, key=lambda key: key.count('.'))}?"
        return f" There are: {', '.join(names)}."

    def _add_fault(self, node: ConfigNode, key: str, message: str) -> None:
        readable = key if key.isprintable() and len(key) <= 120 else repr(key[:120])
        self.faults.append(ConfigFault(node.origin, readable, message))


def plain_value(node: ConfigNode) -> object:
    """Converts a node of any kind to plain data."""
    match node.value:
        case dict() as entries:
            return {name: plain_value(child) for name, child in entries.items()}
        case list() as entries:
            return [plain_value(child) for child in entries]
        case str() as text if node.is_text:
            return yaml.safe_load(text)
        case value:
            return value


def unwrap(kind: inspect.Type) -> tuple[inspect.Type, str]:
    """Returns the type below its metadata, and the unit that the metadata names."""
    unit = ""
    while isinstance(kind, inspect.Metadata):
        unit = unit or (kind.extra or {}).get("unit", "")
        kind = kind.type
    return kind, unit


def nested_struct(kind: inspect.Type) -> tuple[inspect.StructType | None, str]:
    """Returns the struct nested in a setting's type, with the suffix for its name or number.

    For a plain setting the struct is None.
    """
    kind, _ = unwrap(kind)
    suffix = ""
    if isinstance(kind, inspect.DictType):
        kind, suffix = unwrap(kind.value_type)[0], ".NAME"
    elif isinstance(kind, inspect.ListType):
        kind, suffix = unwrap(kind.item_type)[0], "[]"
    return (kind, suffix) if isinstance(kind, inspect.StructType) else (None, "")


def leaf_keys(info: inspect.StructType, parent: str = "", seen: set[type] | None = None) -> list[str]:
    """Returns the dotted names of all settings below a struct.

    Settings of a struct that occurs twice are listed only where it occurs first.
    """
    seen = set() if seen is None else seen
    keys: list[str] = []
    for field in info.fields:
        inside, suffix = nested_struct(field.type)
        key = _join(parent, field.name)
        if inside is None:
            keys.append(key)
        elif inside.cls not in seen:
            seen.add(inside.cls)
            keys += leaf_keys(inside, key + suffix, seen)
    return keys


def _parse_inline_list(node: ConfigNode) -> list[ConfigNode] | None:
    """Parses the words of ``[a, "b"]``, the form of a list in environment variables and flags.

    A word is in quotes or not, and need not be valid YAML: ``[tcp:[::1]:9]`` is a list, too.

    Returns:
        A node for each word; None: the node is not such a list.
    """
    if not (node.is_text and isinstance(node.value, str)):
        return None
    text = node.value.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    if not (inner := text[1:-1].strip()):
        return []
    try:
        words = next(
            csv.reader([inner.replace("\n", " ")], quotechar=_quote_of(inner), skipinitialspace=True, strict=True)
        )
    except csv.Error:
        return None
    return [ConfigNode(word.strip(), node.origin, is_text=True) for word in words]


def _quote_of(words: str) -> str:
    """Returns the character that quotes the words of an inline list."""
    return "'" if words.startswith("'") else '"'


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name

"""Rendering of settings: those in force as YAML, and the reference in docs/."""

import textwrap
from collections.abc import Collection, Iterator, Mapping

import msgspec
import yaml
from msgspec import inspect

from maitred.config.loader import LoadedConfig
from maitred.config.nodes import DEFAULT_ORIGIN
from maitred.config.scalars import bounds
from maitred.config.sources import ENVIRONMENT_PREFIX
from maitred.config.tree import Config
from maitred.config.units import format_bytes
from maitred.config.walker import nested_struct, unwrap
from maitred.core.secret import Secret

_COLUMNS = 120
_PREAMBLE = """\
# Configuration

<!-- Written by `maitred config docs` (`make docs`) from the structs that hold the settings. Do not edit. -->

Every setting has a default, so maitred runs without any of this. Settings come from four layers, and the later one
wins, setting by setting:

1. a profile, if one is named: `--profile NAME`, `profile: NAME` in the file, or `MAITRED__PROFILE`; see
   [profiles](profiles.md);
2. a YAML file: `--config PATH`, or `maitred.yaml` in the working directory if it exists;
3. environment variables, `MAITRED__SECTION__SETTING` (two underscores each);
4. command-line flags, of which `--set section.setting=value` reaches every setting.

```yaml
# maitred.yaml
server:
  port: 9000
engine:
  kv_memory_bytes: 2GiB
```

`maitred config check` reads all layers and lists every fault, with the line, variable or flag that it stands in.
`maitred config show --origin` prints what is in force and where each value came from. An unknown name is an error, not
ignored.

Sizes in bytes are written as a number or with a unit: `64MiB` and `2GiB` count in 1024s, `64MB` and `2GB` in 1000s.
Seconds too: `1.5`, `500ms`, `30s`, `2m`, `1h`.
Relative paths start at the working directory. Secrets are never written into the file: `{env: NAME}` takes a secret
from an environment variable, `{file: path}` from a file, and neither is ever printed.
"""


def to_yaml(loaded: LoadedConfig, *, with_origins: bool = False) -> str:
    """Renders the settings in force as YAML that `load` reads back; secrets as the references they were given by."""
    return settings_yaml(loaded.config, loaded.origins, with_origins=with_origins)


def settings_yaml(settings: msgspec.Struct, origins: Mapping[str, str], *, with_origins: bool = False) -> str:
    """Renders a struct of sections as YAML. At deeper levels, only settings that were set are shown."""
    lines: list[tuple[str, str]] = []
    for name, value, unit in _child_settings(settings) or ():
        lines += _setting_lines(name, value, unit, name, origins)
    if with_origins:
        return "".join(f"{text:<40}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)
    return "".join(f"{text}\n" for text, _ in lines)


def _child_settings(value: object) -> list[tuple[str, object, str]] | None:
    """Returns name, value and unit of the settings below `value`; None for a plain value."""
    if isinstance(value, msgspec.Struct):
        info = inspect.type_info(type(value))
        assert isinstance(info, inspect.StructType)
        return [(field.name, getattr(value, field.name), unwrap(field.type)[1]) for field in info.fields]
    if isinstance(value, dict) and value and all(isinstance(entry, msgspec.Struct) for entry in value.values()):
        return [(name, entry, "") for name, entry in value.items()]
    return None


def _setting_lines(
    name: str, value: object, unit: str, key: str, origins: Mapping[str, str], depth: int = 0
) -> list[tuple[str, str]]:
    """Returns the lines of a setting, each with the origin of its value; a heading has none."""
    start = f"{'  ' * depth}{format_value(name)}:"
    children = _child_settings(value)
    if children is None and isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
        return _list_lines(start, value, key, origins, depth)
    if children is None:
        is_hidden = depth > 1 and origins[key] == DEFAULT_ORIGIN
        return [] if is_hidden else [(f"{start} {format_value(value, unit)}", origins[key])]
    lines: list[tuple[str, str]] = []
    for child, entry, child_unit in children:
        lines += _setting_lines(child, entry, child_unit, f"{key}.{child}", origins, depth + 1)
    if lines:
        return [(start, ""), *lines]
    # A section without settings is not shown at depth, but an entry that the operator named is.
    return [(f"{start} {{}}", "")] if depth < 2 or key in origins else []


def _list_lines(
    start: str, entries: list[msgspec.Struct], key: str, origins: Mapping[str, str], depth: int
) -> list[tuple[str, str]]:
    """Returns the lines of a list of structs, each begun by a dash; of each, only settings that were set."""
    lines = [(start, "")]
    for index, entry in enumerate(entries):
        inside: list[tuple[str, str]] = []
        for child, value, unit in _child_settings(entry) or ():
            inside += _setting_lines(child, value, unit, f"{key}[{index}].{child}", origins, max(depth + 2, 2))
        margin = "  " * (depth + 1)
        text, origin = inside[0] if inside else (f"{margin}  {{}}", "")
        lines += [(f"{margin}- {text[len(margin) + 2 :]}", origin), *inside[1:]]
    return lines


def configuration_reference() -> str:
    """Renders `docs/configuration.md`: every setting with its type, range, default and meaning."""
    return _PREAMBLE + settings_reference(Config)


def settings_reference(kind: type[msgspec.Struct]) -> str:
    """Renders every setting of a struct of sections with the variable that sets it.

    A struct that occurs several times is described at the first one.
    """
    root = inspect.type_info(kind)
    assert isinstance(root, inspect.StructType)
    first_names: dict[type, str] = {}
    parts: list[str] = []
    for field in root.fields:
        info, suffix = nested_struct(field.type)
        if info is None:
            parts += _top_level_setting(field)
        else:
            parts += _section_reference(field.name + suffix, info, _description(field.type), first_names)
    return "".join(parts)


def _top_level_setting(field: inspect.Field) -> Iterator[str]:
    """Yields the reference of a setting that is in no section."""
    yield _setting_reference("", field).replace("\n### ", "\n## ", 1)
    yield f"- Environment: `{ENVIRONMENT_PREFIX}{field.name.upper()}`\n"


def document_reference(kind: type[msgspec.Struct], *, without: Collection[str] = ()) -> str:
    """Renders every setting of a document (see `document.read_document`), section by section.

    Args:
        kind: Struct of the document.
        without: Top-level sections to leave out.
    """
    root = inspect.type_info(kind)
    assert isinstance(root, inspect.StructType)
    parts: list[str] = []
    top_level: list[str] = []
    for field in root.fields:
        info, suffix = nested_struct(field.type)
        if field.name in without:
            continue
        if info is None:
            top_level.append(_setting_reference("", field))
        else:
            parts += _section_reference(field.name + suffix, info, _description(field.type))
    return "".join([*parts, *(["\n## Outside of sections\n"] if top_level else []), *top_level])


def _section_reference(
    name: str, info: inspect.StructType, text: str, first_names: dict[type, str] | None = None
) -> Iterator[str]:
    """Yields a heading with the settings below it; then the sections inside, under headings of their own.

    Args:
        name: Dotted name of the section.
        info: Its struct.
        text: More description of it.
        first_names: Name under which each struct was described first; None describes each one wherever it occurs,
            without variables.
    """
    doc = " ".join([(info.cls.__doc__ or "").strip(), text]).strip()
    if first_names is not None and first_names.setdefault(info.cls, name) != name:
        yield f"\n## `{name}`\n\n{_fill(f'{doc} Takes what `{first_names[info.cls]}` takes.')}\n"
        return
    yield f"\n## `{name}`\n\n{_fill(doc)}\n"
    subsections: list[str] = []
    for field in info.fields:
        struct, suffix = nested_struct(field.type)
        if struct is None:
            yield _setting_reference(name, field)
            if first_names is not None and "[]" not in name:  # the entries of a list have no names to build one from
                variable = f"{ENVIRONMENT_PREFIX}{name}.{field.name}".upper().replace(".", "__")
                yield f"- Environment: `{variable}`\n"
        else:
            subsections += _section_reference(
                f"{name}.{field.name}{suffix}", struct, _description(field.type), first_names
            )
    yield from subsections


def _setting_reference(section: str, field: inspect.Field) -> str:
    """Renders name, meaning, type and default of one setting."""
    _, unit = unwrap(field.type)
    key = f"{section}.{field.name}" if section else field.name
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    default = "none, must be set" if field.required else f"`{format_value(value, unit)}`"
    takes = _value_description(field.type, unit)
    takes, default = _fill(f"- Takes: {takes}", "  "), _fill(f"- Default: {default}", "  ")
    return f"\n### `{key}`\n\n{_fill(_description(field.type))}\n\n{takes}\n{default}\n"


def _fill(text: str, indent: str = "") -> str:
    """Breaks the lines of a text at `_COLUMNS`; paragraphs stay apart."""
    return "\n\n".join(
        textwrap.fill(
            " ".join(paragraph.split()),
            _COLUMNS,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for paragraph in text.split("\n\n")
    )


def format_value(value: object, unit: str = "") -> str:
    """Formats a value as it would stand in the YAML file."""
    if isinstance(value, Secret):
        return value.reference
    if unit == "bytes" and isinstance(value, int):
        return format_bytes(value)
    # An enumeration's member is written as its value, also where it is a name.
    dumped = yaml.safe_dump(
        msgspec.to_builtins(value, str_keys=True), allow_unicode=True, width=10**6, default_flow_style=True
    )
    return dumped.removesuffix("\n").removesuffix("\n...")


def _description(kind: inspect.Type) -> str:
    return str((kind.extra_json_schema or {}).get("description", "")) if isinstance(kind, inspect.Metadata) else ""


def _value_description(kind: inspect.Type, unit: str) -> str:
    kind, inner_unit = unwrap(kind)
    unit = unit or inner_unit
    if isinstance(kind, inspect.UnionType):
        members = [
            _value_description(member, unit) for member in kind.types if not isinstance(member, inspect.NoneType)
        ]
        return " or ".join([*members, "null"])
    if isinstance(kind, inspect.BoolType):
        return "`true` or `false`"
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(f"`{choice}`" for choice in kind.values)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        name = unit or ("whole number" if isinstance(kind, inspect.IntType) else "number")
        return f"{name}, {bounds(kind, unit)}".rstrip(", ")
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return f"a list, `[…, …]`, of {_value_description(kind.item_type, unit)}"
    if isinstance(kind, inspect.DictType):
        return f"names, each with {_value_description(kind.value_type, unit)}"
    if isinstance(kind, inspect.StrType):
        return "text" if kind.max_length is None else f"text of {kind.min_length or 0} to {kind.max_length} characters"
    if isinstance(kind, inspect.AnyType):
        return "anything"
    return "a secret, by reference: `{env: NAME}` or `{file: path}`"

"""Writes settings for people: those in force as YAML, and the reference in docs/."""

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
from maitred.config.walker import below, unwrap
from maitred.core.secret import Secret

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
    """The settings in force as YAML that `load` reads back; secrets as the references that they were given by."""
    return settings_yaml(loaded.config, loaded.origins, with_origins=with_origins)


def settings_yaml(settings: msgspec.Struct, origins: Mapping[str, str], *, with_origins: bool = False) -> str:
    """A struct of sections as YAML. Deeper than that, only what was set is shown."""
    lines: list[tuple[str, str]] = []
    for name, value, unit in _settings(settings) or ():
        lines += _lines(name, value, unit, name, origins)
    if with_origins:
        return "".join(f"{text:<40}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)
    return "".join(f"{text}\n" for text, _ in lines)


def _settings(value: object) -> list[tuple[str, object, str]] | None:
    """Name, value and unit of everything that has a line of its own below `value`; None for a plain value."""
    if isinstance(value, msgspec.Struct):
        info = inspect.type_info(type(value))
        assert isinstance(info, inspect.StructType)
        return [(field.name, getattr(value, field.name), unwrap(field.type)[1]) for field in info.fields]
    if isinstance(value, dict) and value and all(isinstance(entry, msgspec.Struct) for entry in value.values()):
        return [(name, entry, "") for name, entry in value.items()]
    return None


def _lines(
    name: str, value: object, unit: str, key: str, origins: Mapping[str, str], depth: int = 0
) -> list[tuple[str, str]]:
    """The lines of a setting, each with the origin of what stands in it; a heading has none."""
    start = f"{'  ' * depth}{written(name)}:"
    inside = _settings(value)
    if inside is None and isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
        return _listed(start, value, key, origins, depth)
    if inside is None:
        hidden = depth > 1 and origins[key] == DEFAULT_ORIGIN
        return [] if hidden else [(f"{start} {written(value, unit)}", origins[key])]
    lines: list[tuple[str, str]] = []
    for child, entry, child_unit in inside:
        lines += _lines(child, entry, child_unit, f"{key}.{child}", origins, depth + 1)
    if lines:
        return [(start, ""), *lines]
    # Nothing was set in a section: that is no news, but an entry that somebody named is.
    return [(f"{start} {{}}", "")] if depth < 2 or key in origins else []


def _listed(
    start: str, entries: list[msgspec.Struct], key: str, origins: Mapping[str, str], depth: int
) -> list[tuple[str, str]]:
    """A list of structs, each begun by a dash; of each only what was set is shown."""
    lines = [(start, "")]
    for index, entry in enumerate(entries):
        inside: list[tuple[str, str]] = []
        for child, value, unit in _settings(entry) or ():
            inside += _lines(child, value, unit, f"{key}[{index}].{child}", origins, max(depth + 2, 2))
        margin = "  " * (depth + 1)
        text, origin = inside[0] if inside else (f"{margin}  {{}}", "")
        lines += [(f"{margin}- {text[len(margin) + 2 :]}", origin), *inside[1:]]
    return lines


def reference() -> str:
    """`docs/configuration.md`: every setting with its type, range, default and meaning."""
    return _PREAMBLE + settings_reference(Config)


def settings_reference(kind: type[msgspec.Struct]) -> str:
    """Every setting of a struct of sections with the variable that sets it.

    A struct that occurs in several places is described in the first one.
    """
    root = inspect.type_info(kind)
    assert isinstance(root, inspect.StructType)
    places: dict[type, str] = {}
    parts: list[str] = []
    for field in root.fields:
        info, suffix = below(field.type)
        if info is None:
            parts += _alone(field)
        else:
            parts += _section(field.name + suffix, info, _description(field.type), places)
    return "".join(parts)


def _alone(field: inspect.Field) -> Iterator[str]:
    """A setting that is in no section."""
    yield _setting("", field).replace("\n### ", "\n## ", 1)
    yield f"- Environment: `{ENVIRONMENT_PREFIX}{field.name.upper()}`\n"


def document_reference(kind: type[msgspec.Struct], *, without: Collection[str] = ()) -> str:
    """Every setting of a document (see `document.read_document`), section by section, in the words of its structs.

    Args:
        kind: The struct that the document is.
        without: Top-level sections to leave out.
    """
    root = inspect.type_info(kind)
    assert isinstance(root, inspect.StructType)
    parts: list[str] = []
    alone: list[str] = []
    for field in root.fields:
        info, suffix = below(field.type)
        if field.name in without:
            continue
        if info is None:
            alone.append(_setting("", field))
        else:
            parts += _section(field.name + suffix, info, _description(field.type))
    return "".join([*parts, *(["\n## Outside of sections\n"] if alone else []), *alone])


def _section(name: str, info: inspect.StructType, text: str, places: dict[type, str] | None = None) -> Iterator[str]:
    """A heading with the settings below it; then the sections inside, under headings of their own.

    Args:
        name: What leads to the section.
        info: Its struct.
        text: What more there is to say of it.
        places: Where each struct is described; None describes each one wherever it occurs, without variables.
    """
    doc = " ".join([(info.cls.__doc__ or "").strip(), text]).strip()
    if places is not None and places.setdefault(info.cls, name) != name:
        yield f"\n## `{name}`\n\n{doc} Takes what `{places[info.cls]}` takes.\n"
        return
    yield f"\n## `{name}`\n\n{doc}\n"
    inside: list[str] = []
    for field in info.fields:
        struct, suffix = below(field.type)
        if struct is None:
            yield _setting(name, field)
            if places is not None and "[]" not in name:  # the entries of a list have no names to build one from
                variable = f"{ENVIRONMENT_PREFIX}{name}.{field.name}".upper().replace(".", "__")
                yield f"- Environment: `{variable}`\n"
        else:
            inside += _section(f"{name}.{field.name}{suffix}", struct, _description(field.type), places)
    yield from inside


def _setting(section: str, field: inspect.Field) -> str:
    """Name, meaning, type and default of one setting."""
    _, unit = unwrap(field.type)
    key = f"{section}.{field.name}" if section else field.name
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    default = "none, must be set" if field.required else f"`{written(value, unit)}`"
    return f"\n### `{key}`\n\n{_description(field.type)}\n\n- Takes: {_takes(field.type, unit)}\n- Default: {default}\n"


def written(value: object, unit: str = "") -> str:
    """A value as it would stand in the YAML file."""
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


def _takes(kind: inspect.Type, unit: str) -> str:
    kind, inner_unit = unwrap(kind)
    unit = unit or inner_unit
    if isinstance(kind, inspect.UnionType):
        members = [_takes(member, unit) for member in kind.types if not isinstance(member, inspect.NoneType)]
        return " or ".join([*members, "null"])
    if isinstance(kind, inspect.BoolType):
        return "`true` or `false`"
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(f"`{choice}`" for choice in kind.values)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        name = unit or ("whole number" if isinstance(kind, inspect.IntType) else "number")
        return f"{name}, {bounds(kind, unit)}".rstrip(", ")
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return f"a list, `[…, …]`, of {_takes(kind.item_type, unit)}"
    if isinstance(kind, inspect.DictType):
        return f"names, each with {_takes(kind.value_type, unit)}"
    if isinstance(kind, inspect.StrType):
        return "text" if kind.max_length is None else f"text of {kind.min_length or 0} to {kind.max_length} characters"
    if isinstance(kind, inspect.AnyType):
        return "anything"
    return "a secret, by reference: `{env: NAME}` or `{file: path}`"

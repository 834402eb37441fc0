"""Writes settings for people: those in force as YAML, and the reference in docs/."""

from collections.abc import Collection, Iterator

import msgspec
import yaml
from msgspec import inspect

from maitred.config.loader import LoadedConfig
from maitred.config.scalars import bounds
from maitred.config.size import format_bytes
from maitred.config.sources import ENVIRONMENT_PREFIX
from maitred.config.tree import Config
from maitred.config.walker import unwrap
from maitred.core.secret import Secret

_PREAMBLE = """\
# Configuration

<!-- Written by `maitred config docs` (`make docs`) from the structs that hold the settings. Do not edit. -->

Every setting has a default, so maitred runs without any of this. Settings come from three layers, and the later one
wins, setting by setting:

1. a YAML file: `--config PATH`, or `maitred.yaml` in the working directory if it exists;
2. environment variables, `MAITRED__SECTION__SETTING` (two underscores each);
3. command-line flags, of which `--set section.setting=value` reaches every setting.

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


def yaml_of(loaded: LoadedConfig, *, with_origins: bool = False) -> str:
    """The settings in force as YAML that `load` reads back; secrets as the references that they were given by."""
    lines: list[str] = []
    for section, settings in _sections(loaded.config):
        lines.append(f"{section}:")
        for field, value in settings:
            line = f"  {field.name}: {written(value, unwrap(field.type)[1])}"
            origin = loaded.origins[f"{section}.{field.name}"]
            lines.append(f"{line:<40}  # {origin}" if with_origins else line)
    return "\n".join(lines) + "\n"


def reference() -> str:
    """`docs/configuration.md`: every setting with its type, range, default and meaning."""
    parts = [_PREAMBLE]
    for section, info in _section_types():
        parts.append(f"\n## `{section}`\n\n{(info.cls.__doc__ or '').strip()}\n")
        for field in info.fields:
            variable = f"{ENVIRONMENT_PREFIX}{section}__{field.name}".upper()
            parts.append(f"{_setting(section, field)}- Environment: `{variable}`\n")
    return "".join(parts)


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
        suffix, info = _below(field.type)
        if field.name in without:
            continue
        if info is None:
            alone.append(_setting("", field))
        else:
            parts += _section(field.name + suffix, info, _description(field.type))
    return "".join([*parts, *(["\n## Outside of sections\n"] if alone else []), *alone])


def _section(name: str, info: inspect.StructType, text: str) -> Iterator[str]:
    """A heading with the settings below it; then the sections inside, under headings of their own."""
    yield f"\n## `{name}`\n\n{' '.join([(info.cls.__doc__ or '').strip(), text]).strip()}\n"
    inside: list[str] = []
    for field in info.fields:
        suffix, below = _below(field.type)
        if below is None:
            yield _setting(name, field)
        else:
            inside += _section(f"{name}.{field.name}{suffix}", below, _description(field.type))
    yield from inside


def _below(kind: inspect.Type) -> tuple[str, inspect.StructType | None]:
    """The struct that a field holds, and what stands for its name or number; None for a plain setting."""
    kind, _ = unwrap(kind)
    suffix = ""
    if isinstance(kind, inspect.DictType):
        kind, suffix = unwrap(kind.value_type)[0], ".NAME"
    elif isinstance(kind, inspect.ListType):
        kind, suffix = unwrap(kind.item_type)[0], "[]"
    return suffix, kind if isinstance(kind, inspect.StructType) else None


def _setting(section: str, field: inspect.Field) -> str:
    """Name, meaning, type and default of one setting."""
    _, unit = unwrap(field.type)
    key = f"{section}.{field.name}" if section else field.name
    default = "none, must be set" if field.required else f"`{written(field.default, unit)}`"
    return f"\n### `{key}`\n\n{_description(field.type)}\n\n- Takes: {_takes(field.type, unit)}\n- Default: {default}\n"


def written(value: object, unit: str = "") -> str:
    """A value as it would stand in the YAML file."""
    if isinstance(value, Secret):
        return value.reference
    if unit == "bytes" and isinstance(value, int):
        return format_bytes(value)
    return yaml.safe_dump(value, allow_unicode=True, width=10**6).removesuffix("\n").removesuffix("\n...")


def _section_types() -> Iterator[tuple[str, inspect.StructType]]:
    root = inspect.type_info(Config)
    assert isinstance(root, inspect.StructType)
    for field in root.fields:
        kind, _ = unwrap(field.type)
        assert isinstance(kind, inspect.StructType)
        yield field.name, kind


def _sections(config: Config) -> Iterator[tuple[str, list[tuple[inspect.Field, object]]]]:
    for section, info in _section_types():
        settings: msgspec.Struct = getattr(config, section)
        yield section, [(field, getattr(settings, field.name)) for field in info.fields]


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
    if isinstance(kind, inspect.StrType):
        return "text" if kind.max_length is None else f"text of {kind.min_length or 0} to {kind.max_length} characters"
    return "a secret, by reference: `{env: NAME}` or `{file: path}`"

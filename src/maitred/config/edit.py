"""Editor of single settings in a YAML file; the rest of the file stays as it was written, comments included.

The position of every value comes from the parser, and the text is changed there and nowhere else. The result is parsed
again: if its content differs from the old content in more than the changes, the file cannot be edited here (an alias, a
tag, everything in braces), and a person must edit it.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml

from maitred.config.nodes import ConfigNode
from maitred.config.render import format_value
from maitred.config.sources import parse_yaml
from maitred.core.errors import InvalidRequest

SettingValues = Mapping[str, int | float]
"""Name ``section.setting`` -> its new value."""


def set_values(text: str, changes: SettingValues, name: str = "the file") -> str:
    """Returns the text with these settings, changed where they stand or added to their section.

    Raises:
        InvalidRequest: The text is not YAML, or not YAML that can be edited here; the message has the lines to add.
    """
    before, faults = parse_yaml(text, name)
    if faults:
        raise InvalidRequest(f"{faults[0]} Mend that first.")
    changed = text
    for key, value in reversed(list(changes.items())):  # each new setting goes to the top of its section
        section, _, setting = key.partition(".")
        changed = _set_value(changed, section, setting, format_value(value))
        after, faults = parse_yaml(changed, name)
        before = _expected_node(before, section, setting, format_value(value))
        if faults or _plain_value(after) != _plain_value(before):
            raise InvalidRequest(
                f"{name} is written in a way that cannot be changed here. Put this into it yourself:\n"
                f"{value_lines(changes)}"
            )
    return changed


def write_values(path: Path, changes: SettingValues) -> None:
    """Applies `set_values` to a file, which is made when missing. A reader sees either the old file or the new one.

    Raises:
        InvalidRequest: As for `set_values`; or the file cannot be read or written.
    """
    target = path.resolve()  # a symbolic link stays a symbolic link
    temporary = target.with_name(f".{target.name}.new")
    try:
        text = ""
        if target.exists():
            shutil.copy(target, temporary)  # the copy keeps the permissions of the file
            text = target.read_bytes().decode()
        temporary.write_bytes(set_values(text, changes, str(path)).encode())
        temporary.replace(target)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidRequest(f"Cannot change {path}: {reason}. Name another file.") from None
    finally:
        temporary.unlink(missing_ok=True)


def value_lines(changes: SettingValues) -> str:
    """Formats the settings as lines of YAML."""
    sections: dict[str, list[str]] = {}
    for key, value in changes.items():
        section, _, setting = key.partition(".")
        sections.setdefault(section, [f"{section}:"]).append(f"  {setting}: {format_value(value)}")
    return "\n".join(line for lines in sections.values() for line in lines)


def _set_value(text: str, section: str, setting: str, value: str) -> str:
    """Returns the text with one setting changed or added; in complex cases the result may be wrong.

    The caller checks the result.
    """
    root = yaml.compose(text, Loader=yaml.BaseLoader)
    section_node = _child_node(root, section)
    if section_node is None:
        ended = text if not text or text.endswith("\n") else text + "\n"
        return f"{ended}{section}:\n  {setting}: {value}\n"
    start, end = section_node.start_mark.index, section_node.end_mark.index
    if not isinstance(section_node, yaml.MappingNode):  # `engine:` with nothing below it
        return f"{text[:start].rstrip(' ')}\n  {setting}: {value}{text[end:]}"
    old = _child_node(section_node, setting)
    if old is not None:
        start, end = old.start_mark.index, old.end_mark.index
        gap = "" if text[start - 1].isspace() else " "
        return f"{text[:start]}{gap}{value}{text[end:]}"
    if section_node.flow_style:
        return f"{text[: start + 1]}{setting}: {value}{', ' if section_node.value else ''}{text[start + 1 :]}"
    return f"{text[:start]}{setting}: {value}\n{' ' * section_node.start_mark.column}{text[start:]}"


def _child_node(node: yaml.Node | None, name: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for key, value in node.value if key.value == name), None)


def _expected_node(before: ConfigNode, section: str, setting: str, value: str) -> ConfigNode:
    """Returns the nodes that a text must have after the change."""
    assert isinstance(before.value, dict)
    settings = before.value.get(section, ConfigNode(None, "")).value or {}
    if not isinstance(settings, dict):
        return ConfigNode(None, before.origin)  # it is not a section, so no result is right
    return ConfigNode(
        {**before.value, section: ConfigNode({**settings, setting: ConfigNode(value, "")}, "")}, before.origin
    )


def _plain_value(node: ConfigNode) -> object:
    """Returns the value of a node as plain data, without origins."""
    if isinstance(node.value, dict):
        return {name: _plain_value(child) for name, child in node.value.items()}
    if isinstance(node.value, list):
        return [_plain_value(child) for child in node.value]
    return node.value

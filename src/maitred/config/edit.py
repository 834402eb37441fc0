"""Changes single settings in a YAML file and leaves the rest of it, comments and all, as it was written.

The place of every value is taken from the parser, and the text is changed there and nowhere else. The result is read
again: if it does not say exactly what the old text said, but for the changes, the file is one that cannot be edited
here (an alias, a tag, everything in braces), and a person must.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml

from maitred.config.nodes import ConfigNode
from maitred.config.render import written
from maitred.config.sources import parse_yaml
from maitred.core.errors import InvalidRequest

Changes = Mapping[str, int | float]
"""``section.setting`` -> its new value."""


def set_values(text: str, changes: Changes, name: str = "the file") -> str:
    """The text with these settings, changed where they stand or added to their section.

    Raises:
        InvalidRequest: The text is not YAML, or not YAML that can be edited here; the message has the lines to add.
    """
    before, faults = parse_yaml(text, name)
    if faults:
        raise InvalidRequest(f"{faults[0]} Mend that first.")
    changed = text
    for key, value in reversed(list(changes.items())):  # each goes to the top of its section
        section, _, setting = key.partition(".")
        changed = _with(changed, section, setting, written(value))
        after, faults = parse_yaml(changed, name)
        before = _expected(before, section, setting, written(value))
        if faults or _plain(after) != _plain(before):
            raise InvalidRequest(
                f"{name} is written in a way that cannot be changed here. Put this into it yourself:\n"
                f"{value_lines(changes)}"
            )
    return changed


def write_values(path: Path, changes: Changes) -> None:
    """`set_values` of a file, which is made if it is not there. Whoever reads it sees the old one or the new one.

    Raises:
        InvalidRequest: See `set_values`; or the file cannot be read or written.
    """
    target = path.resolve()  # a link stays one
    new = target.with_name(f".{target.name}.new")
    try:
        text = ""
        if target.exists():
            shutil.copy(target, new)  # for its permissions
            text = target.read_bytes().decode()
        new.write_bytes(set_values(text, changes, str(path)).encode())
        new.replace(target)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidRequest(f"Cannot change {path}: {reason}. Name another file.") from None
    finally:
        new.unlink(missing_ok=True)


def value_lines(changes: Changes) -> str:
    """The settings as lines of YAML."""
    sections: dict[str, list[str]] = {}
    for key, value in changes.items():
        section, _, setting = key.partition(".")
        sections.setdefault(section, [f"{section}:"]).append(f"  {setting}: {written(value)}")
    return "\n".join(line for lines in sections.values() for line in lines)


def _with(text: str, section: str, setting: str, value: str) -> str:
    """The text with one setting changed or added, where that is simple; otherwise something that says another thing."""
    root = yaml.compose(text, Loader=yaml.BaseLoader)
    below = _child(root, section)
    if below is None:
        ended = text if not text or text.endswith("\n") else text + "\n"
        return f"{ended}{section}:\n  {setting}: {value}\n"
    start, end = below.start_mark.index, below.end_mark.index
    if not isinstance(below, yaml.MappingNode):  # `engine:` with nothing below it
        return f"{text[:start].rstrip(' ')}\n  {setting}: {value}{text[end:]}"
    old = _child(below, setting)
    if old is not None:
        start, end = old.start_mark.index, old.end_mark.index
        gap = "" if text[start - 1].isspace() else " "
        return f"{text[:start]}{gap}{value}{text[end:]}"
    if below.flow_style:
        return f"{text[: start + 1]}{setting}: {value}{', ' if below.value else ''}{text[start + 1 :]}"
    return f"{text[:start]}{setting}: {value}\n{' ' * below.start_mark.column}{text[start:]}"


def _child(node: yaml.Node | None, name: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for key, value in node.value if key.value == name), None)


def _expected(before: ConfigNode, section: str, setting: str, value: str) -> ConfigNode:
    """The nodes of a text after the change."""
    assert isinstance(before.value, dict)
    settings = before.value.get(section, ConfigNode(None, "")).value or {}
    if not isinstance(settings, dict):
        return ConfigNode(None, before.origin)  # no section, so nothing is right
    return ConfigNode(
        {**before.value, section: ConfigNode({**settings, setting: ConfigNode(value, "")}, "")}, before.origin
    )


def _plain(node: ConfigNode) -> object:
    """What a node says, without where."""
    if isinstance(node.value, dict):
        return {name: _plain(below) for name, below in node.value.items()}
    if isinstance(node.value, list):
        return [_plain(below) for below in node.value]
    return node.value

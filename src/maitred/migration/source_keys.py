"""Keys of a source document, each of which gets exactly one fate.

A converter walks through the document by `SourceKey` and says of each key what becomes of it. What it says of a key
with keys below holds for those below that have no fate yet. At the end, keys without a fate are reported as unknown, so
none can be dropped in silence.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from maitred.core.errors import ConfigInvalid
from maitred.migration.report import KeyFate, KeyReport

_PLAIN_NAME = re.compile(r"[^.\[\]\"\s]+")
_UNKNOWN = "Not a setting that is known here. Look whether it is still needed, and remove it."


def read_yaml(path: Path) -> object:
    """Reads a source document in YAML.

    Raises:
        ConfigInvalid: There is no such file, or it is no text or no YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigInvalid(f"{path}: No such file. Pass the path of an existing one.") from None
    except (OSError, UnicodeError) as error:
        raise ConfigInvalid(f"{path}: Cannot be read as UTF-8 text: {error}.") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # a date that does not exist is a ValueError
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigInvalid(f"{path}{line}: Not valid YAML: {getattr(error, 'problem', None) or error}.") from None


class SourceKeys:
    """The keys of a document, with the fate of each.

    Attributes:
        root: The whole document.
    """

    def __init__(self, document: object, prefix: str = "") -> None:
        self._entries: list[KeyReport] = []
        self._without_fate = dict.fromkeys(leaf_paths(document, prefix))
        self.root = SourceKey(self, prefix, document)

    def settle(self, path: str, value: object, fate: KeyFate, target: str, note: str, *, is_known: bool = True) -> None:
        """Gives a fate to those keys at or below a path that have none."""
        keys = tuple(key for key in leaf_paths(value, path) if key in self._without_fate)
        for key in keys:
            del self._without_fate[key]
        if keys:
            self._entries.append(KeyReport(path, keys, fate, target=target, note=note, is_known=is_known))

    def entries(self) -> list[KeyReport]:
        """Returns what became of all keys, in the order in which it was said; keys without a fate come last."""
        for key in list(self._without_fate):
            self._entries.append(KeyReport(key, (key,), KeyFate.UNSUPPORTED, note=_UNKNOWN, is_known=False))
        self._without_fate.clear()
        return self._entries


class SourceKey:
    """One key of a source document, with its value.

    Attributes:
        path: Dotted path, with the indexes of lists.
        value: What stands there; None where the key does not exist.
    """

    def __init__(self, keys: SourceKeys, path: str, value: object) -> None:
        self._keys = keys
        self.path = path
        self.value = value

    def child(self, name: str) -> "SourceKey":
        """Returns the key of this name below; its value is None if there is none."""
        entries = self.value if isinstance(self.value, dict) else {}
        return SourceKey(self._keys, join(self.path, name), entries.get(name))

    def children(self) -> Iterator[tuple[str, "SourceKey"]]:
        """Yields name and key of all that stand below; none if the value is no mapping."""
        if isinstance(self.value, dict):
            for name, value in self.value.items():
                yield str(name), SourceKey(self._keys, join(self.path, str(name)), value)

    def items(self) -> Iterator["SourceKey"]:
        """Yields the items of a list; none if the value is no list."""
        if isinstance(self.value, list):
            for index, value in enumerate(self.value):
                yield SourceKey(self._keys, f"{self.path}[{index}]", value)

    def map_to(self, target: str) -> None:
        """Says that the key became a setting of ours that means the same."""
        self._keys.settle(self.path, self.value, KeyFate.MAPPED, target, "")

    def approximate(self, target: str, why: str) -> None:
        """Says that the key became a setting of ours that means nearly the same."""
        self._keys.settle(self.path, self.value, KeyFate.APPROXIMATE, target, why)

    def ignore(self, why: str) -> None:
        """Says that nothing is lost without the key."""
        self._keys.settle(self.path, self.value, KeyFate.HARMLESS, "", why)

    def refuse(self, what_to_do: str) -> None:
        """Says that the key has no counterpart."""
        self._keys.settle(self.path, self.value, KeyFate.UNSUPPORTED, "", what_to_do)


def join(path: str, name: str) -> str:
    """Returns the path of a key below another; a name that is no plain word stands in quotes."""
    plain = name if _PLAIN_NAME.fullmatch(name) else f'"{name}"'
    return f"{path}.{plain}" if path and not path.endswith(":") else f"{path}{plain}"


def leaf_paths(value: object, path: str = "") -> Iterator[str]:
    """Yields the paths of all values without keys below; an empty mapping or list is one of them."""
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from leaf_paths(child, join(path, str(name)))
    elif isinstance(value, list) and value:
        for index, child in enumerate(value):
            yield from leaf_paths(child, f"{path}[{index}]")
    else:
        yield path


def read_number(value: object) -> float | None:
    """Returns a number, also one that is written as text; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) < 1e15 else None

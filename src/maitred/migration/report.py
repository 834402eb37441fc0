"""Report on a migration: what became of every key of the source.

A key is a dotted path to a value without keys of its own, such as ``model_list[0].litellm_params.model``. Each has
exactly one fate.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct


class KeyFate(StrEnum):
    """Fate of a key of the source."""

    MAPPED = "mapped"
    APPROXIMATE = "mapped approximately"
    HARMLESS = "harmless"
    UNSUPPORTED = "not supported"


class KeyReport(Struct, frozen=True):
    """Fate of the keys of one path, with the reason.

    Attributes:
        path: The path that they have in common.
        keys: All keys, by their whole paths.
        fate: What became of them.
        target: The setting of ours that they became; empty: none.
        note: Why it is approximate or harmless, or what to do.
        is_known: Whether the converter knows the key; if not, its fate is `UNSUPPORTED`.
    """

    path: str
    keys: tuple[str, ...]
    fate: KeyFate
    target: str = ""
    note: str = ""
    is_known: bool = True


class VariableToSet(Struct, frozen=True):
    """An environment variable that the new configuration reads.

    Attributes:
        name: Its name.
        use: What it is for, or where its value stands in the source; never the value.
    """

    name: str
    use: str


class MigrationReport(Struct, frozen=True):
    """Report on all keys of a source.

    Attributes:
        source: Name of the source file.
        entries: What became of each key; every key stands in exactly one of them.
        variables: Environment variables that must be set.
        missing: What must be completed by hand before the result can serve, one sentence each.
    """

    source: str
    entries: Sequence[KeyReport]
    variables: Sequence[VariableToSet] = ()
    missing: Sequence[str] = ()

    @property
    def counts(self) -> Mapping[KeyFate, int]:
        """Number of keys by fate."""
        return {fate: sum(len(entry.keys) for entry in self.entries if entry.fate == fate) for fate in KeyFate}

    def summary(self) -> str:
        """Returns one line with the number of keys by fate, and what is missing."""
        counts = ", ".join(f"{count} {fate}" for fate, count in self.counts.items())
        lines = [f"{self.source}: {sum(self.counts.values())} keys: {counts}."]
        return "\n".join([*lines, *(f"  missing: {sentence}" for sentence in self.missing)])

    def text(self) -> str:
        """Returns the whole report: the keys by fate, the variables, and what is missing."""
        lines = [self.summary().partition("\n")[0]]
        for fate in KeyFate:
            entries = [entry for entry in self.entries if entry.fate == fate]
            if entries:
                lines += ["", f"{fate.capitalize()}:"]
            for note in dict.fromkeys(entry.note for entry in entries):
                indent = "  "
                if note:
                    lines.append(f"  {note}")
                    indent = "    "
                lines += [f"{indent}{_line(entry)}" for entry in entries if entry.note == note]
        if self.variables:
            lines += ["", "Environment variables to set:"]
            lines += [f"  {variable.name}: {variable.use}" for variable in self.variables]
        if self.missing:
            lines += ["", "Missing:", *(f"  {sentence}" for sentence in self.missing)]
        return "\n".join(lines) + "\n"


def _line(entry: KeyReport) -> str:
    below = f" ({len(entry.keys)} keys)" if len(entry.keys) > 1 else ""
    return f"{entry.path}{below}{' -> ' if entry.target else ''}{entry.target}"

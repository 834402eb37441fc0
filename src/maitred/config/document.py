"""Reader of YAML documents such as a load run: the same layers, faults and secrets as the configuration.

There is no default file and no environment layer, since a document describes one task and not how this machine is set
up; ``{env: NAME}`` references are looked up in the environment nevertheless. A command may add defaults of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from maitred.config.checks import ConfigConflict
from maitred.config.loader import build_struct
from maitred.config.nodes import ConfigFault, ConfigNode, merge
from maitred.config.sources import read_yaml

S = TypeVar("S", bound=Struct)


def no_rules(document: Struct) -> Iterable[ConfigConflict]:
    """Returns no conflicts, for documents whose settings are independent of each other."""
    return ()


def read_document(
    kind: type[S],
    path: Path | None,
    env: Mapping[str, str],
    *,
    subject: str,
    flags: ConfigNode | None = None,
    defaults: ConfigNode | None = None,
    rules: Callable[[S], Iterable[ConfigConflict]] = no_rules,
    faults: Sequence[ConfigFault] = (),
) -> S:
    """Reads a document from its file and the flags above it.

    Args:
        kind: Struct of the document.
        path: File of the document, which must exist; None: there are only flags.
        env: Environment in which ``{env: NAME}`` references are looked up.
        subject: Name of the document in the list of faults, such as "The load run".
        flags: Layer above the file.
        defaults: Layer below the file.
        rules: Yields the conflicts between settings; see `checks.ConfigConflict`.
        faults: Faults that were found while the flags were read.

    Raises:
        ConfigInvalid: The message lists every fault with its origin.
    """
    root, found = read_yaml(path) if path is not None else (ConfigNode({}, subject), [])
    if found and not root.value:
        rules = no_rules  # the flags may only conflict because the settings of an unreadable file are missing
    if defaults is not None and isinstance(root.value, dict):
        root = merge(defaults, root)
    if flags is not None:
        root = merge(root, flags)
    document, _ = build_struct(kind, root, env, rules, [*found, *faults], subject)
    return document

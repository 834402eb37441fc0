"""A YAML file with a subject of its own, such as a load run: the same layers, faults and secrets as the configuration.

There is no default file and no environment layer, since a document describes one task and not how this machine is set
up; ``{env: NAME}`` references are looked up in the environment nevertheless.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from maitred.config.checks import ConfigConflict
from maitred.config.loader import build
from maitred.config.nodes import ConfigFault, ConfigNode, merge
from maitred.config.sources import read_yaml

S = TypeVar("S", bound=Struct)


def no_rules(document: Struct) -> Iterable[ConfigConflict]:
    """For documents whose settings are free of each other."""
    return ()


def read_document(
    kind: type[S],
    path: Path | None,
    env: Mapping[str, str],
    *,
    subject: str,
    flags: ConfigNode | None = None,
    rules: Callable[[S], Iterable[ConfigConflict]] = no_rules,
    faults: Sequence[ConfigFault] = (),
) -> S:
    """The document from its file and the flags above it.

    Args:
        kind: The struct that it is.
        path: The file, which must exist; None: there are only flags.
        env: Where ``{env: NAME}`` references are looked up.
        subject: What has the faults, as the listing calls it, such as "The load run".
        flags: The layer above the file.
        rules: What must hold between settings; see `checks.Conflict`.
        faults: Found while the flags were read.

    Raises:
        ConfigInvalid: The message lists every fault with its origin.
    """
    root, found = read_yaml(path) if path is not None else (ConfigNode({}, subject), [])
    if found and not root.value:
        rules = no_rules  # what a file that cannot be read might have said is no fault of the flags'
    if flags is not None:
        root = merge(root, flags)
    document, _ = build(kind, root, env, rules, [*found, *faults], subject)
    return document

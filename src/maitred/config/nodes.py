"""Nodes of a layer of settings: each has a value and its origin; faults name both.

Every layer (file, environment, flags) becomes the same tree of nodes, and merging keeps each leaf's origin. That is how
a fault, or `maitred config show --origin`, can name the line, the variable or the flag.
"""

from msgspec import Struct

DEFAULT_ORIGIN = "default"
SECRET_SOURCES = frozenset({"env", "file"})
"""Keys of a reference to a secret."""


class ConfigNode(Struct, frozen=True):
    """Node of a layer: one value with its origin.

    Attributes:
        value: A mapping or list of nodes, or a scalar.
        origin: ``maitred.yaml:3``, ``MAITRED__SERVER__PORT`` or ``--port``.
        is_text: Whether the value is a string whose type is still open, so that the setting decides: an environment
            variable, or an unquoted scalar in YAML. `8000` is then a number for a port and a name for a model.
    """

    value: dict[str, "ConfigNode"] | list["ConfigNode"] | str | int | float | bool | None
    origin: str
    is_text: bool = False


class ConfigFault(Struct, frozen=True, order=True):
    """Fault of a configuration, in words for the operator.

    Attributes:
        origin: Place where it was written.
        key: Dotted name of the setting; empty if the fault does not belong to one setting.
        message: Description of the fault and of the correct form.
    """

    origin: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, self.key, self.message) if part)


def merge(below: ConfigNode, above: ConfigNode) -> ConfigNode:
    """Merges two layers: mappings are joined key by key; any other value in `above` replaces the one in `below`.

    The reference to a secret is one value although it is written as a mapping: ``{env: NAME}`` above replaces
    ``{file: path}`` below.
    """
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    if below.value.keys() | above.value.keys() <= SECRET_SOURCES:
        return above
    joined = dict(below.value)
    for key, node in above.value.items():
        joined[key] = merge(joined[key], node) if key in joined else node
    return ConfigNode(joined, above.origin)

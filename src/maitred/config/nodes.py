"""A setting as it was written: a value, where it was written, and what is wrong with it.

Every layer (file, environment, flags) becomes the same tree of nodes, and merging keeps each leaf's origin. That is how
a fault, or `maitred config show --origin`, can name the line, the variable or the flag.
"""

from msgspec import Struct

DEFAULT_ORIGIN = "default"
SECRET_SOURCES = frozenset({"env", "file"})
"""The keys of a reference to a secret."""


class ConfigNode(Struct, frozen=True):
    """One value in a layer.

    Attributes:
        value: A mapping or list of nodes, or a scalar.
        origin: ``maitred.yaml:3``, ``MAITRED__SERVER__PORT`` or ``--port``.
        is_text: The value is a string whose type is still open, so the setting decides: an environment variable, or an
            unquoted scalar in YAML. `8000` is then a number for a port and a name for a model.
    """

    value: dict[str, "ConfigNode"] | list["ConfigNode"] | str | int | float | bool | None
    origin: str
    is_text: bool = False


class ConfigFault(Struct, frozen=True, order=True):
    """One thing that is wrong, in words for whoever wrote it.

    Attributes:
        origin: Where it was written.
        key: The dotted name of the setting; empty if the fault is not one setting's.
        message: What is wrong and what would be right.
    """

    origin: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, self.key, self.message) if part)


def merge(below: ConfigNode, above: ConfigNode) -> ConfigNode:
    """Both layers as one: mappings are joined key by key, anything else in `above` replaces what is `below`.

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

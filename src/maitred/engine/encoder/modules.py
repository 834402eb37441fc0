"""What sentence-transformers' files say of a model: what follows the transformer, and how long its texts were.

``modules.json`` lists what follows the transformer, ``1_Pooling/config.json`` says how its rows become one vector, and
``sentence_bert_config.json`` how long the texts of its training were. Imports nothing heavy: the gateway asks here
whether a folder holds a model whose answers are vectors.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import PoolingMode

_LEGACY: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""One field for each, true or false; newer files have one field, `pooling_mode`. Several are laid side by side in this
order."""


class Pooling(Struct, frozen=True, kw_only=True):
    """How the rows of a text become its vector.

    Attributes:
        modes: Each gives as many numbers as a row has; several stand one behind the other.
        normalised: Whether the vector is scaled to length 1.
    """

    modes: tuple[PoolingMode, ...]
    normalised: bool = True


def has_modules(folder: Path) -> bool:
    """Whether sentence-transformers saved the model: then it is one whose answers are vectors, whatever its family."""
    return (folder / "modules.json").is_file()


def longest_text(folder: Path) -> int | None:
    """In tokens, with those that the tokenizer adds; None: the files do not say."""
    path = folder / "sentence_bert_config.json"
    longest = read_object(path).get("max_seq_length") if path.is_file() else None
    return None if longest is None else int(longest)


def read_pooling(folder: Path, otherwise: PoolingMode, wanted: PoolingMode | None = None) -> Pooling:
    """What the files say, or what stands for it.

    Args:
        folder: The model.
        otherwise: What its family commonly does, for a folder whose files say nothing.
        wanted: What the operator says; goes before the files.

    Raises:
        ConfigInvalid: Something follows the transformer that maitred does not compute.
    """
    if not has_modules(folder):
        return Pooling(modes=(wanted or otherwise,))
    path = folder / "modules.json"
    modes: tuple[PoolingMode, ...] = (otherwise,)
    normalised = False
    for module in read_json(path):
        match str(module["type"]).rpartition(".")[2]:
            case "Transformer":
                pass
            case "Pooling":
                modes = _modes_in(folder / module["path"] / "config.json")
            case "Normalize":
                normalised = True
            case other:
                raise ConfigInvalid(f"{path} has a module {other}, which is not supported. Use another model.")
    return Pooling(modes=modes if wanted is None else (wanted,), normalised=normalised)


def _modes_in(path: Path) -> tuple[PoolingMode, ...]:
    settings = read_object(path)
    named = settings.get("pooling_mode")
    if named is None:
        said = [_LEGACY.get(name, name) for name in _ordered(settings) if settings[name]]
    else:
        said = [named] if isinstance(named, str) else list(named)
    known: tuple[PoolingMode, ...] = get_args(PoolingMode)
    modes = tuple(mode for name in said for mode in known if mode == name)
    if not modes or len(modes) < len(said):
        raise ConfigInvalid(f"{path} pools by {', '.join(said) or 'nothing'}; supported are {', '.join(known)}.")
    return modes


def _ordered(settings: Mapping[str, Any]) -> list[str]:
    """The older fields: those that are known in their order, then any others."""
    others = [name for name in settings if name.startswith("pooling_mode_") and name not in _LEGACY]
    return [name for name in _LEGACY if name in settings] + others


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        ConfigInvalid: It is not there, or holds something else.
    """
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise ConfigInvalid(f"{path} must hold a JSON object.")
    return fields


def read_json(path: Path) -> Any:  # noqa: ANN401 - whatever JSON is
    """A file that holds JSON; raises as `read_object`."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigInvalid(f"{path} does not exist. Is the model's folder complete?") from None
    except (OSError, ValueError) as fault:
        raise ConfigInvalid(f"{path} cannot be read: {fault}.") from fault

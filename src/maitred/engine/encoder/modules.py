"""Files of sentence-transformers: the modules that follow a model's transformer, and its maximum text length.

``modules.json`` lists the modules that follow the transformer, ``1_Pooling/config.json`` says how its rows become one
vector, and ``sentence_bert_config.json`` or ``tokenizer_config.json`` how long the texts of its training were. This
module imports nothing heavy: the gateway uses it to find out whether a folder contains an embedding model.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import PoolingMode
from maitred.text.tokenizer_config import TokenizerConfig

_LEGACY: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Boolean field of older files -> mode; newer files have one field, `pooling_mode`.

The vectors of several modes are concatenated in this order.
"""


class Pooling(Struct, frozen=True, kw_only=True):
    """Method by which the rows of a text become its vector.

    Attributes:
        modes: Modes of pooling. Each gives as many numbers as a row has; several are concatenated.
        normalised: Whether the vector is scaled to length 1.
    """

    modes: tuple[PoolingMode, ...]
    normalised: bool = True


def has_modules(folder: Path) -> bool:
    """Returns whether sentence-transformers saved the model, which is then an embedding model, whatever its family."""
    return (folder / "modules.json").is_file()


def longest_text(folder: Path) -> int | None:
    """Reads the maximum tokens of a text, including those that the tokenizer adds; None: the files do not say.

    Up to version 5, sentence-transformers wrote it into a file of its own; since then it is a setting of the tokenizer.
    """
    path = folder / "sentence_bert_config.json"
    longest = read_object(path).get("max_seq_length") if path.is_file() else None
    return TokenizerConfig.load(folder).longest_text if longest is None else int(longest)


def read_pooling(folder: Path, otherwise: PoolingMode, wanted: PoolingMode | None = None) -> Pooling:
    """Reads the pooling of a model from its files, with a default and an override.

    Args:
        folder: Folder of the model.
        otherwise: Common pooling of its family, for a folder without such files.
        wanted: Configured pooling, which has precedence over the files.

    Raises:
        ConfigInvalid: A module follows the transformer that maitred does not support.
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
        names = [_LEGACY.get(name, name) for name in _legacy_fields(settings) if settings[name]]
    else:
        names = [named] if isinstance(named, str) else list(named)
    known: tuple[PoolingMode, ...] = get_args(PoolingMode)
    modes = tuple(mode for name in names for mode in known if mode == name)
    if not modes or len(modes) < len(names):
        raise ConfigInvalid(f"{path} pools by {', '.join(names) or 'nothing'}; supported are {', '.join(known)}.")
    return modes


def _legacy_fields(settings: Mapping[str, Any]) -> list[str]:
    """Returns the older fields: known ones in their order, then any others."""
    others = [name for name in settings if name.startswith("pooling_mode_") and name not in _LEGACY]
    return [name for name in _LEGACY if name in settings] + others


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file that contains a JSON object.

    Raises:
        ConfigInvalid: The file is missing, or contains something else.
    """
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise ConfigInvalid(f"{path} must hold a JSON object.")
    return fields


def read_json(path: Path) -> Any:  # noqa: ANN401 - whatever JSON is
    """Reads a file that contains JSON; raises as `read_object`."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigInvalid(f"{path} does not exist. Is the model's folder complete?") from None
    except (OSError, ValueError) as fault:
        raise ConfigInvalid(f"{path} cannot be read: {fault}.") from fault

"""Files of sentence-transformers: the modules that follow a model's transformer, and its maximum text length.

``modules.json`` lists the modules that follow the transformer, ``1_Pooling/config.json`` says how its rows become one
vector, ``sentence_bert_config.json`` or ``tokenizer_config.json`` how long the texts of its training were, and
``config_sentence_transformers.json`` how long its vectors are. This module imports nothing heavy: the gateway uses it
to find out whether a folder contains an embedding model.
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


_PLAIN_MODALITIES: Mapping[str, Any] = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
"""How sentence-transformers says that a text goes through the model, and that its last rows come out."""


class Pooling(Struct, frozen=True, kw_only=True):
    """Method by which the rows of a text become its vector.

    Attributes:
        modes: Modes of pooling. Each gives as many numbers as a row has; several are concatenated.
        normalised: Whether the vector is scaled to length 1.
        longest_vector: Most numbers of a vector, the first ones of all; None: all of them.
    """

    modes: tuple[PoolingMode, ...]
    normalised: bool = True
    longest_vector: int | None = None

    def dimensions(self, hidden_size: int) -> int:
        """Returns the length of a vector that is pooled from rows of this width."""
        whole = hidden_size * len(self.modes)
        return whole if self.longest_vector is None else min(whole, self.longest_vector)

    def __str__(self) -> str:
        """Writes all of it: ``mean + max, normalised, 256``."""
        parts = [" + ".join(self.modes)]
        parts += ["normalised"] * self.normalised
        parts += [] if self.longest_vector is None else [str(self.longest_vector)]
        return ", ".join(parts)


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
    modes: tuple[PoolingMode, ...] = ()
    normalised = False
    for module in read_json(path):
        match str(module["type"]).rpartition(".")[2]:
            case "Transformer":
                _check_transformer(folder)
            case "Pooling" if not normalised:
                modes = _modes_in(folder, folder / module["path"] / "config.json")
            case "Normalize" if modes:
                normalised = True
            case "Dropout":
                pass  # it drops nothing but in training
            case "Pooling" | "Normalize":
                raise ConfigInvalid(f"{path} normalises before it pools, which is not supported. Use another model.")
            case other:
                raise ConfigInvalid(f"{path} has a module {other}, which is not supported. Use another model.")
    if not modes and wanted is None:
        raise ConfigInvalid(
            f"{path} has no module Pooling, so a text has no vector. Set the pooling, or use another model."
        )
    return Pooling(
        modes=modes if wanted is None else (wanted,), normalised=normalised, longest_vector=_longest_vector(folder)
    )


def _check_transformer(folder: Path) -> None:
    """Checks that the transformer is used as its rows are: text in, the last rows out.

    Raises:
        ConfigInvalid: The files ask for something else.
    """
    path = folder / "sentence_bert_config.json"
    settings = read_object(path) if path.is_file() else {}
    modalities = settings.get("modality_config") or _PLAIN_MODALITIES
    others = {
        "transformer_task": settings.get("transformer_task", "feature-extraction") != "feature-extraction",
        "modality_config": modalities.get("text") != _PLAIN_MODALITIES["text"],
        "module_output_name": settings.get("module_output_name", "token_embeddings") != "token_embeddings",
        "query_expansion": settings.get("query_expansion") is not None,
        "processing_kwargs": any((settings.get("processing_kwargs") or {}).values()),
    }
    for name, is_other in others.items():
        if is_other:
            raise ConfigInvalid(f"{path} sets {name} to {settings[name]}, which is not supported. Use another model.")


def _longest_vector(folder: Path) -> int | None:
    """Reads the length that vectors are cut to; None: they are not."""
    path = folder / "config_sentence_transformers.json"
    length = read_object(path).get("truncate_dim") if path.is_file() else None
    return None if length is None else int(length)


def _modes_in(folder: Path, path: Path) -> tuple[PoolingMode, ...]:
    settings = read_object(path)
    if settings.get("include_prompt") is False and TokenizerConfig.load(folder).text_prompt:
        raise ConfigInvalid(f"{path} leaves the prompt of a text out of its vector, which is not supported.")
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

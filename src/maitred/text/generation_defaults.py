"""Sampling defaults that a model's authors recommend: ``generation_config.json`` beside its weights."""

from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta

from maitred.core.errors import ConfigInvalid

DEFAULTED = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
"""Fields that a file can set; requests, files and `SamplingParams` use the same names."""


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Sampling defaults for requests that do not set these fields.

    None selects the default of OpenAI's API.

    The class ignores the lengths and the special tokens of a file: the caller, who pays, decides on lengths, and the
    engine decides on special tokens.
    """

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None

    @classmethod
    def of(cls, folder: Path, source: Literal["auto", "none"] = "auto") -> Self:
        """Reads the file of a model; sets no defaults if there is no file or if the source is ``none``.

        Raises:
            ConfigInvalid: The file cannot be read.
        """
        path = folder / "generation_config.json"
        if source == "none":
            return cls()
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigInvalid(
                f"{path} cannot be read: {error}. Mend it, or set generation_config to none so that it does not count."
            ) from error

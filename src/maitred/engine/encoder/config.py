"""The `encoder` section: which model computes embeddings, and how large its batches are.

Imports nothing heavy: the gateway reads this section too, and it runs without torch.
"""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.engine.config import Device, EngineConfig, PoolingMode, SimilarQuestionsLimit


class EncoderConfig(Struct, frozen=True, kw_only=True):
    """Settings of the model that computes embeddings (`POST /v1/embeddings`), beside the one that generates text."""

    path: Annotated[
        str,
        Meta(
            description="Folder with `config.json`, `tokenizer.json` and `*.safetensors` of a model of the BERT "
            "family, or of any that could generate; and `modules.json` where sentence-transformers saved it. Empty: no "
            "embeddings are served."
        ),
    ] = ""
    served_name: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        Meta(description="The name that clients put into `model`; null takes the name of the folder."),
    ] = None
    engine_address: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="An engine that runs the model already (`maitred engine FOLDER --listen ADDRESS`), as "
            "`unix:/path` or `tcp:host:port`. Null: start one."
        ),
    ] = None
    pooling: Annotated[
        Literal[PoolingMode, "auto"],
        Meta(
            description="How the rows of a text become its vector. `auto` does as the model's files say "
            "(`1_Pooling/config.json`), or takes the mean of an encoder and the last token of a decoder."
        ),
    ] = "auto"
    device: Device = "auto"
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"],
        Meta(description="Type of weights and activations. `auto` takes what is fast on the device."),
    ] = "auto"
    threads: Annotated[
        int,
        Meta(ge=0, le=4096, description="CPU threads of a batch; 0 takes one per core, less one for the gateway."),
    ] = 0
    max_sequences: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Inputs that are with the encoder at once; further ones wait in the gateway's fair queue.",
            extra={"unit": "inputs"},
        ),
    ] = 256
    step_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1_048_576,
            description="Tokens of one batch at most, but for a single input that is longer. More uses the device "
            "better; less lets a short request wait less for a long one's batch.",
            extra={"unit": "tokens"},
        ),
    ] = 512
    similar_questions: SimilarQuestionsLimit = 10_000

    @property
    def folder(self) -> Path:
        """Folder of the model."""
        return Path(self.path)

    def engine(self) -> EngineConfig:
        """Returns the settings of the engine's process."""
        return EngineConfig(
            device=self.device,
            pooling=self.pooling,
            dtype=self.dtype,
            threads=self.threads,
            max_sequences=self.max_sequences,
            step_tokens=self.step_tokens,
            similar_questions=self.similar_questions,
        )

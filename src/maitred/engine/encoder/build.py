"""Assembly of an encoder's process, without its socket."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from maitred.core.clock import SystemClock
from maitred.core.replica import ModelCard
from maitred.core.request import ModelFingerprint
from maitred.engine.config import EngineConfig
from maitred.engine.encoder.decoder import PooledDecoder
from maitred.engine.encoder.engine import BLOCK_TOKENS, EncoderEngine, capacity_blocks
from maitred.engine.encoder.model import Encoder
from maitred.engine.encoder.modules import Pooling
from maitred.engine.encoder.shape import is_bert
from maitred.engine.similar.cached_questions import CachedQuestions
from maitred.engine.similar.features import FEATURE_VERSION
from maitred.engine.similar.question import Floats
from maitred.engine.similar.question_reader import QuestionReader
from maitred.text.tokenizer_config import read_special_tokens


class TextEncoder(Protocol):
    """Loaded model that turns texts into vectors; see `Encoder` and `PooledDecoder`."""

    @property
    def context_tokens(self) -> int:
        """Maximum tokens of a text."""
        ...

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids are below it."""
        ...

    @property
    def dimensions(self) -> int:
        """Number of dimensions of a vector."""
        ...

    @property
    def pooling(self) -> Pooling:
        """How the rows of a text become its vector."""
        ...

    def encode(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Computes the vectors: fp32 ``[texts, dimensions]`` on the CPU."""
        ...

    def encode_with_tokens(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
        """Computes the vectors, and for each text its last rows: fp32 ``[tokens, hidden_size]`` of length 1."""
        ...


def build_encoder(
    model: Path,
    config: EngineConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    digest: Callable[[], ModelFingerprint],
) -> tuple[EncoderEngine, ModelCard]:
    """Loads the model, warms it up and makes its engine and model card.

    Args:
        model: Folder of the model.
        config: The `engine` section; settings of the KV cache and of generation have no effect.
        dtype: Type of weights and activations.
        device: Device of the model.
        digest: Returns the fingerprint of the model's files; called when the model is loaded.

    Raises:
        ConfigInvalid: The model cannot be read.
    """
    kind = Encoder if is_bert(model) else PooledDecoder
    wanted = None if config.pooling == "auto" else config.pooling
    encoder: TextEncoder = kind.load(model, dtype=dtype, device=device, pooling=wanted)
    encoder.encode([[0] * min(8, encoder.context_tokens)] * 2)
    context = min(config.context_tokens or encoder.context_tokens, encoder.context_tokens)

    def encode(texts: Sequence[Sequence[int]]) -> list[bytes]:
        return [vector.tobytes() for vector in encoder.encode(texts).numpy().astype("<f4")]

    def encode_with_tokens(texts: Sequence[Sequence[int]]) -> tuple[Floats, Sequence[Floats]]:
        vectors, rows = encoder.encode_with_tokens(texts)
        return vectors.numpy(), [row.numpy() for row in rows]

    card = ModelCard(
        name=model.name,
        context_tokens=context,
        vocab_size=encoder.vocab_size,
        eos_token_ids=(),
        max_sequences=config.max_sequences,
        kv_capacity_tokens=capacity_blocks(config.step_tokens, context) * BLOCK_TOKENS,
        max_choices=1,
        dtype="bf16" if dtype == torch.bfloat16 else "fp32",
        device=str(device),
        embedding_dimensions=encoder.dimensions,
        pooling=str(encoder.pooling),
        digest=digest(),
        feature_version=FEATURE_VERSION,
    )
    questions = None
    if config.similar_questions:
        reader = QuestionReader(
            encode_with_tokens, model, context_tokens=context, special_tokens=read_special_tokens(model)
        )
        questions = CachedQuestions(reader, encoder=card.encoder_version, max_entries=config.similar_questions)
    engine = EncoderEngine(
        encode,
        SystemClock(),
        line=config.line,
        vocab_size=encoder.vocab_size,
        context_tokens=context,
        max_sequences=config.max_sequences,
        step_tokens=config.step_tokens,
        questions=questions,
    )
    return engine, card

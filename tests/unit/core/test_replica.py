"""What a model card says of the vectors of an encoder."""

import pytest
from msgspec.structs import replace

from maitred.core.replica import ModelCard
from maitred.core.request import ModelFingerprint

CARD = ModelCard(
    name="encoder",
    context_tokens=64,
    vocab_size=100,
    eos_token_ids=(),
    max_sequences=8,
    kv_capacity_tokens=64,
    max_choices=1,
    dtype="fp32",
    device="cpu",
    embedding_dimensions=48,
    pooling="mean",
    digest=ModelFingerprint("shape", "tokenizer", "weights", "content"),
)


@pytest.mark.parametrize(
    "changed",
    [
        replace(CARD, dtype="bf16"),
        replace(CARD, pooling="max"),
        replace(CARD, feature_version=1),
        replace(CARD, digest=replace(CARD.digest, shape="other")),
        replace(CARD, digest=replace(CARD.digest, tokenizer="other")),
        replace(CARD, digest=replace(CARD.digest, content="other")),
        replace(CARD, digest=ModelFingerprint("shape", "tokenizer", "other")),
    ],
)
def test_other_vectors_have_another_version(changed):
    assert changed.encoder_version != CARD.encoder_version


def test_what_changes_no_vector_changes_no_version():
    assert replace(CARD, name="renamed", device="cuda:0", max_sequences=2).encoder_version == CARD.encoder_version

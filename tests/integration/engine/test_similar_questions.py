"""Similar questions in the process of an encoder: search, training of a verifier, restart."""

import pytest

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.errors import CallerError
from maitred.core.request import EngineRequest, FinishReason, SamplingParams, SimilarSearch, VerifierTraining
from maitred.engine.encoder.config import EncoderConfig
from maitred.engine.similar.features import FEATURE_VERSION
from maitred.engine.similar.verifier import MIN_LABELS
from maitred.fleet.local import LocalEngine, engine_command
from maitred.text.tokenizer import Tokenizer
from maitred.wire.frames import KeptQuestion, UpdateSimilar
from tests.support.similar.labels import labelled_pairs

NOTHING = SamplingParams(max_tokens=0, seed=0)
CARD, CARD_TOO = "how do i block my card", "please tell me how i block the card"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(BUNDLED_MODEL)


def started(**settings):
    config = EncoderConfig(**{"pooling": "auto", "threads": 1, **settings})
    return LocalEngine(engine_command(BUNDLED_MODEL, config.engine()))


async def answer(engine, request):
    async with engine.client.generate(request) as stream:
        deltas = [delta for batch in [batch async for batch in stream] for delta in batch]
    (delta,) = deltas
    assert delta.finish is FinishReason.STOP
    return delta


async def search(engine, tokenizer, text):
    similar = SimilarSearch(text, b"p", "scope", 3, 0.55)
    tokens = tokenizer.encode(text, add_special_tokens=True)
    delta = await answer(engine, EngineRequest("search", tokens, NOTHING, similar=similar))
    assert delta.embedding is None
    return delta.similar


async def test_what_is_kept_is_found_and_judged_until_the_process_ends(tokenizer):
    async with started() as engine:
        await engine.wait_started()
        assert (await search(engine, tokenizer, CARD)).found == []
        engine.client.update_similar(UpdateSimilar(kept=[KeptQuestion(b"p", CARD, b"key")]))
        (found,) = (await search(engine, tokenizer, CARD)).found
        assert (found.key, found.question, found.score) == (b"key", CARD, None)
        assert found.cosine == pytest.approx(1.0, abs=1e-3)
        training = VerifierTraining(labelled_pairs(MIN_LABELS))
        weights = (await answer(engine, EngineRequest("training", [], NOTHING, similar=training))).verifier
        engine.client.update_similar(UpdateSimilar(verifiers={"scope": weights}))
        judged = await search(engine, tokenizer, CARD_TOO)
        assert judged.verifier.startswith(f"{engine.client.card().encoder_version}:")
        assert engine.client.card().feature_version == FEATURE_VERSION
        assert [(each.question, isinstance(each.score, float)) for each in judged.found] == [(CARD, True)]
    async with started() as engine:
        await engine.wait_started()
        assert (await search(engine, tokenizer, CARD)).found == []
        engine.client.update_similar(UpdateSimilar(verifiers={"scope": weights}))
        assert (await search(engine, tokenizer, CARD)).verifier == judged.verifier


async def test_an_encoder_that_keeps_no_questions_refuses_searches(tokenizer):
    async with started(similar_questions=0) as engine:
        await engine.wait_started()
        with pytest.raises(CallerError, match="similar_questions"):
            await search(engine, tokenizer, CARD)

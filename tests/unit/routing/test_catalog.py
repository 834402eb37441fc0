"""Models of the catalog: what is said of all replicas together."""

import pytest
from msgspec.structs import replace

from maitred.core.errors import ReplicaUnavailable
from maitred.core.request import ModelFingerprint
from maitred.routing.catalog import ServedModel, TextModel
from tests.support.dispatchers import CARD, ScriptedReplica
from tests.support.tokenizers import byte_level, sentencepiece

CONTENT = ModelFingerprint("shape", "tokenizer", "weights", "content")
ONE = replace(CARD, digest=CONTENT, pooling="mean")


@pytest.mark.parametrize(
    ("other", "is_known"),
    [
        ({"device": "cuda", "max_sequences": 1}, True),
        ({"digest": ModelFingerprint("shape", "tokenizer", "weights", "other")}, False),
        ({"dtype": "bf16"}, False),
        ({"pooling": "cls"}, False),
    ],
)
def test_replicas_that_compute_different_things_have_no_fingerprint_together(other, is_known):
    """So that nothing is kept of what one of them has computed."""
    model = ServedModel("m", [ScriptedReplica(ONE), ScriptedReplica(replace(ONE, **other))], None)
    assert model.card().digest == (CONTENT if is_known else ModelFingerprint())


def test_what_reads_the_answers_is_the_tokenizer_that_is_loaded():
    """And not the one whose files its engines have found meanwhile."""
    first, again, other = (
        ServedModel("m", [ScriptedReplica(ONE)], tokenizer).answer_identity
        for tokenizer in (byte_level(), byte_level(), sentencepiece())
    )
    assert first == again != other


def test_what_servers_have_said_that_they_run_is_known_behind_a_change_of_settings():
    model = TextModel("m", [], None)
    model.note_fingerprint("large", "fp_2")
    changed = model.with_replicas([], None, reprompts=False, continues_at_fallback=False)
    assert (changed.fingerprint("large"), changed.fingerprint("small")) == ("fp_2", "")


def test_a_model_that_requests_may_wait_for_is_ready_and_checks_them():
    waits = stays_ready = False
    replicas = {}
    model = ServedModel(
        "m",
        replicas.values(),
        None,
        coming_card=lambda: replace(CARD, dtype="auto") if waits else None,
        stays_ready=lambda: stays_ready,
    )
    assert not model.is_ready()
    with pytest.raises(ReplicaUnavailable):
        model.card()
    waits = True
    assert model.card().dtype == "auto"
    assert not model.is_ready(), "others may have replicas that serve"
    stays_ready = True
    assert model.is_ready()
    replicas["r"] = ScriptedReplica(ONE)
    assert model.card() == ONE
    replicas.clear()
    assert model.card() == ONE, "the last card is better than a predicted one"
    assert model.is_ready()

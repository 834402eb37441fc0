import pytest

from maitred.engine.config import EngineConfig, KVShareConfig, SpeculationConfig, engine_faults


def keys(config):
    return [key for key, _ in engine_faults(config)]


def test_the_defaults_are_sound():
    assert keys(EngineConfig()) == []


def test_more_sequences_at_least_than_at_most():
    assert keys(EngineConfig(min_sequences=9, max_sequences=8)) == ["engine.min_sequences"]


def test_guaranteed_shares_that_fill_the_cache_are_valid():
    assert keys(EngineConfig(kv_shares={str(i): KVShareConfig(floor=0.1) for i in range(10)})) == []


def test_guaranteed_shares_beyond_the_whole_cache_are_refused():
    shares = {"acme": KVShareConfig(floor=0.7), "beta": KVShareConfig(floor=0.6)}
    assert list(engine_faults(EngineConfig(kv_shares=shares))) == [
        (
            "engine.kv_shares",
            "The floors add up to 1.3 of the KV cache, and there is only one. Lower some of them until they add up to "
            "at most 1.",
        )
    ]


def test_a_guaranteed_share_above_its_ceiling_is_refused():
    assert keys(EngineConfig(kv_shares={"acme": KVShareConfig(floor=0.5, ceiling=0.4)})) == [
        "engine.kv_shares.acme.floor"
    ]


@pytest.mark.parametrize(
    ("speculation", "fault"),
    [
        (SpeculationConfig(method="ngram"), []),
        (SpeculationConfig(method="auto", draft_model="small"), []),
        (SpeculationConfig(method="draft_model"), ["engine.speculation.method"]),
        (SpeculationConfig(method="ngram", draft_model="small"), ["engine.speculation.draft_model"]),
        (SpeculationConfig(draft_model="small"), ["engine.speculation.draft_model"]),
    ],
)
def test_a_draft_model_and_a_method_that_uses_it(speculation, fault):
    assert keys(EngineConfig(speculation=speculation)) == fault

"""Models of our own beside those on other servers: what they inherit, and what does not go together."""

from pathlib import Path

import pytest

from maitred.config.loader import load
from maitred.core.errors import ConfigInvalid

UPSTREAM = "upstreams: [{url: 'http://127.0.0.1:1/v1'}]"


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def loaded(text, **layers):
    Path("maitred.yaml").write_text(text)
    return load(None, layers.get("env", {}), layers.get("overrides", {}))


def test_the_engine_of_a_model_has_the_settings_of_all_but_for_its_own():
    result = loaded(
        "engine:\n  max_sequences: 8\n  kv_memory_bytes: 64MiB\n"
        "models:\n  a:\n    path: x\n    engine: {max_sequences: 4, line: {policy: fifo}}\n  b:\n    path: y\n"
    )
    a, b = result.config.models["a"].engine, result.config.models["b"].engine
    assert (a.max_sequences, a.kv_memory_bytes, a.line.policy) == (4, 64 << 20, "fifo")
    assert b == result.config.engine
    assert result.origins["models.a.engine.kv_memory_bytes"] == "maitred.yaml:3"


def test_a_flag_for_all_engines_does_not_undo_what_one_says_for_itself():
    text = "models:\n  a:\n    path: x\n    engine: {max_sequences: 4}\n  b:\n    path: y\n"
    config = loaded(text, overrides={"engine.max_sequences": "16"}).config
    assert [config.models[name].engine.max_sequences for name in "ab"] == [4, 16]


def test_no_model_of_the_section_model_runs_where_only_others_are_named():
    assert not loaded("models:\n  a:\n    path: x\n").config.has_engine
    assert loaded("model: {path: z}\nmodels:\n  a:\n    path: x\n").config.has_engine


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("{}", "models.m.upstreams"),
        (f"{{path: x, {UPSTREAM}}}", "models.m.upstreams"),
        (f"{{pinned: true, {UPSTREAM}}}", "models.m.pinned"),
        (f"{{memory_bytes: 1GiB, {UPSTREAM}}}", "models.m.memory_bytes"),
        (f"{{engine: {{max_sequences: 4}}, {UPSTREAM}}}", "models.m.path"),
        ("{path: x, engine: {max_sequences: 4096}}", "models.m.engine.step_tokens"),
        ("{path: x, engine: {min_sequences: 9, max_sequences: 8}}", "models.m.engine.min_sequences"),
    ],
)
def test_what_does_not_go_together_is_a_fault_at_its_place(model, key):
    with pytest.raises(ConfigInvalid) as caught:
        loaded(f"models:\n  m: {model}\n")
    assert f"{key}: " in caught.value.message


def test_a_method_of_one_model_that_conflicts_with_the_common_draft_model_is_reported_before_the_load():
    engine = "engine:\n  speculation: {method: auto, draft_model: small}\n"
    with pytest.raises(ConfigInvalid) as caught:
        loaded(f"{engine}models:\n  m:\n    path: x\n    engine: {{speculation: {{method: ngram}}}}\n")
    assert "models.m.engine.speculation.draft_model: " in caught.value.message
    loaded(f"{engine}models:\n  m:\n    path: x\n    engine: {{speculation: {{method: ngram, draft_model: null}}}}\n")


def test_what_inherits_is_not_read_before_it_is_known_to_be_sound():
    for text in ("models: 3\nengine: {threads: 1}\n", "models: {a: 3}\nengine: {threads: 1}\n", "engine: 1\n"):
        with pytest.raises(ConfigInvalid):
            loaded(text)

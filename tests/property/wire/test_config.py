"""Whatever is written into any layer gives a configuration or `ConfigInvalid`, and every fault is listed."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maitred.config.loader import load
from maitred.config.nodes import merge
from maitred.config.sources import parse_yaml, read_environment, read_overrides
from maitred.config.tree import Config
from maitred.config.walker import StructBuilder
from maitred.core.errors import ConfigInvalid

KEYS = st.sampled_from(
    [
        "server",
        "model",
        "engine",
        "log",
        "port",
        "host",
        "strict",
        "path",
        "kv_memory_bytes",
        "level",
        "device",
        "drain_grace_s",
    ]
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.sampled_from(["1MiB", "auto"])
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)
VARIABLES = st.dictionaries(
    st.lists(KEYS | st.text(max_size=5), max_size=3).map(lambda parts: "__".join(["MAITRED", *parts]).upper()),
    st.text(max_size=10) | st.sampled_from(["1", "true", "null", "auto"]),
    max_size=4,
)


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    TREES, VARIABLES, st.dictionaries(st.text(max_size=12) | KEYS.map(lambda key: f"server.{key}"), SCALARS, max_size=3)
)
def test_any_layers_give_a_configuration_or_one_listing(
    tree: object, variables: dict[str, str], overrides: dict[str, object]
) -> None:
    path = Path("maitred.yaml")
    path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
    try:
        load(path, variables, overrides)
    except ConfigInvalid as error:
        listing = error.message
    else:
        return
    assert len(listing.split("\n")) >= 2
    assert listing.encode()


@settings(deadline=None)
@given(st.text())
def test_any_text_is_read_as_yaml_or_is_a_fault(text: str) -> None:
    root, _ = parse_yaml(text, "f")
    StructBuilder({}).build(Config, root)


WRONG = st.fixed_dictionaries(
    {},
    optional={
        "server.port": st.integers(65536),
        "server.strict": st.just("perhaps"),
        "engine.device": st.just("tpu"),
        "engine.threads": st.integers(max_value=-1),
        "log.level": st.just("loud"),
        "model.max_choices": st.just(0),
        "engine.unheard_of": st.just(1),
        "nowhere.at_all": st.just(1),
    },
)


@settings(deadline=None)
@given(WRONG, st.randoms(use_true_random=False))
def test_every_fault_is_listed_whichever_layer_it_is_in(wrong: dict[str, object], random: object) -> None:
    layers: list[dict[str, object]] = [{}, {}]
    for key, value in wrong.items():
        layers[random.randrange(2)][key] = value  # type: ignore[attr-defined]
    variables = {f"MAITRED__{key.upper().replace('.', '__')}": str(value) for key, value in layers[0].items()}
    walker = StructBuilder({})
    walker.build(Config, merge(read_environment(variables)[0], read_overrides(layers[1])[0]))
    expected = {"nowhere" if key.startswith("nowhere") else key for key in wrong}
    assert {fault.key for fault in walker.faults} == expected
    assert len(walker.faults) == len(expected)

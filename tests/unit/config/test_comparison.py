"""What a reload makes of a configuration that has changed."""

import pytest
from msgspec import inspect
from msgspec.structs import replace

from maitred.config.comparison import LIVE, RESTART, compare_configs, restart_reason
from maitred.config.loader import load
from maitred.config.tree import Config, TextModelConfig
from maitred.config.walker import nested_struct
from maitred.core.secret import Secret
from maitred.replica.upstream.config import UpstreamConfig


def patterns_of(info, parent=""):
    for field in info.fields:
        inside, suffix = nested_struct(field.type)
        name = f"{parent}{field.name}"
        if inside is None:
            yield name
        else:
            yield from patterns_of(inside, f"{name}{suffix and suffix.replace('[]', '').replace('NAME', '*')}.")


KEYS = list(patterns_of(inspect.type_info(Config)))


def read(**settings):
    return load(overrides={key.replace("__", "."): value for key, value in settings.items()}).config


def served(url="http://127.0.0.1:9/v1", **settings):
    return TextModelConfig(upstreams=[UpstreamConfig(url=url)], **settings)


def test_every_setting_is_either_live_or_needs_a_restart():
    for key in KEYS:
        restart_reason(key)
    with pytest.raises(LookupError, match="Name it in LIVE or in RESTART"):
        restart_reason("nobody.knows")


def test_the_tables_name_what_there_is():
    there = {".".join(key.split(".")[:n]) for key in KEYS for n in range(1, 9)}
    assert (LIVE | RESTART.keys()) - there == set()
    assert LIVE & RESTART.keys() == set()


def test_nothing_has_changed():
    comparison = compare_configs(Config(), Config())
    assert (comparison.changes, comparison.pending) == ((), ())


def test_what_needs_a_restart_is_named_and_stays_and_the_rest_is_applied():
    comparison = compare_configs(
        Config(), read(server__port=9000, server__max_in_flight=5, store__durable_journal=True)
    )
    assert [change.setting for change in comparison.changes] == ["server.max_in_flight"]
    assert [(change.setting, change.before, change.after) for change in comparison.pending] == [
        ("server.port", "8000", "9000"),
        ("store.durable_journal", "false", "true"),
    ]
    assert comparison.config.server.max_in_flight == 5
    assert comparison.config.server.port == 8000
    assert comparison.config.store == Config().store


def test_a_model_of_others_comes_and_goes_whatever_its_name():
    running, coming = (replace(Config(), models={name: served()}) for name in ("old", "new.v4.1"))
    comparison = compare_configs(running, coming)
    assert [change.setting for change in comparison.changes] == ["models.old", "models.new.v4.1"]
    assert comparison.config.models == coming.models
    changed = replace(Config(), models={"new.v4.1": served(context_tokens=99, url="http://127.0.0.1:8/v1")})
    comparison = compare_configs(coming, changed)
    assert [change.setting for change in comparison.changes] == [
        "models.new.v4.1.upstreams[0].url",
        "models.new.v4.1.context_tokens",
    ]


def test_a_model_that_is_loaded_here_neither_comes_nor_goes_nor_becomes_one_of_others():
    mine = TextModelConfig(path="/models/mine", region="eu")
    running = replace(Config(), models={"a": served(), "mine": mine})
    for coming in ({"a": served()}, {"a": served(), "mine": served()}):
        comparison = compare_configs(running, replace(Config(), models=coming))
        assert comparison.changes == ()
        assert {change.setting.partition(".mine")[1] for change in comparison.pending} == {".mine"}
        assert comparison.config == running
    comparison = compare_configs(replace(Config(), models={"a": served()}), running)
    assert [change.setting for change in comparison.pending] == ["models.mine"]
    assert [*comparison.config.models] == ["a"]


def test_of_a_model_that_is_loaded_here_only_what_the_gateway_does_with_it_changes():
    before = TextModelConfig(path="/models/mine")
    after = TextModelConfig(path="/models/other", region="eu", tool_parser="hermes")
    comparison = compare_configs(replace(Config(), models={"m": before}), replace(Config(), models={"m": after}))
    assert [change.setting for change in comparison.changes] == ["models.m.region"]
    assert [change.setting for change in comparison.pending] == ["models.m.path", "models.m.tool_parser"]
    assert comparison.config.models["m"] == TextModelConfig(path="/models/mine", region="eu")


def test_a_local_model_that_comes_or_goes_with_the_others_is_reported():
    (change,) = compare_configs(Config(), replace(Config(), models={"a": served()})).pending
    assert (change.setting, change.before, change.after) == ("model", "served", "not served")


def test_a_changed_secret_is_reported_by_its_reference_only():
    def keyed(value):
        upstream = UpstreamConfig(url="http://127.0.0.1:9/v1", api_key=Secret(value, "{file: key}"))
        return replace(Config(), models={"a": TextModelConfig(upstreams=[upstream])})

    (change,) = compare_configs(keyed("first-secret"), keyed("second-secret")).changes
    assert change.setting == "models.a.upstreams[0].api_key"
    assert "secret" not in f"{change.before}{change.after}"
    added = compare_configs(replace(Config(), models={"b": served()}), keyed("first-secret"))
    assert "first-secret" not in str(added.changes)

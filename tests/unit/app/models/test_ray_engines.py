"""What a gateway tells the engines that Ray runs for it."""

from itertools import pairwise

import pytest

from maitred.app.models.engines import pool_of
from maitred.app.models.ray_engines import engine_settings, make_ray_backend
from maitred.config.loader import load
from maitred.fleet.ray.arguments import engine_arguments, read_arguments
from maitred.fleet.remote import FingerprintCheck
from tests.support.clock import FakeClock


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "maitred.yaml"
    file.write_text(
        "engine: {kv_memory_bytes: 1GiB, line: {policy: fifo}}\n"
        "engine_link: {secret: {env: LINK}, allow_plaintext: true}\n"
        "server: {port: 9}\n"
    )
    return load(file, {"LINK": "correct horse battery staple"}).config


def test_engines_get_what_is_set_for_them_and_references_to_secrets(config):
    assert engine_settings(config) == {
        "engine": {"kv_memory_bytes": 1 << 30, "line": {"policy": "fifo"}},
        "engine_link": {"secret": {"env": "LINK"}, "allow_plaintext": True},
    }


def test_an_engine_reads_them_as_they_are_here(config):
    command = engine_arguments(read_arguments({"settings": engine_settings(config)}), "tcp:127.0.0.1:1")
    values = [value for flag, value in pairwise(command) if flag == "--set"]
    read = load(
        env={"LINK": "correct horse battery staple"}, overrides=dict(value.split("=", 1) for value in values)
    ).config
    assert (read.engine.kv_memory_bytes, read.engine.line) == (config.engine.kv_memory_bytes, config.engine.line)
    assert read.engine_link == config.engine_link


async def test_callers_are_promised_the_start_that_the_backend_expects(config):
    backend = make_ray_backend(config, FingerprintCheck(None), FakeClock())
    assert pool_of(backend, config, FakeClock()).ready_in_s() == backend.facts.expected_start_s == 30.0

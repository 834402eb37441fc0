"""Arguments of the Serve application: from a command line, a file or a gateway, and the engine that comes of them."""

from itertools import pairwise

import pytest

from maitred.core.errors import ConfigInvalid
from maitred.fleet.ray.arguments import engine_arguments, make_engine, read_arguments

SECRET = "correct horse battery staple"


def test_text_of_a_command_line_is_converted():
    read = read_arguments({"max_replicas": "3", "num_gpus": "0.5"})
    assert (read.max_replicas, read.num_gpus) == (3, 0.5)


@pytest.mark.parametrize("arguments", [{"count": 3}, {"max_replicas": "many"}, {"max_replicas": 0}])
def test_arguments_that_there_are_not_or_that_cannot_be_are_refused(arguments):
    with pytest.raises(ConfigInvalid, match="arguments of the application"):
        read_arguments(arguments)


def test_the_command_has_every_setting_and_no_secret(monkeypatch):
    monkeypatch.setenv("LINK", SECRET)
    link = {"secret": {"env": "LINK"}, "allow_plaintext": True}
    read = read_arguments(
        {"model": "/models/m", "num_cpus": 4, "settings": {"engine": {"max_sequences": 9}, "engine_link": link}}
    )
    command = engine_arguments(read, "tcp:10.0.0.1:9200")
    assert command[3:6] == ["engine", "/models/m", "--listen"]
    values = [value for flag, value in pairwise(command) if flag == "--set"]
    assert values == [
        "log.format=json",
        "engine.drain_grace_s=595",
        "engine.threads=4",
        "engine.max_sequences=9",
        "engine_link.secret.env=LINK",
        "engine_link.allow_plaintext=true",
    ]
    assert read.link().secret.reveal() == SECRET


def test_an_engine_on_a_gpu_gets_no_threads():
    assert not any("engine.threads" in word for word in engine_arguments(read_arguments({"num_gpus": 1}), "tcp:h:1"))


def test_the_section_of_a_file_holds_unless_a_setting_says_otherwise(tmp_path):
    (tmp_path / "secret").write_text(SECRET + "\n")
    file = tmp_path / "maitred.yaml"
    file.write_text(f"engine_link:\n  secret: {{file: {tmp_path}/secret}}\n  silence_timeout_s: 5\n")
    read = read_arguments({"config": str(file), "settings": {"engine_link": {"silence_timeout_s": 7}}})
    assert (read.link().secret.reveal(), read.link().silence_timeout_s) == (SECRET, 7)
    assert "--config" in engine_arguments(read, "tcp:h:1")


@pytest.mark.parametrize("secret", ["the secret itself", {"env": "NOT_SET"}, {"file": "/not/there"}])
def test_a_secret_that_is_not_there_or_stands_in_the_open_is_refused(secret):
    read = read_arguments({"settings": {"engine_link": {"secret": secret}}})
    with pytest.raises(ConfigInvalid, match="engine_link"):
        read.link()


def test_an_engine_on_a_network_needs_a_secret():
    with pytest.raises(ConfigInvalid, match=r"engine_link\.secret"):
        make_engine(read_arguments({}), "192.0.2.1", 9200)

"""Words of a command line that are read without typer are read as typer does."""

import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from maitred.cli.main import plain_arguments
from maitred.cli.serve import serve

PLAIN = [
    "",
    "./model",
    "./model --port 9000 --host=::1",
    "--port 1 ./model --port 2",
    "--set a.b=1 --set=c.d=e=f --config my.yaml",
    "--threads -1 --served-name= --allow-unauthenticated",
    "--engine tcp:a:1 --engine unix:/b",
]
LEFT_TO_TYPER = ["--help", "-h", "a b", "--prot 1", "--port", "--allow-unauthenticated=true", "-- model", "-"]


def by_typer(words: list[str]) -> dict[str, Any]:
    """What typer calls the command with."""
    called: dict[str, Any] = {}

    def command(**arguments: object) -> None:
        called.update(arguments)

    command.__signature__ = signature(serve)  # type: ignore[attr-defined]
    command.__annotations__ = serve.__annotations__
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return {name: value for name, value in called.items() if value}


@pytest.mark.parametrize("line", PLAIN)
def test_plain_words_are_read_as_typer_does(line: str) -> None:
    words = line.split()
    plain = plain_arguments(serve, words)
    assert plain is not None
    assert {name: value for name, value in plain.items() if value} == by_typer(words)


@pytest.mark.parametrize("line", LEFT_TO_TYPER)
def test_anything_else_is_left_to_typer(line: str) -> None:
    assert plain_arguments(serve, line.split()) is None


def test_a_path_is_one() -> None:
    assert plain_arguments(serve, ["--config", "my.yaml"]) == {"config": Path("my.yaml")}


def test_a_fault_is_one_sentence_and_an_exit_code_without_a_traceback() -> None:
    command = [sys.executable, "-m", "maitred", "serve", "--port", "http"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("The configuration has a fault:\n  --port: server.port")

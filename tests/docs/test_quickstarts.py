"""The quickstarts are right: what they show is written, started and run, page by page, as a reader would."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import typer.main

from maitred.cli.app import app
from maitred.config.default_model import MODEL_NAME, installed_model
from maitred.testing.scripted_openai.process import scripted_openai
from maitred.testing.server_process import serving
from tests.support.source import ROOT

PAGES = sorted(ROOT.glob("docs/quickstart-*.md"))
DEFAULT_URL = "http://127.0.0.1:8000"
ELSEWHERE = ("pip install ",)
"""What would change this environment; tests/integration/test_wheel.py installs the package."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)
FAR = re.compile(r"http://10\.0\.0\.\d:8000")
"""Addresses of servers that a page takes for given."""
FILE = re.compile(r"# (\w+\.yaml)\n")
KEY = re.compile(r"export MAITRED_ADMIN_KEY=(\S+)")


class Reader:
    """Reader of a page, in a folder, with a shell that keeps its variables, and with a server once one is started."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._far: dict[str, str] = {}
        self.environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self.printed: list[str] = []
        self.served = 0
        self._server = stack.enter_context(ExitStack())

    def follow(self, language: str, text: str) -> None:
        if language == "yaml":
            (self.folder / FILE.match(text)[1]).write_text(FAR.sub(self._near, text))
        elif language == "console":
            for command in re.findall(r"^\$ (.+)$", text, re.M):
                self._console(command)
        elif language == "sh":
            self._run(["bash", "-euo", "pipefail", "-c", self._here(text)])
        elif language == "python":
            self._run([sys.executable, "-c", self._here(text)])
        else:
            assert language == "ini"

    def _near(self, far: re.Match[str]) -> str:
        """The address of a scripted server that stands for one far away."""
        if far[0] not in self._far:
            self._far[far[0]] = self._stack.enter_context(scripted_openai()).url
        return self._far[far[0]]

    def _console(self, command: str) -> None:
        if command.startswith("maitred serve"):
            self._serve(shlex.split(command)[2:])
        elif not command.startswith(ELSEWHERE) and not command.endswith("…"):
            state = self.folder / "environment"
            self._run(["bash", "-euo", "pipefail", "-c", f"{command}\nenv -0 > {state}"])
            self.environment = dict(pair.split("=", 1) for pair in state.read_text().split("\0") if pair)

    def _serve(self, words: list[str]) -> None:
        if "--config" not in words and (self.folder / "maitred.yaml").exists():
            words += ["--config", "maitred.yaml"]
        words = [str(self.folder / word) if (self.folder / word).is_file() else word for word in words]
        self._server.close()
        environment = {**self.environment, "MAITRED_TINY": "" if installed_model() else "1"}
        server = self._server.enter_context(
            serving(*words, settings={"engine.kv_memory_bytes": "256MiB"}, environment=environment)
        )
        self.served += 1
        self.environment |= {"MAITRED_URL": server.url}
        if (found := KEY.search(server.log.read_text())) is not None:
            self.environment["MAITRED_ADMIN_KEY"] = found[1]

    def _here(self, text: str) -> str:
        """The text with the server of the test, and its model."""
        text = text.replace(DEFAULT_URL, self.environment["MAITRED_URL"])
        return text if installed_model() else text.replace(MODEL_NAME, "maitred-tiny")

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"
        self.printed.append(done.stdout)


READ = {
    "application": (1, ["Paris", "'name': 'Maria'"] if installed_model() else []),
    "box": (1, ["lab", "SmolLM2"] if installed_model() else ["lab"]),
    "platform": (0, ["OK"]),
    "litellm": (1, ["not supported", "large", "Written to maitred.yaml", "OK"]),
    "vllm": (1, ["OK", '"id":"llama"']),
}
"""Page -> servers that it starts, and what is printed when it is followed."""


def test_there_is_one_for_each_reader():
    assert {page.stem.removeprefix("quickstart-") for page in PAGES} == READ.keys()
    listed = (ROOT / "docs/README.md").read_text()
    assert all(f"]({page.name})" in listed for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem.removeprefix("quickstart-"))
def test_a_page_can_be_followed(page, tmp_path):
    servers, expected = READ[page.stem.removeprefix("quickstart-")]
    with ExitStack() as stack:
        reader = Reader(tmp_path, stack)
        for language, text in BLOCK.findall(page.read_text()):
            reader.follow(language, text)
    printed = "".join(reader.printed)
    assert [words for words in expected if words not in printed] == [], printed
    assert reader.served == servers


def test_flags_of_vllm_are_said_as_flags_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/quickstart-vllm.md").read_text()
    rows = [row.split(" | ")[1] for row in re.findall(r"^\| `--.*", page, re.M)]
    assert len(rows) > 12
    options = {flag for parameter in typer.main.get_command(app).commands["serve"].params for flag in parameter.opts}
    settings = []
    for flag, value in re.findall(r"`(--[a-z-]+)(?: (\S+))?`", "\n".join(rows)):
        assert flag == "--set" or flag in options
        settings += ["--set", value] if flag == "--set" else []
    command = [sys.executable, "-m", "maitred", "config", "check", *settings]
    assert subprocess.run(command, capture_output=True, text=True, timeout=300).stdout == "OK\n"

"""The README is right: its code runs, its figures are those of the result files, its links lead somewhere."""

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import summary
from maitred.config.default_model import LICENCE, MODEL_NAME, installed_model
from maitred.testing.server_process import serving

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DEFAULT_URL = "http://127.0.0.1:8000"


def block(language: str) -> str:
    """The first code block in this language."""
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"no {language} block"
    return found[1]


@pytest.fixture(scope="module")
def server():
    environment = {"MAITRED_TINY": "" if installed_model() else "1"}
    with serving(settings={"engine.kv_memory_bytes": "256MiB"}, environment=environment) as server:
        yield server


def here(code, server):
    """Code of the page with the server of the test, and with the toy where the page's model is not installed."""
    code = code.replace(DEFAULT_URL, server.url)
    return code if installed_model() else code.replace(MODEL_NAME, "maitred-tiny")


def holds(text):
    """Whether a text has the answer that the page promises, from the model that it names."""
    return "Paris" in text if installed_model() else len(text.split()) > 3


def test_a_start_prints_what_the_page_shows(server):
    shown = [LICENCE, "Ready at ", f"  model     {MODEL_NAME}  (fp32 on cpu)"]
    assert all(f"\n{line}" in block("console") for line in shown)
    if installed_model():
        assert all(line in server.log.read_text() for line in shown)


def test_the_curl_command_streams_an_answer(server):
    command = here(block("sh"), server)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=True)
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    assert holds(text)


def test_the_python_block_prints_an_answer(server):
    printed = io.StringIO()
    scope: dict[str, object] = {}
    with contextlib.redirect_stdout(printed):
        exec(here(block("python"), server), scope)
    scope["client"].close()
    assert holds(printed.getvalue())


@pytest.mark.parametrize(
    ("page", "render"), [(summary.README, summary.render_short), (summary.PAGE, summary.render)], ids=["README", "page"]
)
def test_the_figures_are_those_of_the_result_files(page, render):
    figures = page.read_text().partition(summary.BEGIN)[2].partition(summary.END)[0]
    assert figures.strip() == render().strip(), "run: python -m benchmarks summary"


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []

"""The wheel alone is enough: it is built, installed into an environment of its own, and serves.

The packages that it depends on are those of this environment; of maitred itself, nothing but the wheel is there.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from maitred.testing.server_process import serving
from tests.support.source import ROOT

BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")


def run(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, **options).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed; make test installs it")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src/maitred", source / "src/maitred", ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index")
    run(*pip, "--no-deps", "--no-build-isolation", "--no-cache-dir", str(source), "--wheel-dir", str(built))
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The Python of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--no-compile", str(wheel))
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # A path in such a file is searched last, and the files of its kind there, of which one names our source, are not.
    (Path(packages) / "of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
    return str(python)


ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_nothing_but_the_wheel_is_imported(python, tmp_path):
    shown = "import maitred, importlib.util as u; print(maitred.__file__); print(u.find_spec('maitred.testing'))"
    file, testing = run(python, "-c", shown, env=ALONE, cwd=tmp_path).splitlines()
    assert file.startswith(python.removesuffix("bin/python"))
    assert testing == "None"


def test_the_command_is_there(python, tmp_path):
    command = python.removesuffix("python") + "maitred"
    assert run(command, "--version", env=ALONE, cwd=tmp_path).startswith("maitred ")
    assert run(command, "config", "check", env=ALONE, cwd=tmp_path) == "OK\n"


@pytest.mark.usefixtures("new_interpreters")
def test_it_serves(python):
    settings = {"engine.kv_memory_bytes": "64MiB", "engine.bake_off": "off"}
    with serving(settings=settings, environment={"PYTHONPATH": ""}, python=python) as server:
        body = {"model": "maitred-tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).json()
        assert answer["usage"]["completion_tokens"] > 0
        assert httpx.get(f"{server.url}/console/").status_code == 200

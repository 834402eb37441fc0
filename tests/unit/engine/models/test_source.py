from pathlib import Path

import pytest

from maitred.core.errors import ConfigInvalid
from maitred.engine.models.source import find_model


def snapshot(cache: Path, name: str, commit: str = "abc123", *, ref: str | None = "main") -> Path:
    repository = cache / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if ref:
        (repository / "refs").mkdir()
        (repository / "refs" / ref).write_text(commit)
    return folder


def test_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_model(tmp_path, env={}) == tmp_path
    assert find_model(str(tmp_path), env={}) == tmp_path


@pytest.mark.parametrize(
    ("env", "cache"),
    [
        ({"HF_HUB_CACHE": "{home}/a"}, "a"),
        ({"HF_HOME": "{home}/b"}, "b/hub"),
        ({"XDG_CACHE_HOME": "{home}/c"}, "c/huggingface/hub"),
        ({"HOME": "{home}"}, ".cache/huggingface/hub"),
    ],
)
def test_hub_cache_where_the_hub_client_keeps_it(tmp_path, monkeypatch, env, cache):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = snapshot(tmp_path / cache, "owner/name")
    assert find_model("owner/name", env={key: value.format(home=tmp_path) for key, value in env.items()}) == folder


def test_revisions(tmp_path):
    snapshot(tmp_path, "owner/name", "c0ffee", ref=None)
    env = {"HF_HUB_CACHE": str(tmp_path)}
    assert find_model("owner/name", revision="c0ffee", env=env).name == "c0ffee"
    with pytest.raises(ConfigInvalid, match="no model of that id"):
        find_model("owner/name", env=env)


def test_unknown_id_says_how_to_name_a_folder(tmp_path):
    with pytest.raises(ConfigInvalid, match=r"maitred serve /path/to/folder"):
        find_model("owner/name", env={"HF_HUB_CACHE": str(tmp_path)})


@pytest.mark.parametrize("source", ["/nowhere/at/all", "./nowhere", "~/nowhere/x", "a/b/c"])
def test_absent_path(source):
    with pytest.raises(ConfigInvalid, match="Check the path"):
        find_model(source, env={})


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ConfigInvalid, match="holds no config"):
        find_model(tmp_path, env={})


def test_what_is_not_in_the_cache_is_fetched_into_it(tmp_path):
    asked = []

    def download(name, revision, cache, files):
        asked.append((name, revision, cache))
        return snapshot(cache, name)

    env = {"HF_HUB_CACHE": str(tmp_path)}
    folder = find_model("owner/name", env=env, download=download)
    assert asked == [("owner/name", "main", tmp_path)]
    assert find_model("owner/name", env=env, download=download) == folder
    assert len(asked) == 1, "the second time it is there"


def test_a_hub_that_does_not_answer_is_named_as_the_reason(tmp_path):
    def download(name, revision, cache, files):
        raise ConnectionError("no route to the hub.\nmany more lines")

    with pytest.raises(ConfigInvalid, match=r"did not give it: no route to the hub\. Check .* /path/to/folder"):
        find_model("owner/name", env={"HF_HUB_CACHE": str(tmp_path)}, download=download)


def test_a_repository_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigInvalid, match=r"no config\.json"):
        find_model("owner/name", env={"HF_HUB_CACHE": str(tmp_path)}, download=lambda *_: tmp_path)

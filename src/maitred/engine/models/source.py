"""Lookup of a model's files: a folder or a GGUF file that the operator names, or a model on Hugging Face's hub.

A GGUF file, or a folder that holds just one, is given a folder in the cache (`maitred.engine.gguf.folder`). A hub id is
looked up in the local cache of the hub's client first, whose layout is
``<cache>/models--<owner>--<name>/{refs/<revision>, snapshots/<commit>/}``. ``<owner>/<name>/<file>.gguf`` is one file
of a model there. A model that is not in the cache is downloaded by that client into the cache; ``HF_HUB_OFFLINE=1``
forbids it.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from maitred.core.errors import ConfigInvalid
from maitred.engine.gguf.folder import is_gguf_folder, make_gguf_folder, only_gguf

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILE = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)/(?P<file>[\w./-]+\.gguf)")

Download = Callable[[str, str, Path, Sequence[str]], Path]
"""Function from a hub id, a revision, a cache folder and patterns of files to the folder of the snapshot."""

_FILES = ("*.json", "*.safetensors", "*.jinja")
"""Patterns of the files of a checkpoint that maitred reads; weights in other formats are not downloaded."""


def download_snapshot(name: str, revision: str, cache: Path, files: Sequence[str]) -> Path:
    """Downloads files of a model with the hub's own client."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=list(files)))


def find_model(
    source: str | Path,
    *,
    revision: str = "main",
    env: Mapping[str, str] | None = None,
    download: Download = download_snapshot,
) -> Path:
    """Resolves a configured folder, GGUF file or hub id to a folder with a model.

    Args:
        source: Folder, ``.gguf`` file, or hub id such as ``Qwen/Qwen2.5-0.5B-Instruct``.
        revision: Branch, tag or commit of a hub id.
        env: The process environment, unless given.
        download: Downloads files of a model that are not in the cache.

    Raises:
        ConfigInvalid: There is no such model; the text says how to name a folder instead.
    """
    path, name = Path(source).expanduser(), str(source)
    env = os.environ if env is None else env
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigInvalid(f"{path} is no model. Name the folder that has config.json, or a .gguf file.")
        return make_gguf_folder(path, env)
    if path.is_dir():
        return _model_in(
            path,
            env,
            f"{path} holds no config.json, so it is no model folder. Name the folder that has config.json, "
            "tokenizer.json and *.safetensors, or a .gguf file.",
        )
    local = path.is_absolute() or name.startswith((".", "~"))
    if not local and (match := _HUB_FILE.fullmatch(name)):
        return _hub_file(match["name"], match["file"], revision, env, download)
    if local or name.endswith(".gguf") or not _HUB_ID.fullmatch(name):
        raise ConfigInvalid(f"The model {source} does not exist. Check the path.")
    cache = _hub_cache(env)
    folder = _snapshot(cache, name, revision)
    if not _has_model(folder):
        folder = _fetch(name, revision, cache, download, _FILES)
    return _model_in(
        folder,
        env,
        f"The hub's {name} has no config.json, so it is no model that maitred can serve. Of a model in GGUF files, "
        f"name one: `maitred serve {name}/FILE.gguf`.",
    )


def _model_in(folder: Path, env: Mapping[str, str], absent: str) -> Path:
    """Returns the folder, or the one that is made for its GGUF file; raises ConfigInvalid if it has no model."""
    if not _has_model(folder):
        raise ConfigInvalid(absent)
    return make_gguf_folder(only_gguf(folder), env) if is_gguf_folder(folder) else folder


def _has_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or is_gguf_folder(folder)


def _hub_file(name: str, file: str, revision: str, env: Mapping[str, str], download: Download) -> Path:
    """Returns the folder for one GGUF file of a model on the hub, with all parts if it is split."""
    cache = _hub_cache(env)
    path = _snapshot(cache, name, revision) / file
    if not path.is_file():
        path = _fetch(name, revision, cache, download, [re.sub(r"-\d{5}-of-", "-*-of-", file)]) / file
    if not path.is_file():
        raise ConfigInvalid(f"The hub's {name} has no file {file}. Check its name.")
    return make_gguf_folder(path, env)


def _fetch(name: str, revision: str, cache: Path, download: Download, files: Sequence[str]) -> Path:
    try:
        return download(name, revision, cache, files)
    except Exception as error:  # the client has a dozen kinds, and its HTTP library more: none gives us the model
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigInvalid(
            f"There is no folder {name}, no model of that id in the hub's cache at {cache}, and the hub did not give "
            f"it: {reason} Check the id and the connection, or name a folder (`maitred serve /path/to/folder`)."
        ) from error


def _hub_cache(env: Mapping[str, str]) -> Path:
    """Returns the cache folder that the hub's own client would use."""
    if cache := env.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := env.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def _snapshot(cache: Path, name: str, revision: str) -> Path:
    """Returns the folder of one revision of a model, which may not exist."""
    repository = cache / f"models--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    return repository / "snapshots" / commit

"""Lookup of a model's files: a folder that the operator names, or a snapshot of a model on Hugging Face's hub.

A hub id is looked up in the local cache of the hub's client first, whose layout is
``<cache>/models--<owner>--<name>/{refs/<revision>, snapshots/<commit>/}``. A model that is not in the cache is
downloaded by that client into the cache; ``HF_HUB_OFFLINE=1`` forbids it.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from maitred.core.errors import ConfigInvalid

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


Download = Callable[[str, str, Path], Path]
"""Function from a hub id, a revision and a cache folder to the folder of the snapshot."""

_FILES = ("*.json", "*.safetensors", "*.jinja")
"""Patterns of the files that maitred reads; weights in other formats are not downloaded."""


def download_snapshot(name: str, revision: str, cache: Path) -> Path:
    """Downloads a model with the hub's own client."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=list(_FILES)))


def find_model(
    source: str | Path,
    *,
    revision: str = "main",
    env: Mapping[str, str] | None = None,
    download: Download = download_snapshot,
) -> Path:
    """Resolves a configured folder or hub id to a folder with a checkpoint.

    Args:
        source: Folder, or hub id such as ``Qwen/Qwen2.5-0.5B-Instruct``.
        revision: Branch, tag or commit of a hub id.
        env: The process environment, unless given.
        download: Downloads a model that is not in the cache.

    Raises:
        ConfigInvalid: There is no such model; the text says how to name a folder instead.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigInvalid(
                f"{folder} holds no config.json, so it is no model folder. Name the folder that has config.json, "
                "tokenizer.json and *.safetensors."
            )
        return folder
    name = str(source)
    if folder.is_absolute() or name.startswith((".", "~")) or not _HUB_ID.fullmatch(name):
        raise ConfigInvalid(f"The model folder {source} does not exist. Check the path.")
    cache = _hub_cache(os.environ if env is None else env)
    snapshot = _snapshot(cache / f"models--{name.replace('/', '--')}", revision)
    return snapshot or _fetch(name, revision, cache, download)


def _fetch(name: str, revision: str, cache: Path, download: Download) -> Path:
    try:
        folder = download(name, revision, cache)
    except Exception as error:  # the client has a dozen kinds, and its HTTP library more: none gives us the model
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigInvalid(
            f"There is no folder {name}, no model of that id in the hub's cache at {cache}, and the hub did not give "
            f"it: {reason} Check the id and the connection, or name a folder (`maitred serve /path/to/folder`)."
        ) from error
    if not (folder / "config.json").is_file():
        raise ConfigInvalid(f"The hub's {name} has no config.json, so it is no model that maitred can serve.")
    return folder


def _hub_cache(env: Mapping[str, str]) -> Path:
    """Returns the cache folder that the hub's own client would use."""
    if cache := env.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := env.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def _snapshot(repository: Path, revision: str) -> Path | None:
    """Returns the folder of one revision, if it contains a configuration."""
    try:
        commit = (repository / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    folder = repository / "snapshots" / commit
    return folder if (folder / "config.json").is_file() else None

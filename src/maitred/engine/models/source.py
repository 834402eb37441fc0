"""Where a model's files are: a folder that the operator names, or a snapshot of a model on Hugging Face's hub.

A hub id is looked up in the local cache of the hub's client first, whose layout is
``<cache>/models--<owner>--<name>/{refs/<revision>, snapshots/<commit>/}``. Only what is not there is fetched, by that
client, into that cache; ``HF_HUB_OFFLINE=1`` forbids it.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from maitred.core.errors import ConfigInvalid

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


Download = Callable[[str, str, Path], Path]
"""From a hub id, a revision and a cache folder to the folder of the snapshot."""

_FILES = ("*.json", "*.safetensors", "*.jinja")
"""What maitred reads of a repository; weights in other formats stay where they are."""


def download_snapshot(name: str, revision: str, cache: Path) -> Path:
    """Fetches a model with the hub's own client."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=list(_FILES)))


def find_model(
    source: str | Path,
    *,
    revision: str = "main",
    env: Mapping[str, str] | None = None,
    download: Download = download_snapshot,
) -> Path:
    """Resolves what the operator wrote to a folder with a checkpoint.

    Args:
        source: A folder, or a hub id such as ``Qwen/Qwen2.5-0.5B-Instruct``.
        revision: Branch, tag or commit of a hub id.
        env: The process environment, unless given.
        download: Fetches what is not in the cache.

    Raises:
        ConfigInvalid: Nothing is there; the text says how to name a folder instead.
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
    return snapshot or _fetched(name, revision, cache, download)


def _fetched(name: str, revision: str, cache: Path, download: Download) -> Path:
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
    """The folder that the hub's own client would use."""
    if cache := env.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := env.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def _snapshot(repository: Path, revision: str) -> Path | None:
    """The folder of one revision, if it is complete enough to have a configuration."""
    try:
        commit = (repository / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    folder = repository / "snapshots" / commit
    return folder if (folder / "config.json").is_file() else None

"""Where a model's files are: a folder that the operator names, or a snapshot that the hub's client left on this disk.

maitred downloads nothing. A hub id is looked up in the local cache of Hugging Face, whose layout is
``<cache>/models--<owner>--<name>/{refs/<revision>, snapshots/<commit>/}``.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from maitred.core.errors import ConfigInvalid

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_model(source: str | Path, *, revision: str = "main", env: Mapping[str, str] | None = None) -> Path:
    """Resolves what the operator wrote to a folder with a checkpoint.

    Args:
        source: A folder, or a hub id such as ``Qwen/Qwen2.5-0.5B-Instruct``.
        revision: Branch, tag or commit of a hub id.
        env: The process environment, unless given.

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
    if snapshot is None:
        raise ConfigInvalid(
            f"There is no folder {name}, and no model of that id in the hub's cache at {cache}. maitred does not "
            f"download: fetch the model first (`hf download {name}`), or name a folder "
            "(`maitred serve /path/to/folder`)."
        )
    return snapshot


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

"""Model folder for a GGUF file: the small files of a checkpoint, made from the metadata, beside a link to the file.

All that reads a model reads a folder with ``config.json``, ``tokenizer.json`` and weights. So a GGUF file is given such
a folder in the cache, once; the weights stay where they are. The folder's name is the file's, and its place depends on
path, size and time of the file, so another file of the same name has another folder.
"""

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maitred import __version__
from maitred.core.errors import ConfigInvalid
from maitred.engine.gguf.config import FREQUENCY_FACTORS, config_fields
from maitred.engine.gguf.file import GGUFHeader, TensorEntry, gguf_models, gguf_parts, model_name, read_headers
from maitred.engine.gguf.tokenizer import GGUFVocabulary

_FORMAT = 1
"""Version of the made files; raise it when the same metadata gives other files."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Name of a recommended sampling setting in the metadata -> its name in ``generation_config.json``."""


def is_gguf_folder(folder: Path) -> bool:
    """Returns whether a folder has a model in GGUF files alone, without the small files of a checkpoint."""
    return (
        any(folder.glob("*.gguf"))
        and not any(folder.glob("*.safetensors"))
        and not ((folder / "config.json").is_file() and (folder / "tokenizer.json").is_file())
    )


def only_gguf(folder: Path) -> Path:
    """Returns the GGUF file of a folder.

    Raises:
        ConfigInvalid: It has several.
    """
    found = gguf_models(folder) or sorted(folder.glob("*.gguf"))[:1]
    if len(found) > 1:
        raise ConfigInvalid(
            f"{folder} holds several models: {', '.join(path.name for path in found)}. Name the file of one, such as "
            f"`maitred serve {found[0]}`."
        )
    return found[0]


def make_gguf_folder(path: Path, env: Mapping[str, str] | None = None) -> Path:
    """Returns the model folder for a GGUF file; makes it if it is not in the cache.

    Args:
        path: The file, or any part of a split one.
        env: The process environment, unless given.

    Raises:
        ConfigInvalid: The file is broken or incomplete, maitred does not run its model, or the cache cannot be written.
    """
    parts = gguf_parts(path.expanduser().absolute())
    folder = _cache(os.environ if env is None else env) / _key(parts) / model_name(parts[0])
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
            made = Path(scratch) / folder.name
            made.mkdir()
            _fill(made, parts)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was faster, and has written the same
                    raise
    except OSError as fault:
        raise ConfigInvalid(
            f"The tokenizer of {path} cannot be kept in {folder}: {fault.strerror or fault}. Set XDG_CACHE_HOME to a "
            "folder that can be written."
        ) from fault
    return folder


def _fill(folder: Path, parts: list[Path]) -> None:
    tensors: dict[str, TensorEntry] = {}
    metadata: Mapping[str, Any] = {}
    factors: tuple[float, ...] = ()
    for part, header in read_headers(parts[0]):
        metadata = metadata or header.metadata
        tensors |= header.tensors
        factors = factors or _frequency_factors(part, header)
        (folder / part.name).symlink_to(part)
    config = config_fields(metadata, tensors, factors, parts[0])
    vocabulary = GGUFVocabulary(metadata, parts[0])
    recommended = {
        theirs: metadata[f"general.sampling.{ours}"]
        for ours, theirs in _SAMPLING.items()
        if f"general.sampling.{ours}" in metadata
    }
    _write(folder / "config.json", {**config, "eos_token_id": vocabulary.ends})
    _write(folder / "tokenizer.json", vocabulary.tokenizer())
    _write(folder / "tokenizer_config.json", vocabulary.settings())
    if recommended:
        _write(folder / "generation_config.json", recommended)


def _frequency_factors(path: Path, header: GGUFHeader) -> tuple[float, ...]:
    entry = header.tensors.get(FREQUENCY_FACTORS)
    if entry is None or entry.format.name != "F32":
        return ()
    with path.open("rb") as file:
        file.seek(entry.offset)
        return struct.unpack(f"<{entry.bytes // 4}f", file.read(entry.bytes))


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    text = json.dumps(fields, ensure_ascii=False, indent=1)
    path.write_text(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), encoding="utf-8")


def _cache(env: Mapping[str, str]) -> Path:
    """Returns the folder for these folders, by the XDG base directories."""
    cache = env.get("XDG_CACHE_HOME", "")
    home = Path(cache) if Path(cache).is_absolute() else Path(env.get("HOME") or "~").expanduser() / ".cache"
    return home / "maitred" / "gguf"


def _key(parts: list[Path]) -> str:
    stamps = [(str(part), status.st_size, status.st_mtime_ns) for part in parts if (status := part.stat())]
    return hashlib.sha256(json.dumps([_FORMAT, __version__, stamps]).encode()).hexdigest()[:16]

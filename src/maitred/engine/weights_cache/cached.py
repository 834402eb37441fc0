"""Loading of weights through the cache: mapped if present, else converted and stored."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import torch

from maitred.engine.lean_torch import complete_torch
from maitred.engine.weights_cache.config import WeightsCacheConfig
from maitred.engine.weights_cache.key import cache_key
from maitred.engine.weights_cache.parts import WeightParts, put_together
from maitred.engine.weights_cache.store import WeightsCacheStore
from maitred.engine.weights_cache.tensor_file import BrokenFile, map_tensors, write_tensors

logger = logging.getLogger("maitred.engine")

W = TypeVar("W")


def cache_folder(config: WeightsCacheConfig, env: Mapping[str, str] | None = None) -> Path:
    """Returns the folder of the cache, by the settings or by the XDG base directories."""
    if config.folder:
        return Path(config.folder).expanduser()
    cache = (os.environ if env is None else env).get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is ignored.
    return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "maitred" / "weights"


def load_cached(
    make: Callable[[], W],
    structs: Iterable[type],
    config: WeightsCacheConfig,
    folder: Path,
    device: torch.device,
    **form: object,
) -> W:
    """Loads weights: mapped from the cache if possible, else made and stored.

    Args:
        make: Reads the checkpoint.
        structs: Dataclasses that the weights consist of.
        config: Settings of the cache.
        folder: Folder of the checkpoint.
        device: Device of the weights. Only a CPU's are cached: other devices compute from their own memory.
        form: Further values that determine the weights; see `cache_key`.

    Raises:
        ConfigInvalid: `make` cannot read the checkpoint.
    """

    def make_weights() -> W:
        complete_torch()
        return make()

    if not config.enabled or device.type != "cpu":
        return make_weights()
    shelf = WeightsCacheStore(cache_folder(config), config.most_bytes)
    return CachedWeights(shelf, cache_key(folder, form), {struct.__name__: struct for struct in structs}).get(
        make_weights
    )


@dataclass(frozen=True)
class CachedWeights:
    """Cached weights of one model in one form.

    Attributes:
        shelf: Store of the files.
        key: Key of the weights; it depends on everything that determines them.
        structs: Dataclasses that the weights consist of, by name.
    """

    shelf: WeightsCacheStore
    key: str
    structs: Mapping[str, type]

    def get(self, make: Callable[[], W]) -> W:
        """Returns the weights, mapped from the cache; makes and stores them first if necessary.

        If the weights cannot be stored, the result of `make` is returned: a failing cache costs only time.
        """
        try:
            return cast(W, self._map_weights())
        except FileNotFoundError:
            pass
        except BrokenFile as fault:
            logger.warning("%s is not used, and written anew: %s.", self.shelf.path(self.key), fault)
        make_weights: W | None = None
        try:
            with self.shelf.writing(self.key) as file:
                if file is not None:
                    began_s = time.perf_counter()
                    make_weights = make()
                    made_s = time.perf_counter()
                    self._write(file, WeightParts.of(make_weights))
            if file is not None:
                logger.info(
                    "The weights were converted in %.1f s, and kept in %s in %.1f s.",
                    *(made_s - began_s, self.shelf.path(self.key), time.perf_counter() - made_s),
                )
                self.shelf.tidy(self.key)
            return cast(W, self._map_weights())
        except (OSError, BrokenFile) as fault:
            logger.warning("The weights cannot be kept in %s: %s", self.shelf.folder, fault)
        return make() if make_weights is None else make_weights

    def _map_weights(self) -> object:
        tensors, plan = map_tensors(self.shelf.path(self.key))
        try:
            weights: object = put_together(plan, tensors, self.structs)
        except (LookupError, TypeError, ValueError) as fault:
            raise BrokenFile(f"it was written by another version ({fault!r})") from fault
        self.shelf.touch(self.key)
        return weights

    def _write(self, file: BinaryIO, parts: WeightParts) -> None:
        needed = sum(placed.tensor.nbytes for placed in parts.tensors.values())  # upper bound: zeros take no disk
        if needed > self.shelf.most_bytes:
            raise OSError(f"{needed} bytes are more than engine.weights_cache.most_bytes, {self.shelf.most_bytes}")
        write_tensors(file, parts.tensors, parts.plan)

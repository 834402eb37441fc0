"""KV blocks in the host's memory, to which blocks of preempted sequences are swapped out."""

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch

from maitred.engine.kv.swap import BlockCopy
from maitred.engine.models.kv_cache import KVCache

_TRIED_BLOCKS = 8

logger = logging.getLogger("maitred.engine")


class HostBlocks:
    """Slots in host memory, each for one KV block of all layers.

    On a GPU the memory is pinned, so the device copies asynchronously, in the order of its stream. A step's kernels
    wait for the copies before them, and the host waits for none.

    Args:
        cache: Cache whose blocks are copied, or another one of the same shape.
        slots: Number of slots.
    """

    def __init__(self, cache: KVCache, slots: int) -> None:
        self._parts = [torch.zeros((slots, part.shape[0], *part.shape[2:]), dtype=part.dtype) for part in cache.parts]
        if cache.keys.device.type == "cuda":
            for kept in self._parts:
                _pin(kept)
        self._window = None if cache.window is None else HostBlocks(cache.window, slots)

    def move(self, cache: KVCache, moves: Iterable[BlockCopy], window_moves: Iterable[BlockCopy] = ()) -> None:
        """Copies blocks out and back, in the given order; `window_moves` are those of layers with a window."""
        if self._window is not None and cache.window is not None:
            self._window.move(cache.window, window_moves)
        for block, slot, out in moves:
            for part, kept in zip(cache.parts, self._parts, strict=True):
                if out:
                    kept[slot].copy_(part[:, block], non_blocking=True)
                else:
                    part[:, block].copy_(kept[slot], non_blocking=True)

    def seconds_per_block(self, cache: KVCache, block: int) -> float:
        """Measures the time to copy a block in one direction, with a given block, whose content is preserved."""
        device = cache.keys.device
        slots = min(_TRIED_BLOCKS, len(self._parts[0]))
        moves = [BlockCopy(block, slot, out) for slot in range(slots) for out in (True, False)]
        for _ in range(2):  # the first time, memory is touched that was never used
            _wait(device)
            start_s = time.perf_counter()
            self.move(cache, moves)
            _wait(device)
            seconds = time.perf_counter() - start_s
        if self._window is not None and cache.window is not None:
            seconds += self._window.seconds_per_block(cache.window, block) * len(moves)
        return seconds / len(moves)


def _pin(tensor: torch.Tensor) -> None:
    """Pins the memory of a tensor.

    Torch's own pinned memory is allocated in powers of two, which could double a budget.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    fault = runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(fault):
        logger.warning(
            "%d MiB of host memory for swapped KV blocks cannot be pinned, so copies are slower. Raise the limit of "
            "locked memory (ulimit -l) or lower engine.swap_bytes.",
            tensor.nbytes >> 20,
        )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

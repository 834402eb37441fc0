"""A computation that is recorded once and replayed on the same memory."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

_WARM_UPS = 2
"""Runs before the recording, in which libraries choose kernels and take their workspaces."""


class DeviceGraph(Protocol):
    """Records what is launched on a device, addresses and all; what it reads and writes stays where it is."""

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        """Records a computation.

        Args:
            compute: Launches the same work whenever it is called, and never waits for the device.

        Returns:
            Where every replay leaves the result.
        """
        ...

    def replay(self) -> None:
        """Computes once more, with what the tensors hold that `compute` read."""
        ...


class CudaGraph:
    """A CUDA graph. All of an engine share one pool of memory, so the largest should be captured first.

    Args:
        pool: Of `torch.cuda.graph_pool_handle`.
    """

    def __init__(self, pool: Any) -> None:  # noqa: ANN401 - torch names the type to itself alone
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        """See `DeviceGraph`."""
        # Recorded must be what runs later, not the choices of a first run: these are made on another stream before.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph, pool=self._pool, stream=stream):
            return compute()

    def replay(self) -> None:
        """See `DeviceGraph`."""
        self._graph.replay()

"""Device graph: a computation that is recorded once and replayed on the same memory."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

_WARM_UPS = 2
"""Runs before the recording, in which libraries choose kernels and allocate their workspaces."""


class DeviceGraph(Protocol):
    """Recording of the kernels launched on a device; their inputs and outputs keep their addresses.

    A Protocol, because tests record without a GPU.
    """

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        """Records a computation on the device.

        Args:
            compute: Launches the same work whenever it is called, and never waits for the device.

        Returns:
            The tensor that every replay writes the result to.
        """
        ...

    def replay(self) -> None:
        """Repeats the computation, with the current content of the tensors that `compute` read."""
        ...


class CudaGraph:
    """CUDA graph; implements `DeviceGraph`.

    All graphs of an engine share one memory pool, so the largest should be captured first.

    Args:
        pool: Result of `torch.cuda.graph_pool_handle`.
    """

    def __init__(self, pool: Any) -> None:  # noqa: ANN401 - torch names the type to itself alone
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        """Records a computation after warm-up runs on another stream."""
        # The recording must not contain the choices of a first run, so warm-up runs on another stream make them before.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph, pool=self._pool, stream=stream):
            return compute()

    def replay(self) -> None:
        """Replays the recorded computation once more."""
        self._graph.replay()

"""Tracing of requests, if it is configured, and a response stream with a listener."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from maitred.core.clock import Clock
from maitred.core.context import DeltaListener
from maitred.core.errors import ConfigInvalid
from maitred.core.inference import TextDelta
from maitred.core.service import ResponseStream
from maitred.observe.config import TracesConfig
from maitred.observe.traces import TraceObserver


@asynccontextmanager
async def open_traces(config: TracesConfig, clock: Clock) -> AsyncIterator[TraceObserver | None]:
    """Opens the trace observer until the context ends; None: tracing is off.

    Raises:
        ConfigInvalid: The package that sends the traces is not installed.
    """
    if config.endpoint is None:
        yield None
        return
    try:
        from maitred.observe.otlp import Exporter
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("opentelemetry"):
            raise
        raise ConfigInvalid(
            f"traces.endpoint needs {error.name}, which is not installed. Run: pip install 'maitred[otel]'"
        ) from error
    exporter = Exporter(config)
    try:
        yield TraceObserver(config, exporter, clock)
    finally:
        await asyncio.to_thread(exporter.close)


class TappedStream:
    """A response stream whose every delta a listener sees before its caller.

    Implements `maitred.core.service.ResponseStream`.

    Args:
        answer: The answer.
        listener: Listener that gets every delta.
    """

    def __init__(self, answer: ResponseStream, listener: DeltaListener) -> None:
        self._batches = aiter(answer)
        self._listener = listener

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TextDelta]:
        parts = await anext(self._batches)
        self._listener.on_delta(parts)
        return parts

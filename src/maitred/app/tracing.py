"""Traces, where they are switched on; and who overhears answers for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from maitred.core.answer import Answer, Listener, Part
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.observe.config import TracesConfig
from maitred.observe.traces import Traces


@asynccontextmanager
async def open_traces(config: TracesConfig, clock: Clock) -> AsyncIterator[Traces | None]:
    """Traces, until the context is left; None where nothing is traced.

    Raises:
        ConfigInvalid: What sends them is not installed.
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
        yield Traces(config, exporter, clock)
    finally:
        await asyncio.to_thread(exporter.close)


class Overheard:
    """An answer of which a listener hears every part before its caller does. Implements `maitred.core.answer.Answer`.

    Args:
        answer: The answer.
        listener: Hears it.
    """

    def __init__(self, answer: Answer, listener: Listener) -> None:
        self._batches = aiter(answer)
        self._listener = listener

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Part]:
        parts = await anext(self._batches)
        self._listener.heard(parts)
        return parts

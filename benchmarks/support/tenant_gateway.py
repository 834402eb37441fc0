"""`maitred serve` with tenants and their keys, and with one or the other way to put a queue in order."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.support.installation import MODEL, Organisation, declared
from maitred.testing.server_process import ServerProcess, serving

SLOTS = 32
"""Sequences at once on the bundled model. A batch of 128 makes a few percent more tokens a second with steps four times
as long, so an operator whom the first token matters to would not take it either."""
KV_BYTES = 512 << 20

BUSY = ("maitred_in_flight", "maitred_engine_running", "maitred_engine_waiting")
"""What is 0 when all is quiet."""

Settings = Mapping[str, Any]


@contextmanager
def served(
    organisations: Mapping[str, Organisation], settings: Settings | None = None, *, model: Path | None = None
) -> Iterator[ServerProcess]:
    """Starts a server for these tenants on a free port; nothing is left of it afterwards.

    Args:
        organisations: Id -> organisation.
        settings: Further sections of the configuration; see `merged`.
        model: Its folder; None: the bundled model.
    """
    environment: dict[str, str] = {}
    config = merged(
        {
            "log": {"level": "warning"},
            "model": {"served_name": MODEL, "path": str(model or "")},
            "engine": {"max_sequences": SLOTS, "kv_memory_bytes": KV_BYTES},
            "tenants": declared(organisations, environment),
        },
        settings or {},
    )
    with TemporaryDirectory(prefix="maitred-") as folder:
        path = Path(folder) / "maitred.yaml"
        path.write_text(json.dumps(config))
        with serving("--config", str(path), environment=environment) as server:
            yield server


def ordered_by(policy: str, **line: object) -> Settings:
    """The queue of the gateway and that of the engine both take turns by this policy.

    Args:
        policy: Such as ``fair`` or ``fifo``.
        **line: Further settings of both queues.
    """
    return {"dispatch": {"line": {"policy": policy, **line}}, "engine": {"line": {"policy": policy, **line}}}


def unbounded() -> Settings:
    """Nobody is turned away because the queue is long."""
    return {
        "dispatch": {"max_waiting": {}, "max_wait_s": {}},  # what is not named has no limit
        "server": {"max_in_flight": 1_000_000},
    }


def merged(*parts: Settings) -> dict[str, Any]:
    """All these settings together; what comes later rules."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            both = isinstance(value, Mapping) and isinstance(whole.get(name), Mapping)
            whole[name] = merged(whole[name], value) if both else value
    return whole


async def settled(server: ServerProcess, *, within_s: float = 30.0) -> dict[str, float]:
    """Waits until nothing runs and nothing waits; the server's metrics then, or when time is up."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                samples = await asyncio.to_thread(server.metrics)
                if not any(samples.get(name, 0) for name in BUSY):
                    return samples
                await asyncio.sleep(0.1)
    except TimeoutError:
        return await asyncio.to_thread(server.metrics)

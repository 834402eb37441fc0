"""Reads a server's load from its metrics, in Prometheus' text format."""

from collections.abc import Mapping
from dataclasses import dataclass

from maitred.replica.upstream.dialects import LoadGauges


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server said last of its own load; None where it does not say."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """Of its KV cache, from 0 to 1."""


def load_in(text: str, gauges: LoadGauges) -> ServerLoad:
    """The load in a page of metrics.

    A gauge can occur several times, once for each engine in the server: requests add up, and of caches the fullest
    counts.
    """
    wanted = {gauges.running, gauges.waiting, *gauges.kv_usage}
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in wanted:
            continue
        try:
            # Behind the value there may be a time.
            value = float(line[len(name) :].rpartition("}")[2].split()[0])
        except (ValueError, IndexError):
            continue
        if 0 <= value < float("inf"):
            found.setdefault(name, []).append(value)
    return ServerLoad(
        _sum(found, gauges.running),
        _sum(found, gauges.waiting),
        next((max(found[name]) for name in gauges.kv_usage if name in found), None),
    )


def _sum(found: Mapping[str, list[float]], name: str) -> float | None:
    return sum(found[name]) if name in found else None

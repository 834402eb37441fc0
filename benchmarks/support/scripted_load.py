"""Plays a load against a scripted server, and puts what the tester noted beside what the server did.

Each has a process and a core of its own.
"""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from maitred.load.measure.record import RequestRecord, RunData
from maitred.load.measure.result import LoadResult
from maitred.load.spec import LoadSpec
from maitred.testing.scripted_openai import RequestTruth, ServedRecord, ServerScript, scripted_openai

SERVER_CORE, TESTER_CORE = 0, 1
RANKS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

Floats = NDArray[np.float64]


@dataclass
class Played:
    """A run, and the truth about it.

    Attributes:
        result: What the tester reports.
        data: What it noted.
        truth: What the server did.
    """

    result: LoadResult
    data: RunData
    truth: ServedRecord

    @cached_property
    def pairs(self) -> list[tuple[RequestRecord, RequestTruth]]:
        """Every streamed request of the server's log with the tester's record of it.

        Both are put in order of their first bytes; at a time resolution at which two change places, their times are
        the same.
        """
        records = sorted((r for r in self.data.records if r.sent_s == r.sent_s), key=lambda r: r.sent_s)
        requests = [request for request in self.truth.requests if request.stream]
        return list(zip(records, requests, strict=True))

    @property
    def zero_s(self) -> float:
        """The start of the run by the server's clock."""
        return self.data.started_unix_s - self.truth.unix_minus_monotonic_s

    def true_times(self, *, scheduled: bool = False) -> dict[str, Floats]:
        """TTFT, ITL, TPOT and E2E of every request in seconds, from when it was due to what the server sent.

        Args:
            scheduled: What the script wanted, in place of what the server did.
        """
        ttft, itl, tpot, e2e = [], [], [], []
        for record, request in self.pairs:
            at_s = np.asarray(request.due_s() if scheduled else request.sent_s()) - self.zero_s
            if not len(at_s):
                continue
            ttft.append(at_s[0] - record.intended_s)
            e2e.append(at_s[-1] - record.intended_s)
            itl.append(np.diff(at_s))
            if request.answer_tokens > 1:
                tpot.append((at_s[-1] - at_s[0]) / (request.answer_tokens - 1))
        return {
            "ttft": np.asarray(ttft),
            "itl": np.concatenate(itl),
            "tpot": np.asarray(tpot),
            "e2e": np.asarray(e2e),
        }

    def reading_delays(self) -> Floats:
        """From when the server sent an event to when the tester noted it, in seconds, of all events."""
        return np.concatenate(
            [
                np.asarray(record.arrivals_s) + self.zero_s - np.asarray(request.sent_s())
                for record, request in self.pairs
                if len(record.arrivals_s) == len(request.sent_s())
            ]
        )

    @property
    def lost_events(self) -> int:
        """Events that the server sent and the tester did not note, or the other way round."""
        return sum(abs(len(request.sent_s()) - len(record.arrivals_s)) for record, request in self.pairs)

    def events_per_s(self, from_s: float, until_s: float) -> float:
        """Events that the tester noted in a part of the run, per second."""
        count = sum(
            int(np.searchsorted(times, until_s) - np.searchsorted(times, from_s))
            for times in (np.asarray(record.arrivals_s) for record in self.data.records)
        )
        return count / (until_s - from_s)

    def tester(self) -> dict[str, float | int | str]:
        """What the tester itself cost."""
        cost = msgspec.to_builtins(self.result.tester)
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in cost.items()}

    def server(self) -> dict[str, float | int]:
        """What the server itself cost, and how late it was."""
        lateness = self.truth.lateness
        return {
            "cpu_seconds": round(self.truth.cpu_seconds, 3),
            "events": lateness.count,
            "late_p50_s": round(lateness.p50_s, 6),
            "late_p99_s": round(lateness.p99_s, 6),
            "late_max_s": round(lateness.max_s, 6),
        }


def play(
    script: ServerScript, spec: LoadSpec, *, tester_cores: Sequence[int] = (TESTER_CORE,), unix: bool = False
) -> Played:
    """Starts a server, plays the load, stops the server.

    Args:
        script: Of the server.
        spec: Of the load; its URL is filled in.
        tester_cores: Where the tester may run.
        unix: Whether they speak over a Unix socket, which costs both a fraction of what TCP does.
    """
    with scripted_openai(script, core=SERVER_CORE, unix=unix) as server:
        target = msgspec.structs.replace(spec.target, url=server.url, unix_socket=server.unix_socket)
        result, data = _in_own_process(msgspec.structs.replace(spec, target=target), tester_cores)
        return Played(result, data, server.stop())


def quantiles(values: Floats) -> dict[str, float]:
    """p50, p90, p95 and p99, interpolated linearly as in a result."""
    return {name: float(value) for name, value in zip(RANKS, np.quantile(values, list(RANKS.values())), strict=True)}


def _in_own_process(spec: LoadSpec, cores: Sequence[int]) -> tuple[LoadResult, RunData]:
    command = [sys.executable, "-m", __name__, json.dumps([*cores])]
    done = subprocess.run(command, input=msgspec.json.encode(spec), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise RuntimeError("The tester's process failed; its error is above.")
    content, data = pickle.loads(done.stdout)
    return msgspec.json.decode(content, type=LoadResult), data


def _play(cores: Sequence[int], content: bytes) -> bytes:
    """What the tester's process does: it plays the load, and says what came of it."""
    import uvloop

    from maitred.load.play.driver import run

    os.sched_setaffinity(0, set(cores) & os.sched_getaffinity(0) or os.sched_getaffinity(0))
    spec = msgspec.json.decode(content, type=LoadSpec)
    data: RunData = uvloop.run(run(spec))
    result = LoadResult.of(spec, data, command="benchmarks.load.tester", workload="scripted")
    return pickle.dumps((msgspec.json.encode(result), data))


if __name__ == "__main__":
    sys.stdout.buffer.write(_play(json.loads(sys.argv[1]), sys.stdin.buffer.read()))

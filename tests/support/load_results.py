"""Load results as a run would leave them, without a run: for the tests of whatever reads results."""

import math
import random
from array import array
from collections.abc import Sequence

from maitred.load.measure.record import LoadTesterSample, RequestRecord, RunData, UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.spec import ArrivalsSpec, LoadSpec, LoadTarget, LoadTenant, ObjectivesSpec, StopCondition


def synthetic_result(
    seed: int = 0,
    *,
    requests: int = 400,
    ttft_s: float = 0.4,
    itl_s: float = 0.03,
    tenants: Sequence[str] = ("default",),
    rate_per_s: float = 8.0,
    output_tokens: int = 80,
    failures: bool = False,
    stream: bool = True,
    objectives: ObjectivesSpec | None = None,
    warmup_s: float = 0.0,
) -> LoadResult:
    """A run with the shapes of a real one: Poisson arrivals, log-normal times, a slower spell in its middle.

    Args:
        seed: Of everything.
        requests: How many.
        ttft_s: Median of the time to first token, away from the slow spell.
        itl_s: Median of the time between tokens.
        tenants: Who asks, in turn; each after the first is served a little later than the one before.
        rate_per_s: Arrivals.
        output_tokens: Mean length of the answers.
        failures: Whether some requests end otherwise than complete.
        stream: Whether answers come in pieces.
        objectives: Default: TTFT of twice, time per token of 1.5 times the median.
        warmup_s: Not counted.
    """
    spec = LoadSpec(
        target=LoadTarget(url="http://127.0.0.1:8000", model="example-8b", stream=stream),
        arrivals=ArrivalsSpec(rate_per_s=rate_per_s),
        tenants={} if len(tenants) == 1 else {name: LoadTenant() for name in tenants},
        bounds=StopCondition(requests=requests or None, warmup_s=warmup_s),
        objectives=objectives or ObjectivesSpec(ttft_s=2 * ttft_s, tpot_s=1.5 * itl_s),
        seed=seed,
    )
    data = synthetic_data(
        seed,
        requests=requests,
        ttft_s=ttft_s,
        itl_s=itl_s,
        tenants=tenants,
        rate_per_s=rate_per_s,
        output_tokens=output_tokens,
        failures=failures,
        stream=stream,
    )
    return LoadResult.of(spec, data, command=f"maitred load run --rate {rate_per_s:g}", workload="chat, 200 in, 80 out")


def synthetic_data(
    seed: int,
    *,
    requests: int,
    ttft_s: float,
    itl_s: float,
    tenants: Sequence[str],
    rate_per_s: float,
    output_tokens: int,
    failures: bool,
    stream: bool,
) -> RunData:
    """What such a run would have measured; see `synthetic_result`."""
    rng = random.Random(seed)
    records: list[RequestRecord] = []
    at_s = 0.0
    for number in range(requests):
        at_s += rng.expovariate(rate_per_s)
        tenant = number % len(tenants)
        slow = 1 + 1.5 * math.exp(-(((number / requests - 0.55) / 0.08) ** 2))
        record = RequestRecord(
            session=number, turn=0, tenant=tenants[tenant], intended_s=at_s, asked_tokens=0, attempts=1
        )
        record.asked_tokens = max(1, int(rng.expovariate(1 / output_tokens)))
        record.prompt_tokens = int(rng.lognormvariate(5, 0.8)) + 8
        record.cached_tokens = record.prompt_tokens // 2 if number % 3 == 0 else 0
        record.late_s = rng.uniform(0.0001, 0.001)
        record.sent_s = at_s + record.late_s + rng.uniform(0.0001, 0.001)
        wait_s = ttft_s * slow * (1 + 0.25 * tenant) * rng.lognormvariate(0, 0.35)
        _answer(record, rng, wait_s + record.prompt_tokens * ttft_s / 2000, itl_s * math.sqrt(slow), stream=stream)
        if failures:
            _spoil(record, rng)
        records.append(record)
    seconds = max((record.ended_s for record in records), default=0.0)
    lag_s = array("d", (rng.expovariate(1 / 2e-4) for _ in range(int(seconds * 20))))
    samples = [
        LoadTesterSample(
            at_s=float(second),
            cpu_share=rng.uniform(0.12, 0.2),
            starved_share=rng.uniform(0, 0.02),
            lag_s=rng.expovariate(1 / 8e-4),
            open_streams=sum(record.intended_s <= second < record.ended_s for record in records),
            memory_bytes=60_000_000,
        )
        for second in range(1, int(seconds) + 1)
    ]
    return RunData(
        records=records,
        samples=samples,
        seconds=seconds,
        started_unix_s=1_780_000_000.0,
        lag_s=lag_s,
        server="example/1.0",
        model="example-8b",
        cpu_seconds=0.16 * seconds,
        peak_memory_bytes=61_000_000,
    )


def _answer(record: RequestRecord, rng: random.Random, wait_s: float, itl_s: float, *, stream: bool) -> None:
    now_s = record.intended_s + wait_s
    arrivals_s = array("d", [now_s])
    for _ in range(record.asked_tokens - 1):
        now_s += itl_s * rng.lognormvariate(0, 0.15) * (5 if rng.random() < 0.01 else 1)
        arrivals_s.append(now_s)
    record.headers_s = record.sent_s + 0.001 if stream else now_s
    record.ended_s = now_s + 0.0005
    record.output_tokens = record.asked_tokens
    record.status, record.finish_reason, record.outcome = 200, "length", UserOutcome.COMPLETE
    if stream:
        record.arrivals_s = arrivals_s


def _spoil(record: RequestRecord, rng: random.Random) -> None:
    """Ends one request in nine otherwise."""
    draw = rng.random()
    if draw < 0.03:
        record.outcome, record.status, record.error = UserOutcome.REFUSED, 429, "HTTP 429: All slots are taken."
        record.attempts, record.ended_s = 3, record.sent_s + 1.5
        record.arrivals_s, record.output_tokens, record.prompt_tokens = array("d"), 0, 0
    elif draw < 0.05:
        record.outcome, record.status, record.error = UserOutcome.FAILED, 502, "HTTP 502: <upstream> & gone"
        record.ended_s = record.sent_s + 0.2
        record.arrivals_s, record.output_tokens, record.prompt_tokens = array("d"), 0, 0
    elif draw < 0.11:
        kept = max(1, len(record.arrivals_s) // 2)
        record.arrivals_s, record.output_tokens, record.prompt_tokens = record.arrivals_s[:kept], 0, 0
        record.finish_reason = ""
        if draw < 0.08:
            record.outcome, record.error = UserOutcome.CUT, "The stream ended without [DONE]."
        elif draw < 0.1:
            record.outcome = UserOutcome.CANCELLED
        else:
            record.outcome, record.error = UserOutcome.UNFINISHED, "Still open when the run ended."

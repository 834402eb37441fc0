"""How true the time is that callers are told while no replica serves, and what a warm pool saves.

A gateway with the bundled model goes to zero replicas and back, round after round: a request comes at the moment of the
order, waits in the queue, and is told when its first token is to be expected. Then the same with one replica that
sleeps in place of none.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import httpx

from benchmarks.support.report import Report
from maitred.identity.keys import make_key
from maitred.testing.server_process import serving

SEED = 20261128
MODEL = "maitred-tiny"
ROUNDS, QUICK_ROUNDS = 20, 3
LATE, LATE_S = 1.2, 0.1
"""A promise was kept if the first token came within this ratio of the promised time, or was no later than this."""
LIMIT_S = 600.0
KEY = make_key().plaintext
SETTINGS = {
    "engine.kv_memory_bytes": "32MiB",
    "engine.threads": "1",
    "tenants.operators.keys.admin.secret.env": "ADMIN",
    "tenants.operators.keys.admin.scopes": "[admin, inference, metrics]",
}


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds in place of {ROUNDS}")
    quick = parser.parse_args().quick
    report = Report("replica_pool", seed=SEED, quick=quick)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with (
        serving(settings=SETTINGS, environment={"ADMIN": KEY}) as server,
        httpx.Client(base_url=server.url, timeout=LIMIT_S, headers={"authorization": f"Bearer {KEY}"}) as client,
    ):
        for name, asleep in (("start", 0), ("wake", 1)):
            _reach(client, serving_=1 - asleep, asleep=asleep)
            report.figures[name] = figures = _measured([_round(client, asleep) for _ in range(rounds)])
            print(f"{name:6}", figures)
            report.require(
                f"{name}: first answers within {LATE} times the promise, or {LATE_S} s", figures["kept"], at_least=0.9
            )
    wake_s, start_s = (report.figures[name]["first_token_s"] for name in ("wake", "start"))
    report.require("a first token by waking, of one by starting", wake_s / start_s, at_most=0.25)
    return report.finish()


def _reach(client: httpx.Client, *, serving_: int, asleep: int) -> None:
    """Sets the desired numbers and waits until they are there."""
    body = {"model": MODEL, "serving": serving_, "asleep": asleep}
    client.post("/admin/v1/replicas/scale", json=body).raise_for_status()
    desired = ["asleep"] * asleep + ["serving"] * serving_
    while True:
        (pool,) = client.get("/admin/v1/replicas/pools").json()["data"]
        if sorted(replica["phase"] for replica in pool["replicas"]) == desired:
            return
        time.sleep(0.02)


def _round(client: httpx.Client, asleep: int) -> tuple[float, float]:
    """Goes to zero and back; returns the promised and the real seconds to the first token."""
    _reach(client, serving_=0, asleep=asleep)
    body = {"model": MODEL, "serving": 1, "asleep": 0}
    client.post("/admin/v1/replicas/scale", json=body).raise_for_status()
    began_s = time.perf_counter()
    question = {"model": MODEL, "prompt": "The rabbit said:", "max_tokens": 4, "stream": True}
    with client.stream("POST", "/v1/completions", json={**question, "cache": {"no-cache": True}}) as response:
        response.raise_for_status()
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        first_token_s = time.perf_counter() - began_s
        assert "data: [DONE]" in lines, "the answer was cut"
    return float(response.headers["x-maitred-predicted-ttft-ms"]) / 1000, first_token_s


def _measured(rounds: list[tuple[float, float]]) -> dict[str, Any]:
    kept = [first_token_s <= max(LATE * promised_s, promised_s + LATE_S) for promised_s, first_token_s in rounds]
    return {
        "kept": round(statistics.fmean(kept), 3),
        "promised_s": round(statistics.median(promised_s for promised_s, _ in rounds), 3),
        "first_token_s": round(statistics.median(first_token_s for _, first_token_s in rounds), 3),
        "longest_ratio": round(max(first_token_s / promised_s for promised_s, first_token_s in rounds), 2),
        "each_s": [round(first_token_s, 3) for _, first_token_s in rounds],
    }


if __name__ == "__main__":
    sys.exit(main())

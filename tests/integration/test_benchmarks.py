"""Every benchmark runs: each is started in its smallest form, which comes to its end or says what is missing here."""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from benchmarks import summary
from benchmarks.__main__ import main, runnable
from benchmarks.support.report import RESULTS
from benchmarks.support.requirements import NOT_RUN
from tests.support import smallest_benchmark
from tests.support.source import ROOT

AT_ONCE = 3
"""Most of what they take is waiting: for a server to start, for a second to pass."""
LIMIT_S = 1800.0
"""One that takes so long hangs, however busy the machine is."""
QUICK = ("--quick",)


@dataclass(frozen=True)
class SmallestForm:
    """Smallest form of a benchmark.

    Attributes:
        constants: What its constants are instead; see `tests.support.smallest_benchmark`.
        arguments: Of its command line.
    """

    constants: dict[str, object] = field(default_factory=dict)
    arguments: tuple[str, ...] = QUICK


@dataclass(frozen=True)
class FinishedRun:
    code: int
    output: str
    errors: str


FEW = {"prompt": (4, 8), "output": (2, 4)}
"""Tokens of a request."""
SMALLEST = {
    "ledger_kills": SmallestForm(
        {"QUICK_CALM": 2, "CALLERS": 2, "LIVES_S": (0.2, 0.3)}, (*QUICK, "--kills=1", "--scripted")
    ),
    "conversations": SmallestForm(
        {"QUICK_CONVERSATIONS": 4, "QUICK_TURNS": 3, "QUICK_KILLS": 1, "REAL_TURNS": 2, "REAL_TOKENS": 2}
    ),
    "overspend": SmallestForm({"CALLERS": 4}, (*QUICK, "--requests=40", "--kills=0")),
    "retries": SmallestForm({"QUICK_ANSWERS": (1, 2), "QUOTA_CALLS": 2}),
    "tenants": SmallestForm(arguments=(*QUICK, "--tenants=20")),
    "attack_soak": SmallestForm({"TENTHS": 2, "WARM": 0}, (*QUICK, "--minutes=0.03")),
    "attacks": SmallestForm({"QUICK": {"seconds": 0.2}, "RAMP_S": 0.1, "WARM_UP_S": 0.2}),
    "chaos": SmallestForm(arguments=(*QUICK, "--seconds=2")),
    "failover": SmallestForm({"ENGINES": 2, "TOKENS": 8}, (*QUICK, "--kills=1", "--streams=4")),
    "faults": SmallestForm({"QUICK_CASES": ("refused",)}),
    "responses_fuzz": SmallestForm({"QUICK_REQUESTS": 20}),
    "answer_cache": SmallestForm(
        {
            "QUICK_COST": {"rounds": 2, "requests": 4, "latencies": 4, "idle_s": 0.1},
            **{"STREAMS": 4, "WITHIN_S": 0.1, "STREAM_TOKENS": 200, "QUICK_RIVAL_ROUNDS": 1, "QUICK_RIVAL_REQUESTS": 4},
        },
        (*QUICK, "--requests=20", "--only", "answers", "in flight", "cost"),
    ),
    "cache_eviction": SmallestForm({"QUICK_LOOK_UPS": 500, "COST_SIZE": 100, "LOOK_UPS": 1000}),
    "cancellation": SmallestForm({"QUICK_ABORTS": (8, 1), "STAYS_S": 0.2}),
    "flood": SmallestForm(
        {"QUICK": {"slots": 1, **FEW, "capacity_s": 1, "seconds": 1, "warmup_s": 0.2, "backlog_s": 0}}
    ),
    "hedging": SmallestForm({"QUICK_SECONDS": 1.0, "WARM_S": 0.5}),
    "long_short": SmallestForm(
        {"QUICK": {"seconds": 1, "warmup_s": 0.2, "alone_tokens": 8}, "SHORT_TOKENS": 4, "LONG_TOKENS": 16, "SLOTS": 1}
    ),
    "overload": SmallestForm(
        {"QUICK": {"capacity_s": 1, "seconds": 1, "warmup_s": 0.2, "naive": (2.0,)}, "SLOTS": 1, "DRAIN_S": 1.0}
        | {"PROMPT": (4, 8), "OUTPUT": (16, 24)}
    ),
    "prediction": SmallestForm({"QUICK_LOADS": (0.8,), "QUICK_SECONDS": 2.0, "WARM_UP_S": 1.0, "COPIES": 1}),
    "queue_cost": SmallestForm(
        {"QUICK": {"waiting": 20, "joining_s": 1, "waiting_s": 1, "refusing_s": 1}}, (*QUICK, "--policies=fair")
    ),
    "scheduler_cost": SmallestForm({"SIZES": (100, 200)}),
    "starvation": SmallestForm({"QUICK_SECONDS": 2.0, "AGEING_S": 0.2, "USERS": 4, "SETTLE_IN_S": 0.2}),
    "vtc": SmallestForm({"ENDS_S": 60.0}),
    "first_run": SmallestForm(),
    "first_steps": SmallestForm(),
    "gpu": SmallestForm(),
    "host_work": SmallestForm(),
    "kernels": SmallestForm({"SHAPES": ("bundled",), "QUICK_BUDGET_S": 0.01}),
    "parity": SmallestForm({"FAMILIES": ("llama",), "PRECISIONS": ("fp32",), "REQUESTS": 2, "OUTPUT_TOKENS": 4}),
    "prefix": SmallestForm({"REQUESTS": 2}),
    "prompt_logprobs": SmallestForm({"SHAPES": ("a third",), "PROMPT_TOKENS": 64, "QUICK_ROUNDS": 1}),
    "quantisation": SmallestForm(
        {"WINDOW": 32, "QUICK_WINDOWS": 1, "ANSWERS": 2, "ANSWER_TOKENS": 2, "PROMPT_TOKENS": 8}
        | {"CONTEXT": 32, "QUICK_SECONDS": 0.1, "SHAPE": "bundled", "KV_TYPES": ("fp32", "int8")}
    ),
    "replica_pool": SmallestForm({"QUICK_ROUNDS": 1, "ALONE_S": 0.1, "CROWD_S": 1.0}),
    "sampling": SmallestForm({"QUICK_BUDGET_S": 0.01, "ROWS": (1,)}),
    "sleep": SmallestForm({"QUICK_ROUNDS": 1}),
    "soak": SmallestForm({"TENTHS": 2, "TURNS": 1}, (*QUICK, "--requests=20")),
    "speculation": SmallestForm(arguments=(*QUICK, "--only=copied, 1 at a time")),
    "startup": SmallestForm({"QUICK_WARM_STARTS": 1, "ADDITIONS": 1000}),
    "step_cost": SmallestForm({"RUNNING": 8, "WAITING": 20}),
    "structured": SmallestForm({"QUICK_REQUESTS": 1}, (*QUICK, "--data=/nowhere")),
    "throughput": SmallestForm({"QUICK_SIZE": (2, 1)}, (*QUICK, "--threads=1")),
    "cardinality": SmallestForm({"QUICK_TENANTS": 200, "EVERY_S": 0.01}),
    "disconnects": SmallestForm({"QUICK_DISCONNECTS": 4, "PATIENT_USERS": 2, "SETTLE_S": 0.5}),
    "engine_link": SmallestForm({"QUICK_ROUNDS": 4, "VICTIMS": 20}),
    "gateway_cost": SmallestForm({"QUICK_REJECTS": (100, 1)}, (*QUICK, "--rounds=2", "--requests=4")),
    "gateway_soak": SmallestForm({"TENTHS": 3}, (*QUICK, "--requests=30", "--rate=60")),
    "migration": SmallestForm({"QUICK_STEP": 200}),
    "gateways": SmallestForm(
        {"QUICK": {"turn_s": 0.05, "paced_streams": (2,), "paced_tokens": 2, "prompt_tokens": 500}}
    ),
    "http_server": SmallestForm({"QUICK_ROUNDS": (1, 32, 32)}),
    "per_token": SmallestForm(),
    "regions": SmallestForm(
        {"QUICK": {"calm_s": 1.0, "cut_s": 3.0, "pairs": 1}, "LONG_TOKENS": 100, "MOST_TRIES": 2, "SETTLE_S": 1.0}
    ),
    "reloads": SmallestForm({"QUICK_RELOADS": 1, "WARM_S": 0.2, "SETTLE_S": 0.2}),
    "restarts": SmallestForm({"QUICK_RESTARTS": 1, "LOOKS": 1, "SETTLE_S": 0.2, "EVERY_S": 0.2}),
    "stalled": SmallestForm(
        {"QUICK": {"seconds": 1, "warmup_s": 0.5, "stalled": 2, "grace_s": 2}, "STALLED": 2, "PATIENT_USERS": 2}
    ),
    "tracing": SmallestForm({"QUICK_ROUNDS": (1, 8), "LEAVE_S": 0.5}),
    "users": SmallestForm({"QUICK_USERS": 2}),
    "websockets": SmallestForm(
        {"QUICK_SOCKETS": 4, "QUICK_ROUNDS": 1, "QUICK_SOAK_SOCKETS": 4, "SOAK_AT_ONCE": 2, "LEVEL_WITHIN_S": 1.0}
    ),
    "compare_calibration": SmallestForm({"SAME": ("300 requests",), "SLOWER": ("600 requests, CV 0.3, independent",)}),
    "load": SmallestForm({"QUICK_SECONDS": 0.5}),
    "load_client": SmallestForm({"QUICK_ROUNDS": (1, 1)}, (*QUICK, "--streams=4")),
    "tester": SmallestForm(
        {"QUICK_TRUTH": (20, 0.5, 2), "QUICK_PAUSE": (1.0, 0.2, 0.2), "QUICK_LIMIT": (0.3, 0.1), "HOGS": 1}
        | {"QUICK_COST": (20, 40, 0.2), "QUICK_COMPARED": (1, 1.0, 200.0)}
    ),
    "externals": SmallestForm(arguments=()),
    "gguf": SmallestForm({"SIZES": (1, 2), "DECODE": (2, 2), "PREFILL": (4, 1)}),
    "lm_eval": SmallestForm({"QUICK_DOCUMENTS": 1}),
    "ray_serve": SmallestForm({"QUICK_ROUNDS": 2, "QUICK_ANSWERS": 1, "CALLERS": (1, 2), "TOKENS": 8}),
    "rivals": SmallestForm({"QUICK": {"requests": 2, "prompt_tokens": 4, "output_tokens": 2}, "QUICK_S": LIMIT_S}),
    "canary": SmallestForm({"QUICK_TRIALS": (1, 1)}),
    "canary_live": SmallestForm({"QUICK_S": 3.0}),
    "model_swapping": SmallestForm({"PROMPTS": 1, "TOKENS": 4, "CALLERS": 2}, (*QUICK, "--seconds=1")),
    "embedding_cache": SmallestForm({"QUICK_INPUTS": 40}),
    "prefix_balance": SmallestForm({"QUICK_REQUESTS": 50}),
    "router_quality": SmallestForm({"QUICK_PROMPTS": 200}),
    "semantic_cache": SmallestForm(
        {
            "QUICK_QUESTIONS": 1_700,
            "EDITED": 100,
            "SET_ASIDE": 200,
            "QUICK_SPLITS": 1,
            "QUICK_STREAM": 1_450,
            "QUICK_PLAN": {"training_labels": 500, "certification_labels": 100, "serve_at": 1_350},
            "QUICK_RUNS": 3,
            "LOOKUPS": 1_000,
            "QUICK_SUITE": dict.fromkeys(("number", "negation", "swap", "antonym", "entity"), 5),
        },
        (*QUICK, "--sets", "banking77"),
    ),
    "autoscaling": SmallestForm(
        {"QUICK_S": 400.0, "QUICK_TARGETS": (0.8,), "QUICK_CONSTANT_S": 400.0},
    ),
    "semantic_gateway": SmallestForm({"QUICK_QUESTIONS": 30, "QUICK_LAST": 10, "QUICK_DIALOGUES": 2}),
}
BEYOND_THE_PROJECT = {
    "autoscaling",
    "cache_eviction",
    "gpu",
    "externals",
    "gguf",
    "http_server",
    "lm_eval",
    "prefix_balance",
    "router_quality",
    "semantic_cache",
    "semantic_gateway",
}
"""They need a GPU, data, or software of others, which `scripts/services.sh` does not bring."""


def test_every_benchmark_has_a_smallest_form():
    assert SMALLEST.keys() | {"summary"} == runnable().keys()


def test_every_result_is_of_a_benchmark_that_there_is():
    results = {file.name: json.loads(file.read_text()) for file in RESULTS.glob("*.json") if ".quick" not in file.name}
    # The bundled model's own result is written by what trains it.
    assert {result["benchmark"] for name, result in results.items() if name != "train_tiny.json"} <= {
        *runnable(),
        *("chaos_harsh", "failover_workers_controller", "failover_workers_engine", "flood_workers"),
        *("overspend_shared", "overspend_workers", "rivals_avx2"),
        *("answer_cache_answers_in_flight", "answer_cache_answers_in_flight_workers", "answer_cache_cost"),
    }


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The runs of all benchmarks that are tested, a few at a time: name -> future."""
    chosen = [item.callspec.params["name"] for item in request.session.items if item.function is test_it_runs]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(finished_run, name, tmp_path_factory.mktemp(name)) for name in chosen}
        pool.shutdown(cancel_futures=True)


def finished_run(name, results):
    form = SMALLEST[name]
    words = [smallest_benchmark.__name__, name, repr(form.arguments), repr(form.constants), str(results)]
    with (results / "output").open("wb") as output, (results / "errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
            start_new_session=True,
        )
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return FinishedRun(code, (results / "output").read_text(), (results / "errors").read_text())


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs(name, runs):
    run = runs[name].result()
    if run.code == NOT_RUN:
        sentence = run.errors.strip().splitlines()[-1]
        assert sentence.startswith(f"{name} did not run. ")
        if name not in BEYOND_THE_PROJECT and os.environ.get("CI", "").lower() == "true":
            pytest.fail(sentence)
        pytest.skip(sentence)
    # So small a run may miss its bars; what says that it came to its end is that it wrote its figures.
    assert re.search("^written: ", run.output, re.MULTILINE), f"{run.output}\n{run.errors}"
    assert run.code in (0, 1)


def test_the_summary_is_written(tmp_path, monkeypatch):
    for constant, file in (("README", summary.README), ("PAGE", summary.PAGE)):
        copy = tmp_path / file.name
        copy.write_text(f"Before\n{summary.BEGIN}\nFigures of before.\n{summary.END}\nAfter\n")
        monkeypatch.setattr(summary, constant, copy)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "summary"])
    assert main() == 0
    for file in tmp_path.iterdir():
        assert "Figures of before." not in file.read_text()


def test_an_unknown_name_is_told_the_known_ones(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gateway_costs"])
    assert main() == 2
    printed = capsys.readouterr()
    assert "There is no benchmark 'gateway_costs'" in printed.err
    assert "\ngateway_cost " in printed.out

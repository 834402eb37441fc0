"""`maitred serve` on the bundled model under the loads that people ask about: its knee, and both sides of it.

The sweep finds the highest rate that meets the objectives; then the same users come at half of that rate and at 1.2
times of it, as users who stay (closed loop), as conversations, and as a replay of a production trace with its
shared prefixes. Each load has its own report in ``benchmarks/work/load``. Whatever the load, no answer may be lost or
cut, and nothing may be left in the engine.

The tester, the gateway and the engine share this machine's cores, and every result says how far that matters.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.support.report import Report
from benchmarks.support.shapes import WORK
from maitred.load.analysis.sweep import Sweep, SweepTrial, sweep
from maitred.load.measure.result import LoadResult
from maitred.load.play.driver import run
from maitred.load.report.html import render
from maitred.load.report.outline import draw
from maitred.load.spec import ArrivalsSpec, LoadSpec, LoadTarget, ObjectivesSpec, ShapeSpec, StopCondition
from maitred.load.workload.generator import make_workload
from maitred.testing.server_process import ServerProcess, serving

SEED = 20260106
FOLDER = WORK / "load"
OBJECTIVES = ObjectivesSpec(ttft_s=2.0, tpot_s=0.2, attainment=0.95)
QUESTIONS = ShapeSpec(
    prompt_tokens="lognormal:mean=150,cv=1", output_tokens="lognormal:mean=60,cv=0.7", max_prompt_tokens=1200
)
CONVERSATIONS = ShapeSpec(
    prompt_tokens="lognormal:mean=60,cv=0.7",
    output_tokens="lognormal:mean=50,cv=0.7",
    turns="uniform:2..6",
    think_s="exponential:mean=2",
    prefixes=4,
    prefix_tokens=200,
    max_prompt_tokens=200,
    max_output_tokens=120,
)
MOONCAKE_SCALE = 1 / 32
QUICK_SECONDS = 10.0
"""From a window of 128 thousand tokens to 2,048, with room for the longest prompts."""


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short open loop")
    parser.add_argument("--seconds", type=float, default=60, help="of each load")
    parser.add_argument("--trial", type=float, default=30, help="seconds of each trial of the sweep")
    parser.add_argument(
        "--mooncake", type=Path, help="the trace's conversation_trace.jsonl(.xz); without it, no replay"
    )
    arguments = parser.parse_args()
    report = Report("load", seed=SEED, quick=arguments.quick)
    with serving() as server:
        if arguments.quick:
            loads = {"open loop, 3/s": spec(server, rate_per_s=3.0, shape=QUESTIONS, seconds=QUICK_SECONDS)}
        else:
            knee = uvloop.run(find_knee(server, arguments.trial))
            report.figures["knee"] = msgspec.to_builtins(knee)
            if knee.knee_per_s is None:
                raise RuntimeError(f"There is no knee to measure at: {knee.verdict}")
            loads = {
                "open loop, 0.5 × knee": spec(server, rate_per_s=0.5 * knee.knee_per_s, seconds=arguments.seconds),
                "open loop, 1.2 × knee": spec(server, rate_per_s=1.2 * knee.knee_per_s, seconds=arguments.seconds),
                "closed loop, 32 users": spec(server, users=32, seconds=arguments.seconds),
                "conversations": spec(
                    server, rate_per_s=0.25 * knee.knee_per_s, shape=CONVERSATIONS, seconds=arguments.seconds
                ),
            }
            if arguments.mooncake is not None:
                loads["Mooncake replay"] = replay(server, arguments.mooncake, arguments.seconds)
        report.figures["loads"] = {}
        for name, load in loads.items():
            result = uvloop.run(play(load, name))
            report.figures["loads"][name] = figures(result)
            print(name, report.figures["loads"][name], flush=True)
            lost = {outcome: count for outcome, count in result.summary.outcomes.items() if outcome != "complete"}
            report.require(f"{name}: answers lost or cut", sum(lost.values()), at_most=0)
        samples = server.metrics()
        held = samples["maitred_engine_kv_blocks_total"] - samples["maitred_engine_kv_blocks_free"]
        report.require("KV blocks held at the end", held, at_most=0)
        report.require("exit code", server.stop(), at_most=0)
    return report.finish()


def spec(
    server: ServerProcess,
    *,
    seconds: float,
    rate_per_s: float | None = None,
    users: int | None = None,
    shape: ShapeSpec = QUESTIONS,
) -> LoadSpec:
    """A load on the server."""
    return LoadSpec(
        target=LoadTarget(url=server.url),
        arrivals=ArrivalsSpec(rate_per_s=rate_per_s, users=users),
        shape=shape,
        bounds=StopCondition(duration_s=seconds, warmup_s=seconds / 12),
        objectives=OBJECTIVES,
        seed=SEED,
    )


def replay(server: ServerProcess, trace: Path, seconds: float) -> LoadSpec:
    """Mooncake's conversations, at their own speed, shortened to what the bundled model's window takes."""
    shape = ShapeSpec(trace=f"mooncake:{trace}", scale=MOONCAKE_SCALE, max_prompt_tokens=1600, max_output_tokens=200)
    return msgspec.structs.replace(spec(server, seconds=seconds), shape=shape)


async def find_knee(server: ServerProcess, trial_s: float) -> Sweep:
    """The highest rate that the server sustains."""

    def watch(trial: SweepTrial) -> None:
        verdict = "passed" if trial.passed else "failed"
        print(f"{trial.rate_per_s:.2f}/s {verdict}: attainment {trial.attainment:.1%}", flush=True)

    one = spec(server, rate_per_s=1.0, seconds=trial_s)
    one = msgspec.structs.replace(one, arrivals=ArrivalsSpec(), bounds=StopCondition(warmup_s=trial_s / 6))
    return await sweep(one, lambda load: play(load, "sweep", keep=False), start_rate=4.0, trial_s=trial_s, watch=watch)


async def play(load: LoadSpec, name: str, *, keep: bool = True) -> LoadResult:
    """One run; its result and its report stay in the work folder."""
    workload = make_workload(load)
    data = await run(load, workload)
    result = LoadResult.of(
        load, data, command=" ".join(["python -m benchmarks load", *sys.argv[1:]]), workload=workload.description
    )
    if keep:
        FOLDER.mkdir(parents=True, exist_ok=True)
        path = FOLDER / "".join(letter if letter.isalnum() else "-" for letter in name)
        result.save(path.with_suffix(".json"))
        path.with_suffix(".html").write_text(await asyncio.to_thread(lambda: render(result, draw(result))))
    return result


def figures(result: LoadResult) -> dict[str, Any]:
    """What the summary of a run says, for the result file."""
    return {
        "summary": msgspec.to_builtins(result.summary),
        "tester": msgspec.to_builtins(result.tester),
        "workload": result.workload,
    }


if __name__ == "__main__":
    sys.exit(main())

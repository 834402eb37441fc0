"""What the predicted time to the first token is wrong by, and what of that could be known.

The traffic of `overload` in simulated time, where steps take exactly what the model of them says (or that, times a
random factor), so that what is left of the error is the prediction's own and that of the future. How much the future is
worth is measured, too: at some arrivals the world is copied with all that is hidden from the gateway (the true length
of every answer, the end of the step under way), and goes on with other requests than came in fact, and with other
random factors. The median of the copies is what somebody would say who knows everything but who comes next and how long
steps take; *foresight* is what that is wrong by. Under a fair order no prediction can be expected to be better, because
somebody who comes later may be served before.

Nothing is measured here, so the machine does not matter.
"""

import argparse
import statistics
import sys
from typing import Any

from benchmarks.support.report import Report
from benchmarks.support.simulated_gateway import Simulation, capacity
from maitred.dispatch.queue import QueuedRequest
from maitred.engine.config import BatchLineConfig

SEED = 20_261_122
LOADS, QUICK_LOADS = (0.5, 0.8, 1.0, 1.5, 2.0, 10.0), (0.8, 1.5, 10.0)
SECONDS, QUICK_SECONDS = 40.0, 20.0
OBJECTIVE_S = 1.0
WARM_UP_S = 10.0
COPIES = 9
EVERY = 25
"""Requests let in, of which one is foreseen."""
JITTERS = {"exact steps": 0.0, "steps vary by a quarter": 0.25}


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 s of three loads, and steps that do not vary")
    arguments = parser.parse_args()
    loads, seconds = (QUICK_LOADS, QUICK_SECONDS) if arguments.quick else (LOADS, SECONDS)
    jitters = dict(list(JITTERS.items())[:1]) if arguments.quick else JITTERS
    report = Report("prediction", seed=SEED, quick=arguments.quick)
    requests_per_s = capacity(BatchLineConfig(policy="fifo"))
    report.figures = {"capacity_requests_per_s": requests_per_s, "objective_s": OBJECTIVE_S}
    for line in (BatchLineConfig(), BatchLineConfig(policy="fifo")):
        for name, jitter in jitters.items():
            for load in loads:
                play = Simulation(load * requests_per_s, line, objective_s=OBJECTIVE_S, seed=SEED, jitter=jitter)
                figures = errors(play, seconds, foresee=line.policy == "fair")
                report.figures.setdefault(line.policy, {}).setdefault(name, {})[f"{load:g}"] = figures
                print(line.policy, name, f"{load:g} x", figures, flush=True)
    return report.finish()


def errors(play: Simulation, seconds: float, *, foresee: bool) -> dict[str, Any]:
    """Runs a simulation, and compares the predictions with what came."""
    for _ in play.run(WARM_UP_S):
        pass
    foreseen: dict[QueuedRequest, float] = {}
    watched: set[QueuedRequest] = set()
    for number, queued in enumerate(play.run(seconds)):
        watched.add(queued)
        if foresee and number % EVERY == 0:
            seeds = range(number * COPIES, (number + 1) * COPIES)
            copies = [play.outcome(queued, SEED + seed, 3 * OBJECTIVE_S) for seed in seeds]
            if len(seen := [copy for copy in copies if copy is not None]) > COPIES / 2:
                foreseen[queued] = statistics.median(seen)
    after_s = {queued: seconds for queued, seconds in play.answered if queued in watched}
    predicted = {
        queued: queued.predicted_position.ttft_s for queued in after_s if queued.predicted_position is not None
    }
    figures: dict[str, Any] = {
        "requests": len(predicted),
        "waited": sum(queued.raw_wait_s > 0 for queued in predicted) / len(predicted),
        "ttft_p50_s": statistics.median(after_s.values()),
        "error": _spread(
            [abs(predicted_s - after_s[queued]) / after_s[queued] for queued, predicted_s in predicted.items()]
        ),
    }
    both = [queued for queued in foreseen if queued in predicted]
    if both:
        figures["of_those_foreseen"] = {
            "requests": len(both),
            "error": _spread([abs(predicted[queued] - after_s[queued]) / after_s[queued] for queued in both]),
            "foresight": _spread([abs(foreseen[queued] - after_s[queued]) / after_s[queued] for queued in both]),
        }
    return figures


def _spread(values: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10)
    return {"p50": statistics.median(values), "p90": tenths[-1]}


if __name__ == "__main__":
    sys.exit(main())

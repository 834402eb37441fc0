"""Output tokens per second beside the engines that others run on this machine, interleaved in one run.

    python -m benchmarks rivals install [NAME …]    makes an environment for each rival, below the user's cache
    python -m benchmarks rivals                     all workloads, all rivals that are installed
    python -m benchmarks rivals --only one many --classes int8 --rivals vllm openvino    a part of it


Engine against engine: every rival is a library in a process of its own (llama.cpp: its server in that process, since
its batching is there), with the same model of random weights in the form that it likes best, two threads, greedy, all
answers of exactly the length that was asked for. They take turns, asleep in between. In every round a workload's first
and last turn are ours, so a machine that drifts meanwhile drifts for both sides; only the ratios of a round count.
Precision classes are compared with themselves: fp32 with fp32, int8 (whatever each calls so) with int8.

Every round has prompts of its own: nothing is found in a prefix cache but what the workload itself shares.

The whole takes about an hour. Parts of it go into the same result file (see `benchmarks.support.rivals.rival_results`),
so that each finds a quiet machine. Processors with AVX-512 and without are compared in files of their own: arithmetic
that one of them has and the other has not is most of what is measured.
"""

import argparse
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.report import Report
from benchmarks.support.rivals.rival_results import START, Results, kept_figures, result_name
from benchmarks.support.rivals.rival_set import OURS, RIVALS, Contestant, Failed, Rival
from benchmarks.support.shapes import random_llama, random_qwen, servable

SEED = 20261122
START_S, ANSWER_S = 400.0, 300.0
CLASSES = ("fp32", "int8")


@dataclass(frozen=True)
class Workload:
    """Requests that come at once.

    Attributes:
        name: For `--only`.
        model: Makes the folder.
        requests: How many.
        prompt_tokens: Of each, its own.
        output_tokens: Of each.
        shared_tokens: Before its own, the same for all.
        rounds: Measured, unless asked otherwise.
    """

    name: str
    model: Callable[[], Path]
    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    rounds: int = 1

    @property
    def shape(self) -> dict[str, int]:
        """What a result file says of it."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "shared_tokens": self.shared_tokens,
            "output_tokens": self.output_tokens,
        }

    def prompts(self, draw: random.Random, vocabulary: int = 8000) -> list[list[int]]:
        """Fresh ones."""

        def tokens(count: int) -> list[int]:
            return [draw.randrange(10, vocabulary) for _ in range(count)]

        shared = tokens(self.shared_tokens)
        return [shared + tokens(self.prompt_tokens) for _ in range(self.requests)]


WORKLOADS = (
    Workload("crowd", random_llama, 128, 64, 64, rounds=3),
    Workload("one", random_qwen, 1, 128, 128),
    Workload("many", random_qwen, 32, 128, 64),
    Workload("shared", random_qwen, 32, 32, 32, shared_tokens=512),
)
QUICK = Workload("quick", random_llama, 16, 32, 32)
QUICK_S = 25.0
"""From then on no further rival is started in a quick run."""


def main() -> int:
    """Installs, or runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [rival.name for rival in RIVALS]
    parser.add_argument("words", nargs="*", metavar="install NAME", help=f"rivals: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="one small workload and whoever starts in time")
    parser.add_argument("--only", nargs="+", choices=[w.name for w in WORKLOADS], help="these workloads")
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES), help="these precisions")
    parser.add_argument("--rivals", nargs="+", choices=names, default=names, help="these rivals")
    parser.add_argument("--rounds", type=int, help="of every workload, instead of its own number")
    arguments = parser.parse_args()
    if arguments.words:
        return install(arguments.words, names, parser)
    chosen = [rival for rival in RIVALS if rival.name in arguments.rivals]
    for rival in chosen:
        if not rival.installed:
            print(f"{rival.name} is not installed: python -m benchmarks rivals install {rival.name}")
    chosen = [rival for rival in chosen if rival.installed]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that contestants end, too
    report = Report(result_name(), seed=SEED, quick=arguments.quick)
    results = Results(report, {} if arguments.quick else kept_figures(result_name()))
    run = Run(results, chosen, arguments.rounds)
    if arguments.quick:
        run.stage("fp32", [QUICK], until_s=time.monotonic() + QUICK_S)
        return report.finish()
    for precision in arguments.classes:
        workloads = [w for w in WORKLOADS if arguments.only is None or w.name in arguments.only]
        for model in dict.fromkeys(workload.model for workload in workloads):
            run.stage(precision, [workload for workload in workloads if workload.model is model])
    return results.finish()


def install(words: Sequence[str], names: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Makes the environments."""
    if words[0] != "install" or set(words[1:]) - set(names):
        parser.error(f"Say `install`, and then any of {', '.join(names)}.")
    for rival in RIVALS:
        if rival.environment is not None and (len(words) == 1 or rival.name in words):
            print(f"{rival.name}: installing into {rival.environment.place} …", flush=True)
            rival.environment.install()
    return 0


class Run:
    """Everything of one run.

    Args:
        results: Get the figures, as they come.
        rivals: That take part.
        rounds: Instead of each workload's own number.
    """

    def __init__(self, results: Results, rivals: Sequence[Rival], rounds: int | None) -> None:
        self._results = results
        self._rivals = rivals
        self._rounds = rounds
        self._draw = random.Random(SEED)

    def stage(self, precision: str, workloads: Sequence[Workload], *, until_s: float | None = None) -> None:
        """Workloads of one model in one precision: everybody is loaded once.

        Args:
            precision: The class.
            workloads: Of one model.
            until_s: When the last rival may be started, by the monotonic clock.
        """
        folder = servable(workloads[0].model())
        sequences = max(workload.requests for workload in workloads)
        with ExitStack() as stack:
            ready: list[Contestant] = []
            for rival in (OURS, *self._rivals):
                late = until_s is not None and time.monotonic() > until_s
                idle = rival.patient is not None and not any(w.name in rival.patient for w in workloads)
                if precision not in rival.precisions or idle or late:
                    continue
                contestant = stack.enter_context(Contestant(rival, folder, precision, sequences))
                try:
                    limit_s = START_S if until_s is None else max(1.0, until_s - time.monotonic())
                    how = contestant.ready(limit_s)
                except Failed as failure:
                    self._failed(rival, precision, START, failure)
                    contestant.close()
                    continue
                self._results.ready(rival.name, precision, how)
                print(f"{rival.name} is ready, {precision}: {how}", flush=True)
                ready.append(contestant)
            ours = [contestant for contestant in ready if contestant.rival is OURS]
            if not ours:
                raise SystemExit("Our own engine did not start; see above.")
            others = [contestant for contestant in ready if contestant.rival is not OURS]
            for workload in workloads:
                self._workload(precision, workload, ours[0], others)

    def _workload(self, precision: str, workload: Workload, ours: Contestant, others: Sequence[Contestant]) -> None:
        own: dict[str, list[float]] = defaultdict(list)
        rates: dict[str, list[float]] = defaultdict(list)
        others = [o for o in others if o.rival.patient is None or workload.name in o.rival.patient]
        lost: set[str] = set()
        for number in range(self._rounds or workload.rounds):
            first = number % max(1, len(others))
            turns = [*others[first:], *others[:first]]
            before = self._rate(workload, ours)
            theirs: dict[str, float] = {}
            for contestant in turns:
                name = contestant.rival.name
                if name in lost:
                    continue
                try:
                    theirs[name] = self._rate(workload, contestant)
                except Failed as failure:
                    lost.add(name)
                    self._failed(contestant.rival, precision, workload.name, failure)
            around = (before + self._rate(workload, ours)) / 2
            for name, rate in theirs.items():
                rates[name].append(rate)
                own[name].append(around)
                self._results.note(workload.name, precision, workload.shape, name, own[name], rates[name])

    def _rate(self, workload: Workload, contestant: Contestant) -> float:
        """Output tokens per second, from all requests at hand to the last token of all."""
        seconds = contestant.answer(workload.prompts(self._draw), workload.output_tokens, ANSWER_S)
        rate = workload.requests * workload.output_tokens / seconds
        print(f"  {workload.name:8} {contestant.rival.name:13} {seconds:8.2f} s {rate:9.1f} tokens/s", flush=True)
        return rate

    def _failed(self, rival: Rival, precision: str, what: str, failure: Failed) -> None:
        print(f"{rival.name}, {precision}, {what}: {failure}", flush=True)
        self._results.failed(rival.name, precision, what, str(failure))


if __name__ == "__main__":
    sys.exit(main())

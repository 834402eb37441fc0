"""Speculation by looking up, with the bundled model: what it gains where text is copied, and what it costs elsewhere.

Two engines on the same weights, one with speculation and one without, answer the same requests in turns of some steps
each, so that both see the same machine. Compared are output tokens per second of step time. Texts:

* *copied*: a passage four times over, to be gone on with greedily. The answers repeat it.
* *own*: the openings of stories, gone on with at temperature 0.8. Little repeats.

Each at several numbers of requests at a time, up to a full batch, where drafts must vanish. The answers of both engines
are compared, token by token.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.report import Report
from maitred.config.tree import BUNDLED_MODEL
from maitred.core.ports import LoadReport
from maitred.core.request import Request, SamplingParams
from maitred.engine.config import EngineConfig, SpeculationConfig
from maitred.engine.engine import Engine
from maitred.engine.process import build
from maitred.text.tokenizer import Tokenizer

SEED = 20261122
FULL_BATCH = 128
TURN_STEPS = 16
PASSAGE = (
    "Once upon a time there was a little rabbit who lived under the old oak tree near the river. Every morning the "
    "rabbit went to the market to buy carrots and bread, and every evening she told her children what she had seen. "
)
OPENINGS = (
    "Alice was beginning to get very tired of sitting by her sister on the bank,",
    "The Mole had been working very hard all the morning, spring-cleaning his little home.",
    "When Mary Lennox was sent to live with her uncle, everybody said",
    "There was once a king who had three sons, and the youngest of them",
)
Answers = dict[str, list[int]]


@dataclass(frozen=True)
class Case:
    """Requests that come at once.

    Attributes:
        name: Of the case.
        prompts: In turn.
        requests: How many.
        tokens: Of each answer.
        temperature: At which they are sampled.
        rounds: How often.
    """

    name: str
    prompts: tuple[str, ...]
    requests: int
    tokens: int
    temperature: float
    rounds: int


FULL = (
    Case("copied, 1 at a time", (PASSAGE * 4,), 1, 256, 0.0, 9),
    Case("copied, 8 at a time", (PASSAGE * 4,), 8, 128, 0.0, 5),
    Case("copied, 32 at a time", (PASSAGE * 4,), 32, 64, 0.0, 5),
    Case("copied, full batch", (PASSAGE * 4,), FULL_BATCH, 48, 0.0, 3),
    Case("own, 1 at a time", OPENINGS, 1, 256, 0.8, 9),
    Case("own, 8 at a time", OPENINGS, 8, 128, 0.8, 5),
    Case("own, full batch", OPENINGS, FULL_BATCH, 64, 0.8, 5),
)
QUICK = (
    Case("copied, 1 at a time", (PASSAGE * 4,), 1, 128, 0.0, 2),
    Case("own, full batch", OPENINGS, FULL_BATCH, 16, 0.8, 1),
)


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short cases; speeds have no bars")
    arguments = parser.parse_args()
    report = Report("speculation", seed=SEED, quick=arguments.quick)
    with_it, without = Bench("ngram"), Bench("none")
    different = 0
    for case in QUICK if arguments.quick else FULL:
        ratios, rounds = [], []
        for number in range(case.rounds):
            benches = (with_it, without) if number % 2 else (without, with_it)
            told = together(benches, requests_of(case, with_it.tokenizer, number))
            different += sum(told[with_it.method][name] != told[without.method][name] for name in told["none"])
            ratios.append(with_it.tokens_per_s / without.tokens_per_s)
            rounds.append(with_it.figures() | {"without_tokens_per_s": round(without.tokens_per_s)})
        figures = {"speed_up": round(statistics.median(ratios), 3), "speed_ups": [round(ratio, 3) for ratio in ratios]}
        for name in rounds[0]:
            figures[name] = round(statistics.median([one[name] for one in rounds]), 3)
        report.figures[case.name] = figures
        print(case.name, figures, flush=True)
    report.require("answers that are not the same", different, at_most=0)
    if not arguments.quick:
        report.require("copied, 1 at a time, speed-up", report.figures["copied, 1 at a time"]["speed_up"], at_least=1.5)
        for case in FULL:
            report.require(f"{case.name}, speed-up", report.figures[case.name]["speed_up"], at_least=0.98)
    return report.finish()


def requests_of(case: Case, tokenizer: Tokenizer, number: int) -> list[Request]:
    """The requests of one round."""
    return [
        Request(
            id=str(i),
            prompt=tokenizer.encode(case.prompts[i % len(case.prompts)], add_special_tokens=False),
            sampling=SamplingParams(
                max_tokens=case.tokens, seed=SEED + 1000 * number + i, temperature=case.temperature, ignore_eos=True
            ),
        )
        for i in range(case.requests)
    ]


def together(benches: tuple["Bench", "Bench"], requests: list[Request]) -> dict[str, Answers]:
    """Both answer the same requests, in turns."""
    for bench in benches:
        bench.begin(requests)
    going_on = True
    while going_on:
        turns = [bench.turn() for bench in benches]
        going_on = any(turns)
    return {bench.method: dict(bench.answers) for bench in benches}


class Bench:
    """An engine, and what it did in a round.

    Args:
        method: Of its speculation.
    """

    def __init__(self, method: Literal["none", "ngram"]) -> None:
        self.method = method
        self.tokenizer = Tokenizer.load(BUNDLED_MODEL)
        config = EngineConfig(
            device="cpu",
            dtype="fp32",
            max_sequences=FULL_BATCH,
            kv_memory_bytes=512 << 20,
            speculation=SpeculationConfig(method=method),
        )
        self._engine: Engine = build(BUNDLED_MODEL, config)[0]
        self._before = LoadReport()
        self._seconds = 0.0
        self.answers: Answers = defaultdict(list)

    def begin(self, requests: list[Request]) -> None:
        """A new round."""
        self.answers.clear()
        self._seconds = 0.0
        self._before = self._engine.load()
        for request in requests:
            self._engine.submit(self, request)

    def turn(self) -> bool:
        """Some steps; False: all is answered."""
        for _ in range(TURN_STEPS):
            if not self._engine.occupied:
                return False
            start_s = time.perf_counter()
            outputs = self._engine.step()
            self._seconds += time.perf_counter() - start_s
            for output in outputs.get(self, []):
                self.answers[output.request_id] += output.delta.tokens
        return True

    @property
    def tokens_per_s(self) -> float:
        """Of the round."""
        return sum(map(len, self.answers.values())) / self._seconds

    def figures(self) -> dict[str, Any]:
        """Of the round."""
        load, before = self._engine.load(), self._before
        drafted = load.drafted_tokens - before.drafted_tokens
        tokens = load.output_tokens - before.output_tokens
        return {
            "tokens_per_s": round(self.tokens_per_s),
            "steps": load.steps - before.steps,
            "drafts_per_token": round(drafted / tokens, 3),
            "right": round((load.accepted_tokens - before.accepted_tokens) / max(1, drafted), 3),
        }


if __name__ == "__main__":
    sys.exit(main())

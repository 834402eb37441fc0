"""Speculation with the bundled model: what it gains, and what it costs where there is nothing to gain.

Two engines on the same weights, one with speculation and one without, answer the same requests in turns of some steps
each, so that both see the same machine. Compared are output tokens per second of step time, and CPU seconds. Of two
equal engines the one that is made first can be 2 to 4 % faster, or slower, for as long as both live: where their memory
is decides that. So there are two pairs, of which one is made the other way round, and what counts is the mean of both
(in the last case, whose engines come when all others are there, they are not).
An engine's clock stands still while others have their turns: what a step takes is what it learns from. Texts:

* *copied*: a passage four times over, to be gone on with greedily. The answers repeat it.
* *own*: the openings of stories, gone on with at temperature 0.8. Little repeats.
* *JSON*: a few records in the prompt, and an answer that must be a list of such records, at temperature 0.8.
* *drafted*: own text of a deeper model (`benchmarks.support.deeper_model`), for which the bundled one drafts; and
  *copied and drafted*, with both methods at once.

Each at several numbers of requests at a time, up to a full batch, where drafts must vanish. A round there is half a
second, and two equal ones differ by up to 4 %; so there are many of them where a loss of 2 % is looked for. The answers
of both engines are compared, token by token.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from benchmarks.support.deeper_model import make_deeper
from benchmarks.support.report import Report
from maitred.config.tree import BUNDLED_MODEL
from maitred.core.grammar import Constraint
from maitred.core.replica import LoadReport
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig, SpeculationConfig
from maitred.engine.engine import Engine
from maitred.text.grammar.reading import parse_grammar
from maitred.text.tokenizer import Tokenizer

SEED = 20261122
FULL_BATCH = 128
TURN_STEPS = 4
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
RECORDS = "\n".join(
    f'{{"name":"{name}","kind":"{kind}","address":"the old oak tree near the river","years":{years}}}'
    for name, kind, years in (("Alice", "rabbit", 7), ("Mole", "mole", 12), ("Mary", "raven", 31), ("Tom", "rabbit", 4))
)
SCHEMA = {
    "type": "array",
    "minItems": 8,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "kind": {"type": "string", "enum": ["rabbit", "mole", "raven"]},
            "address": {"type": "string", "maxLength": 60},
            "years": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "kind", "address", "years"],
        "additionalProperties": False,
    },
}
LAYERS, NOISE = 25, 0.1
"""Of the deeper model. With so much noise about four of five drafts are right."""
Method = Literal["none", "ngram", "draft_model", "auto"]
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
        method: Of speculation.
        deeper: Whether the deeper model answers.
        records: Whether answers are lists of records.
    """

    name: str
    prompts: tuple[str, ...]
    requests: int
    tokens: int
    temperature: float
    rounds: int
    method: Method = "ngram"
    deeper: bool = False
    records: bool = False


FULL = (
    Case("copied, 1 at a time", (PASSAGE * 4,), 1, 256, 0.0, 10),
    Case("copied, 8 at a time", (PASSAGE * 4,), 8, 128, 0.0, 16),
    Case("copied, 32 at a time", (PASSAGE * 4,), 32, 64, 0.0, 16),
    Case("copied, full batch", (PASSAGE * 4,), FULL_BATCH, 48, 0.0, 10),
    Case("own, 1 at a time", OPENINGS, 1, 256, 0.8, 10),
    Case("own, 8 at a time", OPENINGS, 8, 128, 0.8, 16),
    Case("own, full batch", OPENINGS, FULL_BATCH, 64, 0.8, 10),
    Case("JSON, 1 at a time", (RECORDS,), 1, 200, 0.8, 6, records=True),
    Case("JSON, 8 at a time", (RECORDS,), 8, 120, 0.8, 16, records=True),
    Case("JSON, full batch", (RECORDS,), FULL_BATCH, 32, 0.8, 10, records=True),
    Case("drafted, 1 at a time", OPENINGS, 1, 160, 0.8, 6, "draft_model", deeper=True),
    Case("drafted, greedy, 1 at a time", OPENINGS, 1, 160, 0.0, 6, "draft_model", deeper=True),
    Case("drafted, 8 at a time", OPENINGS, 8, 64, 0.8, 20, "draft_model", deeper=True),
    Case("drafted, full batch", OPENINGS, FULL_BATCH, 24, 0.8, 10, "draft_model", deeper=True),
    Case("copied and drafted, 1 at a time", (PASSAGE * 4,), 1, 160, 0.0, 6, "auto", deeper=True),
)
QUICK = (
    Case("copied, 1 at a time", (PASSAGE * 4,), 1, 128, 0.0, 2),
    Case("own, full batch", OPENINGS, FULL_BATCH, 16, 0.8, 2),
    Case("JSON, 1 at a time", (RECORDS,), 1, 80, 0.8, 2, records=True),
    Case("drafted, 1 at a time", OPENINGS, 1, 64, 0.8, 2, "draft_model", deeper=True),
)


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few short cases; speeds have no bars")
    parser.add_argument("--only", help="cases whose names have this in them; speeds have no bars")
    arguments = parser.parse_args()
    report = Report("speculation", seed=SEED, quick=arguments.quick)
    cases = [case for case in (QUICK if arguments.quick else FULL) if (arguments.only or "") in case.name]
    different = 0
    with benches_of() as bench_of:
        for case in cases:
            pairs = [(bench_of(case.method, case.deeper, 0), bench_of("none", case.deeper, 0))]
            without = bench_of("none", case.deeper, 1)
            pairs.append((bench_of(case.method, case.deeper, 1), without))
            figures, differing = compare(case, pairs)
            different += differing
            report.figures[case.name] = figures
            print(case.name, figures, flush=True)
    report.require("answers that are not the same", different, at_most=0)
    if not arguments.quick and not arguments.only:
        report.require("copied, 1 at a time, speed-up", report.figures["copied, 1 at a time"]["speed_up"], at_least=1.5)
        for case in FULL:
            report.require(f"{case.name}, speed-up", report.figures[case.name]["speed_up"], at_least=0.98)
    return report.finish()


@contextmanager
def benches_of() -> "Iterator[Any]":
    """A function from a method, whether the deeper model answers, and a pair, to an engine, which is made once."""
    with TemporaryDirectory(prefix="deeper-") as name:
        deeper = Path(name)
        make_deeper(deeper, layers=LAYERS, noise=NOISE, seed=SEED)
        yield cache(lambda method, of_deeper, _pair: Bench(method, deeper if of_deeper else BUNDLED_MODEL))


def compare(case: Case, pairs: "list[tuple[Bench, Bench]]") -> tuple[dict[str, Any], int]:
    """The figures of a case by pairs of an engine with speculation and one without, and how many answers differ."""
    different = 0
    ratios, cpu_ratios, rounds = [], [], []
    for number in range(case.rounds):
        with_it, without = pairs[number % 2]
        benches = (with_it, without) if number // 2 % 2 else (without, with_it)
        answers = together(benches, requests_of(case, with_it.tokenizer, number))
        different += sum(answers[with_it.method][name] != answers[without.method][name] for name in answers["none"])
        ratios.append(with_it.tokens_per_s / without.tokens_per_s)
        cpu_ratios.append(without.cpu_s / with_it.cpu_s)
        rounds.append(with_it.figures() | {"without_tokens_per_s": round(without.tokens_per_s)})
    figures: dict[str, Any] = {
        "speed_up": round(statistics.geometric_mean(statistics.median(ratios[pair::2]) for pair in range(2)), 3),
        "speed_ups": [round(ratio, 3) for ratio in ratios],
        "cpu_saved": round(statistics.median(cpu_ratios), 3),
    }
    for name in rounds[0]:
        figures[name] = round(statistics.median([figures_of_round[name] for figures_of_round in rounds]), 3)
    return figures, different


def requests_of(case: Case, tokenizer: Tokenizer, number: int) -> list[EngineRequest]:
    """The requests of one round."""
    grammar = parse_grammar(Constraint("json_schema", SCHEMA, "guided_json")) if case.records else None
    return [
        EngineRequest(
            id=str(i),
            prompt=tokenizer.encode(case.prompts[i % len(case.prompts)], add_special_tokens=False),
            sampling=SamplingParams(
                max_tokens=case.tokens,
                seed=SEED + 1000 * number + i,
                temperature=case.temperature,
                ignore_eos=True,
                grammar=grammar,
            ),
        )
        for i in range(case.requests)
    ]


def together(benches: tuple["Bench", "Bench"], requests: list[EngineRequest]) -> dict[str, Answers]:
    """Both answer the same requests, in turns."""
    for bench in benches:
        bench.begin(requests)
    going_on = True
    while going_on:
        turns = [bench.turn() for bench in benches]
        going_on = any(turns)
    return {bench.method: dict(bench.answers) for bench in benches}


class OwnTime:
    """A clock that stands still while it is not its engine's turn."""

    def __init__(self) -> None:
        self._behind_s = 0.0
        self._stopped_s: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """A turn."""
        if self._stopped_s is not None:
            self._behind_s += time.monotonic() - self._stopped_s
            self._stopped_s = None
        yield
        self._stopped_s = time.monotonic()

    def monotonic_s(self) -> float:
        """See `maitred.core.clock.Clock`."""
        return (time.monotonic() if self._stopped_s is None else self._stopped_s) - self._behind_s

    def wall_s(self) -> float:
        """See `maitred.core.clock.Clock`."""
        return time.time()


class Bench:
    """An engine, and what it did in a round.

    Args:
        method: Of its speculation.
        model: That it runs.
    """

    def __init__(self, method: Method, model: Path) -> None:
        self.method = method
        self.tokenizer = Tokenizer.load(BUNDLED_MODEL)
        config = EngineConfig(
            device="cpu",
            dtype="fp32",
            max_sequences=FULL_BATCH,
            kv_memory_bytes=512 << 20,
            speculation=SpeculationConfig(
                method=method, draft_model=str(BUNDLED_MODEL) if method in ("draft_model", "auto") else None
            ),
        )
        self._clock = OwnTime()
        self._engine: Engine = build(model, config, clock=self._clock)[0]
        self._before = LoadReport()
        self._seconds = 0.0
        self.cpu_s = 0.0
        self.answers: Answers = defaultdict(list)

    def begin(self, requests: list[EngineRequest]) -> None:
        """A new round."""
        self.answers.clear()
        self._seconds = self.cpu_s = 0.0
        self._before = self._engine.load()
        for request in requests:
            self._engine.submit(self, request)

    def turn(self) -> bool:
        """Some steps; False: all is answered."""
        with self._clock.running():
            return self._turn()

    def _turn(self) -> bool:
        for _ in range(TURN_STEPS):
            if not self._engine.occupied:
                return False
            self._engine.max_idle_s()  # lets in those whose grammars are compiled
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            outputs = self._engine.step()
            self._seconds += time.perf_counter() - start_s
            self.cpu_s += time.process_time() - start_cpu_s
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

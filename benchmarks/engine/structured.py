"""What structured output accepts, what it lets through that it should not, and what it costs and saves.

* **MaskBench** (Geng et al., JSONSchemaBench, arXiv:2501.10868): schemas as people write them, with instances that are
  valid and such that are not. Each schema is taken as a strict one. Of those accepted, each instance is put to the
  masks token by token, as if a model had written it.
* **JSON-Schema-Test-Suite** (json-schema.org): the same with the cases that test validators, by draft; what is
  mandatory, and what is optional, apart.
* **Extraction**: answers of the bundled model to a strict schema, with the tokens that are forced taken as they come,
  and with every token sampled: steps of the model, time, and whether the answers are the same.

The first two need data that is not part of this repository: archives (``.tar.xz``) of MaskBench's files, one schema
each, and of the suite's folder ``tests``. A part whose archive is not there is left out.
"""

import argparse
import json
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from benchmarks.support.report import Report, percentiles
from maitred.config.tree import BUNDLED_MODEL
from maitred.core.grammar import Constraint
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from maitred.engine.engine import Engine
from maitred.engine.grammar.compiler import load_vocabulary
from maitred.text.grammar.language import LIMITS, GrammarFault, grammar_source
from maitred.text.grammar.reading import parse_grammar
from maitred.text.tokenizer import Tokenizer

SEED = 20261122
VOCABULARY, EOS = 4096, (4,)
DATA = Path("../shared/data/conformance")
MASKBENCH, SUITE = "maskbench_sample.tar.xz", "json_schema_test_suite_draft7_2020-12.tar.xz"
DRAFTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
QUICK_SHARE = 6
"""Of the schemas, one in so many is taken by a quick run."""
REQUESTS, QUICK_REQUESTS = 48, 8
TOWN = {
    "type": "object",
    "properties": {
        "name_of_the_town": {"type": "string", "maxLength": 24},
        "country_it_lies_in": {"enum": ["France", "Italy", "Norway", "Portugal"]},
        "number_of_inhabitants": {"type": "integer", "minimum": 1000, "maximum": 999_999},
        "lies_on_a_river": {"type": "boolean"},
        "sights_worth_seeing": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 2},
    },
    "required": [
        *("name_of_the_town", "country_it_lies_in", "number_of_inhabitants"),
        *("lies_on_a_river", "sights_worth_seeing"),
    ],
    "additionalProperties": False,
}


@dataclass
class Findings:
    """Of a set of schemas and their instances."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    wrong_accepts: list[list[str]] = field(default_factory=list)
    compile_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, Any]:
        """For the result file."""
        counts = self.counts
        return {
            **counts,
            "share_accepted": round(counts["accepted"] / max(1, counts["schemas"]), 4),
            "wrong_accepts": len(self.wrong_accepts),
            "share_of_valid_rejected": round(counts["valid_rejected"] / max(1, counts["valid"]), 4),
            "refusals": dict(self.refusals.most_common(12)),
            "of_wrong_accepts": self.wrong_accepts[:10],
        }


class Judge:
    """Puts schemas and instances to what the engine uses."""

    def __init__(self) -> None:
        self._vocabulary: LLTokenizer = load_vocabulary(BUNDLED_MODEL, VOCABULARY, EOS)
        self._mask = np.empty(VOCABULARY // 32, np.int32)

    def judge(self, findings: Findings, name: str, schema: object, instances: list[tuple[object, bool]]) -> None:
        """One schema."""
        findings.counts["schemas"] += 1
        start_s = time.perf_counter()
        try:
            grammar = parse_grammar(Constraint("json_schema", schema, "schema"))
            matcher = LLMatcher(self._vocabulary, grammar_source(grammar), log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise GrammarFault(matcher.get_error())
        except GrammarFault as fault:
            findings.refusals[str(fault).split(" at #")[0][:72]] += 1
            return
        finally:
            findings.compile_s.append(time.perf_counter() - start_s)
        findings.counts["accepted"] += 1
        for instance, valid in instances:
            try:
                text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False).encode()
            except UnicodeEncodeError:
                continue  # half a character, which no UTF-8 says
            taken = self._takes(findings, matcher.deep_copy(), text)
            findings.counts["valid" if valid else "invalid"] += 1
            if valid and not taken:
                findings.counts["valid_rejected"] += 1
            if taken and not valid:
                findings.wrong_accepts.append([name, text.decode()[:80]])

    def _takes(self, findings: Findings, matcher: LLMatcher, text: bytes) -> bool:
        for token in self._vocabulary.tokenize_bytes(text):
            start_s = time.perf_counter()
            matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            findings.mask_s.append(time.perf_counter() - start_s)
            if not (int(self._mask[token // 32]) >> token % 32) & 1 or not matcher.consume_token(token):
                return False
        return matcher.is_accepting()


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one schema in {QUICK_SHARE}, {QUICK_REQUESTS} answers")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with the archives")
    arguments = parser.parse_args()
    report = Report("structured", seed=SEED, quick=arguments.quick)
    share = QUICK_SHARE if arguments.quick else 1
    judge = Judge()
    if (archive := arguments.data / MASKBENCH).is_file():
        maskbench(report, judge, archive, share)
    if (archive := arguments.data / SUITE).is_file():
        suite(report, judge, archive, share)
    extraction(report, QUICK_REQUESTS if arguments.quick else REQUESTS)
    return report.finish()


def maskbench(report: Report, judge: Judge, archive: Path, share: int) -> None:
    """Schemas as people write them."""
    findings = Findings()
    for name, entry in [*_files(archive)][::share]:
        judge.judge(findings, name, entry["schema"], [(test["data"], test["valid"]) for test in entry["tests"]])
    mask, compiled = percentiles(findings.mask_s), percentiles(findings.compile_s)
    report.figures["maskbench"] = {**findings.figures, "mask_s": mask, "compile_s": compiled}
    print("maskbench", report.figures["maskbench"], flush=True)
    report.require("MaskBench: wrong accepts", len(findings.wrong_accepts), at_most=0)
    report.require("share of schemas accepted", report.figures["maskbench"]["share_accepted"], at_least=0.75)
    report.require("mask p99, ms", 1e3 * mask["p99"], at_most=1.0)
    report.require("compile p99, ms", 1e3 * compiled["p99"], at_most=100.0)


def suite(report: Report, judge: Judge, archive: Path, share: int) -> None:
    """The cases that test validators."""
    for draft, dialect in DRAFTS.items():
        for optional in (False, True):
            findings = Findings()
            for name, groups in _files(archive):
                if f"/{draft}/" not in name or ("/optional/" in name) != optional:
                    continue
                for group in groups[::share]:
                    schema = group["schema"]
                    if isinstance(schema, dict):
                        schema = {"$schema": dialect, **schema}
                    tests = [(test["data"], test["valid"]) for test in group["tests"]]
                    judge.judge(findings, f"{name}: {group['description']}", schema, tests)
            part = f"{draft}, optional" if optional else draft
            report.figures[part] = findings.figures
            print(part, findings.figures, flush=True)
            report.require(f"{part}: wrong accepts", len(findings.wrong_accepts), at_most=0)


def extraction(report: Report, requests: int) -> None:
    """What forced tokens save."""
    engine, _ = build(BUNDLED_MODEL, EngineConfig(max_sequences=16, threads=1))
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    figures: dict[str, Any] = {}
    for at_once in (1, 8):
        _run(engine, tokenizer, 1, 1, forced=True)  # compiled, and warm
        sampled, same = _run(engine, tokenizer, requests, at_once, forced=False)
        forced, others = _run(engine, tokenizer, requests, at_once, forced=True)
        figures[f"{at_once} at once"] = {
            "sampled": sampled,
            "forced": forced,
            "steps_saved": round(1 - forced["steps_per_token"] / sampled["steps_per_token"], 4),
            "time_per_token": round(forced["s_per_token"] / sampled["s_per_token"], 4),
            "same_answers": sum(one == other for one, other in zip(same, others, strict=True)),
        }
    report.figures["extraction"] = figures
    print("extraction", figures, flush=True)
    report.require("model steps saved by forced tokens", figures["1 at once"]["steps_saved"], at_least=0.3)


def _run(
    engine: Engine, tokenizer: Tokenizer, requests: int, at_once: int, *, forced: bool
) -> tuple[dict[str, float], list[list[int]]]:
    """Figures and answers, so many at a time; where log-probabilities are asked for, nothing is forced."""
    grammar = parse_grammar(Constraint("json_schema", TOWN, "response_format"))
    before, start_s = engine.load(), time.perf_counter()
    answers: list[list[int]] = [[] for _ in range(requests)]
    submitted = 0
    while submitted < requests or engine.occupied:
        while submitted < requests and engine.load().running + engine.load().waiting < at_once:
            prompt = tokenizer.encode(f"Town number {submitted + 1} on the list is", add_special_tokens=True)
            sampling = SamplingParams(
                max_tokens=200, seed=submitted, temperature=0.8, grammar=grammar, top_logprobs=None if forced else 0
            )
            engine.submit("bench", EngineRequest(f"{forced}-{submitted}", prompt, sampling))
            submitted += 1
        for output in engine.step().get("bench", ()):
            answers[int(output.request_id.rpartition("-")[2])] += output.delta.tokens
    seconds, after = time.perf_counter() - start_s, engine.load()
    tokens, steps = after.output_tokens - before.output_tokens, after.steps - before.steps
    figures = {
        "tokens": tokens,
        "steps": steps,
        "forced_tokens": after.forced_tokens - before.forced_tokens,
        "steps_per_token": round(steps / tokens, 4),
        "s_per_token": round(seconds / tokens, 6),
    }
    return figures, answers


def _files(archive: Path) -> Iterator[tuple[str, Any]]:
    """The JSON files of an archive, in the order of their names."""
    with tarfile.open(archive) as opened:
        members = [
            member for member in opened.getmembers() if member.name.endswith(".json") and "remotes/" not in member.name
        ]
        for member in sorted(members, key=lambda one: one.name):
            content = opened.extractfile(member)
            assert content is not None
            yield member.name, json.load(content)


if __name__ == "__main__":
    sys.exit(main())

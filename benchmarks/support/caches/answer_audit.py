"""Answers that clients got from a cache, held against what was computed first, the ledger and the engine."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.support.caches.askers import Came
from benchmarks.support.ledger_audit import read_ledger
from benchmarks.support.report import Report
from benchmarks.support.tenant_gateway import settled
from maitred.core.usage import UsageEvent
from maitred.store.config import StoreConfig
from maitred.testing.server_process import ServerProcess

SHARED = ("hit", "coalesced")
"""What ``x-maitred-cache`` says of answers that were not computed for their requests."""
_KINDS = ("prompt", "cached", "output", "saved")
_POLL_S = 0.1
_WITHIN_S = 120.0


@dataclass(frozen=True)
class Books:
    """What is written down of all requests.

    Attributes:
        lines: The ledger.
        samples: The metrics, summed over their labels.
    """

    lines: Sequence[UsageEvent]
    samples: dict[str, float]

    def lines_since(self, before: "Books") -> list[UsageEvent]:
        """Lines that were not there before."""
        known = {line.id for line in before.lines}
        return [line for line in self.lines if line.id not in known]

    def counted_since(self, before: "Books", sample: str) -> float:
        """What a counter has counted since."""
        return self.samples.get(sample, 0.0) - before.samples.get(sample, 0.0)


async def books_of(server: ServerProcess, requests: int) -> Books:
    """Waits until nothing runs and the ledger has a line of each request, or time is up; returns what is written.

    The ledger is read only when the journal has nothing for it and all requests are counted: it can be long, and
    workers tell their counts a moment later.
    """
    deadline_s = time.monotonic() + _WITHIN_S
    while True:
        samples = await settled(server)
        is_late = time.monotonic() > deadline_s
        is_counted = samples.get("maitred_cache_lookups_total", 0.0) >= requests
        if is_late or (is_counted and not samples["maitred_ledger_backlog"]):
            lines = await read_ledger(StoreConfig(folder=str(server.log.parent / "data")))
            if is_late or len(lines) >= requests:
                return Books(lines, samples)
        await asyncio.sleep(_POLL_S)


def require_equal(report: Report, name: str, replies: Sequence[Came]) -> None:
    """Holds every answer against the one that was computed first for its tenant and its question.

    All fields are compared with those of answers in the same form; text, finish reason and tokens across all APIs.
    """
    failures = [came for came in replies if came.answer is None]
    for came in failures[:5]:
        print(f"{name}: failed: {came}", flush=True)
    report.require(f"{name}: requests that failed", len(failures), at_most=0)
    by_place: dict[tuple[int, int, bool], list[Came]] = defaultdict(list)
    for came in replies:
        by_place[came.asked.place].append(came)
    wrong: Counter[str] = Counter()
    owners: dict[str, set[tuple[int, int, bool]]] = defaultdict(set)
    compared_whole = 0
    for place, group in by_place.items():
        computed = [came for came in group if came.cache == "miss"]
        first = computed[0] if computed else group[0]
        wrong["without a computed answer"] += not computed
        wrong["computed more than once"] += max(0, len(computed) - 1)
        forms: dict[tuple[str, bool], bytes] = {(first.asked.api, first.asked.streamed): first.rest}
        for came in group:
            owners[came.key].add(place)
            if came is first or came.answer is None:
                continue
            wrong["other than the first"] += came.answer != first.answer
            form = (came.asked.api, came.asked.streamed)
            wrong["with other fields"] += forms.setdefault(form, came.rest) != came.rest
            compared_whole += form == (first.asked.api, first.asked.streamed)
            wrong["with another key"] += came.key != first.key
            wrong["neither hit nor coalesced nor miss"] += came.cache not in (*SHARED, "miss")
            if came.answer != first.answer and wrong["other than the first"] <= 3:
                print(f"{name}: not equal: {came}\nfirst: {first}", flush=True)
    wrong["found under the key of others"] = sum(len(places) > 1 for places in owners.values())
    report.figures[name] = {
        "requests": len(replies),
        "found_by": dict(Counter(came.cache for came in replies)),
        "hits_by_api": dict(Counter(came.asked.api for came in replies if came.cache in SHARED)),
        "hits_streamed": sum(came.asked.streamed for came in replies if came.cache in SHARED),
        "places": len(by_place),
        "compared_in_all_fields_with_the_computed_one": compared_whole,
    }
    for what, count in wrong.items():
        report.require(f"{name}: answers {what}", count, at_most=0)


def require_no_leak(report: Report, name: str, replies: Sequence[Came]) -> None:
    """Holds the prompt tokens of answers to canaries against the tenant that asked.

    The system texts of tenants differ by a word each, so the same question has as many prompt tokens for no two.
    """
    told: dict[tuple[int, bool], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    canaries = [came for came in replies if came.asked.is_canary and came.answer is not None]
    for came in canaries:
        tenant, question, is_completion = came.asked.place
        assert came.answer is not None
        told[question, is_completion][tenant].add(came.answer.prompt_tokens)
    leaks = 0
    for tenants in told.values():
        seen = Counter(tokens for all_tokens in tenants.values() for tokens in all_tokens)
        leaks += sum(count - 1 for count in seen.values()) + sum(len(tokens) - 1 for tokens in tenants.values())
    report.figures[f"{name}: canaries"] = {
        "answers": len(canaries),
        "hits": sum(came.cache in SHARED for came in canaries),
        "questions_of_several_tenants": sum(len(tenants) > 1 for tenants in told.values()),
    }
    report.require(f"{name}: canaries of another tenant", leaks, at_most=0)


def require_books(report: Report, name: str, replies: Sequence[Came], before: Books, after: Books) -> None:
    """Holds ledger, metrics and what clients saw against each other: to the token."""
    lines = after.lines_since(before)

    answers = [(came.cache, came.answer) for came in replies if came.answer is not None]
    computed = [answer for cache, answer in answers if cache == "miss"]
    shared = [answer for cache, answer in answers if cache in SHARED]
    saved = sum(answer.prompt_tokens + answer.output_tokens for answer in shared)
    found = Counter(cache for cache, _ in answers)
    by_cache = Counter(line.cache for line in lines)
    figures = {f"{kind}_tokens": sum(getattr(line, f"{kind}_tokens") for line in lines) for kind in _KINDS}
    report.figures[f"{name}: ledger"] = figures
    differences = {
        "lines and requests": len(lines) - len(replies),
        "lines of hits and hits": by_cache["exact"] - found["hit"],
        "lines of coalesced answers and those": by_cache["coalesced"] - found["coalesced"],
        "prompt tokens of ledger and computed answers": figures["prompt_tokens"]
        - sum(answer.prompt_tokens for answer in computed),
        "output tokens of ledger and computed answers": figures["output_tokens"]
        - sum(answer.output_tokens for answer in computed),
        "saved tokens of ledger and hits": figures["saved_tokens"] - saved,
        "saved tokens of metrics and hits": after.counted_since(before, "maitred_cache_saved_tokens_total") - saved,
    }
    for what, difference in differences.items():
        report.require(f"{name}: difference between {what}", abs(difference), at_most=0)
    require_engine(report, name, before, after, sequences=len(computed))


def require_engine(
    report: Report, name: str, before: Books, after: Books, *, sequences: int, cut: bool = False
) -> None:
    """Holds the ledger against the counters of the engine, and these against what it was to compute.

    Args:
        report: Gets the bars.
        name: Of the part.
        before: What was written before.
        after: What is written now.
        sequences: How many the engine was to compute.
        cut: Whether all readers have left. The tokens of the step that was running then are never billed.
    """
    lines = after.lines_since(before)
    for kind in ("prompt", "cached", "output"):
        counted = after.counted_since(before, f"maitred_engine_{kind}_tokens_total")
        more = sum(getattr(line, f"{kind}_tokens") for line in lines) - counted
        if cut and kind == "output":
            report.figures[name]["sampled_and_not_billed"] = -more
            report.require(f"{name}: output tokens of the ledger beyond the engine's", more, at_most=0)
        else:
            report.require(f"{name}: difference between {kind} tokens of ledger and engine", abs(more), at_most=0)
    ended = sum(after.counted_since(before, f"maitred_engine_{how}_total") for how in ("finished", "cancelled"))
    report.require(f"{name}: sequences too many or too few", abs(ended - sequences), at_most=0)
    held = after.samples["maitred_engine_kv_blocks_total"] - after.samples["maitred_engine_kv_blocks_free"]
    report.require(f"{name}: KV blocks not free at the end", held, at_most=0)

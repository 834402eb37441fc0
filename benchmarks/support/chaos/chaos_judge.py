"""What a chaos run has seen, held against what is promised."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.chaos.chaos_answers import BOTH_ENDS, DIFFERENT, HANGING, SILENT, UPSTREAM_MODEL, Asked
from benchmarks.support.chaos.chaos_trouble import ENGINE_KINDS, UPSTREAM_KINDS, Trouble
from benchmarks.support.installation import MODEL
from benchmarks.support.report import Report, percentiles

PRICE = {"prompt": 1.0, "output": 2.0}
NOT_ONE_LINE = "requests with other than one line in the ledger"
OTHER_TOKENS = "whole answers with other tokens or another price in the ledger"
CHARGED = "answers that were not whole and were charged"


@dataclass(frozen=True)
class Line:
    """Of the ledger."""

    outcome: str
    prompt_tokens: int
    output_tokens: int
    cost_nusd: int


@dataclass
class Run:
    """All that a run has seen.

    Attributes:
        asked: Every request.
        played: When each trouble began in truth, in seconds, by who was hit.
        left: What was held at the end, by name.
        settled_s: Until nothing was.
        exit_code: Of the gateway.
        lines: Of the ledger, by request.
        engines_up: How often so many were ready, of looks at even times.
        counted: The server's own counters, over all lives of the engines.
    """

    asked: list[Asked] = field(default_factory=list)
    played: dict[str, list[tuple[float, Trouble]]] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    settled_s: float = 0.0
    exit_code: int = -1
    lines: dict[str, list[Line]] = field(default_factory=dict)
    engines_up: Counter[int] = field(default_factory=Counter)
    counted: dict[str, float] = field(default_factory=dict)


def judge(report: Report, run: Run, seconds: float) -> None:
    """Holds what was seen against what is promised."""
    faults = Counter(asked.fault for asked in run.asked)
    books = Counter(account_of(asked, run.lines.get(asked.reply.request_id, [])) for asked in run.asked)
    report.figures = {
        "seconds": seconds,
        "played": {
            name: [[at_s, trouble.kind, trouble.victim] for at_s, trouble in played]
            for name, played in run.played.items()
        },
        "models": {model: _figures([a for a in run.asked if a.question.body["model"] == model])
                   for model in (MODEL, UPSTREAM_MODEL)},
        "counted": run.counted,
        "share_of_time_by_engines_up": {
            up: round(looks / run.engines_up.total(), 3) for up, looks in sorted(run.engines_up.items())
        },
        "settled_s": round(run.settled_s, 2),
        "left": run.left,
        "wrong": [_received(asked) for asked in run.asked if asked.fault][:20],
        "wrong_lines": [
            _received(asked) | {"lines": [str(line) for line in run.lines.get(asked.reply.request_id, [])]}
            for asked in run.asked
            if account_of(asked, run.lines.get(asked.reply.request_id, []))
        ][:20],
    }  # fmt: skip
    print(json.dumps(report.figures, indent=1), flush=True)
    kinds = {(name, trouble.kind) for name, played in run.played.items() for _, trouble in played}
    report.require("kinds of trouble", len(kinds), at_least=len(ENGINE_KINDS) + len(UPSTREAM_KINDS))
    report.require("requests", len(run.asked), at_least=5 * seconds)
    for fault in (DIFFERENT, SILENT, BOTH_ENDS, HANGING):
        report.require(f"answers {fault}", faults[fault], at_most=0)
    for fault in (NOT_ONE_LINE, OTHER_TOKENS, CHARGED):
        report.require(fault, books[fault], at_most=0)
    report.require("held at the end", sum(run.left.values()), at_most=0)
    report.require("exit code", run.exit_code, at_most=0)


def account_of(asked: Asked, lines: Sequence[Line]) -> str:
    """What is wrong with its lines. A refusal that took nothing needs none."""
    reply = asked.reply
    if len(lines) > 1 or (reply.status == 200 and not lines):
        return NOT_ONE_LINE
    if not reply.whole:
        # Who left, because it took too long, pays for what was made; that it took too long is another fault.
        return CHARGED if any(line.cost_nusd for line in lines) and not reply.left else ""
    (line,) = lines
    price = round(1000 * (PRICE["prompt"] * reply.prompt_tokens + PRICE["output"] * reply.output_tokens))
    received = Line("finished", reply.prompt_tokens, reply.output_tokens, price)
    return "" if line == received else OTHER_TOKENS


def _figures(asked: Sequence[Asked]) -> dict[str, Any]:
    return {
        "requests": len(asked),
        "streamed": sum(request.stream for request in asked),
        "whole_share": round(sum(request.reply.whole for request in asked) / max(1, len(asked)), 4),
        "ends": dict(Counter(request.end for request in asked).most_common()),
        "seconds": percentiles([request.reply.seconds for request in asked]),
        "longest_s": round(max((request.reply.seconds for request in asked), default=0.0), 2),
    }


def _received(asked: Asked) -> dict[str, Any]:
    reply = asked.reply
    return {
        "request": reply.request_id,
        "at_s": round(asked.asked_s, 2),
        "stream": asked.stream,
        "end": asked.end,
        "status": reply.status,
        "error": f"{reply.code} {reply.message}",
        "text": reply.text[-80:],
        "tokens": [reply.prompt_tokens, reply.output_tokens, asked.question.tokens],
    }

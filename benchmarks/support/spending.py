"""A tenant with a budget, callers who spend it to the last, and what must be true then."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from benchmarks.support.concurrent_callers import ConcurrentCallers, calls, counted, ending_of
from benchmarks.support.installation import Installation, Key, Organisation
from benchmarks.support.ledger_audit import (
    Budget,
    ledger_of,
    require_spent_within,
    require_true_lines,
    settled,
    tokens_beyond,
)
from benchmarks.support.report import Report
from benchmarks.support.single_request import Reply
from maitred.core.usage import Price, UsageEvent, to_usd
from maitred.testing.script import AnswerFault, EngineScript, ScriptedAnswer

PRICE = {"prompt": 2.0, "cached": 0.5, "output": 6.0}
USD_PER_REQUEST = 60e-6
"""Of the budget: about a quarter of what an average answer costs, so that it runs out before the requests do."""
FAULTS = (AnswerFault.DROP, AnswerFault.HALF_FRAME, AnswerFault.GARBAGE, *[AnswerFault.REJECT] * 20)
STALLS = (AnswerFault.STALL,) * 3
ANSWERS = 997
"""After these the engine begins anew; among them are the faults."""
LEAST_USED = 0.99
"""Of a budget, once it refuses everything."""
QUOTA_IN_A_ROW = 64
"""Refusals after which a budget counts as spent."""
MOST_TO_DRAIN = 20_000
SHOWN = 5


@dataclass(frozen=True)
class Account:
    """One tenant: a key that a rate limits, a key that none does, and a budget for both together.

    Attributes:
        id: Of the organisation.
        requests: That it is made for.
    """

    id: str
    requests: int
    limited: Key
    free: Key

    @classmethod
    def open(cls, id_: str, requests: int) -> "Account":
        """A new one."""
        rate = {
            "tokens_per_minute": cls.tokens_per_minute_of(requests),
            "burst": {"tokens_per_minute": cls.burst_of(requests)},
        }
        return cls(id_, requests, Key(limits=rate), Key())

    @staticmethod
    def tokens_per_minute_of(requests: int) -> int:
        """The rate: far less than so many requests want."""
        return requests * 6

    @staticmethod
    def burst_of(requests: int) -> int:
        """Several of the largest requests."""
        return max(1000, requests // 2)

    @property
    def organisation(self) -> Organisation:
        """For the configuration."""
        budget_usd = round(self.requests * USD_PER_REQUEST, 6)
        return Organisation({"limited": self.limited, "free": self.free}, limits={"usd_total": budget_usd})


@dataclass(frozen=True)
class Statement:
    """An account at the end."""

    lines: Sequence[UsageEvent]
    budget: Budget
    leases: float

    @property
    def spent(self) -> int:
        """In nano-dollars."""
        return sum(line.cost_nusd for line in self.lines)

    def figures(self, replies: Sequence[Reply]) -> dict[str, object]:
        """For the result file."""
        return {
            "requests": len(replies),
            "endings": counted(replies),
            "ledger_lines": len(self.lines),
            "budget_usd": to_usd(self.budget.limit),
            "spent_usd": to_usd(self.spent),
            "charged_usd": to_usd(self.budget.charged),
        }


async def drain(
    callers: ConcurrentCallers, name: str, key: Key, rng: random.Random, *, patience_s: float | None = None
) -> Sequence[Reply]:
    """Spends what is left of the budget, until nothing but refusals for good comes; these."""
    refused: list[Reply] = []

    def is_last(reply: Reply) -> bool:
        if len(refused) < QUOTA_IN_A_ROW:
            if ending_of(reply) == "insufficient_quota":
                refused.append(reply)
            else:
                refused.clear()
        return len(refused) == QUOTA_IN_A_ROW

    requests = calls(name, [key.secret], rng, patience_s=patience_s)
    await callers.ask_all(islice(requests, MOST_TO_DRAIN), is_last)
    return refused


async def statement_of(installation: Installation, account: Account, admin: Key, *, within_s: float) -> Statement:
    """What is written down of an account, once nothing is held for it any more."""
    budget, leases = await settled(installation, account.id, admin.secret, within_s=within_s)
    lines = [line for line in await ledger_of(installation) if line.organisation == account.id]
    return Statement(lines, budget, leases)


def require_sound(
    report: Report,
    account: Account,
    statement: Statement,
    replies: Sequence[Reply],
    last: Sequence[Reply],
    *,
    losses: int = 0,
    slices: float = 0.0,
) -> None:
    """Holds an account against all that was promised.

    Args:
        report: Gets the bars.
        account: Which one.
        statement: Its end.
        replies: All that its callers got.
        last: The last of them.
        losses: How often Redis came back empty since the account was opened: its buckets begin full then, and may give
            another burst. Those of counters in memory begin as the ledger says that they were.
        slices: Part of every limit that gateways may give without Redis.
    """
    name, budget, lines = account.id, statement.budget, statement.lines
    overshoot = round(slices * budget.limit)
    require_spent_within(report, name, lines, budget, statement.leases, overshoot=overshoot)
    require_true_lines(report, name, lines, replies, Price.per_million_usd(**PRICE))
    used = statement.spent / budget.limit
    report.require(f"{name}: part of the budget used", used, at_least=LEAST_USED - slices)
    beyond = tokens_beyond(
        [line for line in lines if line.key == account.limited.id],
        burst=(1 + losses + slices) * account.burst_of(account.requests),
        per_s=(1 + slices) * account.tokens_per_minute_of(account.requests) / 60,
    )
    report.require(f"{name}: tokens beyond burst and rate", beyond, at_most=0)
    unknown = [reply for reply in replies if reply.status in (401, 403)]
    faults = [reply for reply in replies if reply.code == "internal_error"]
    for reply in (*unknown, *faults)[:SHOWN]:
        print("WRONG", reply, flush=True)
    report.require(f"{name}: valid keys refused", len(unknown), at_most=0)
    report.require(f"{name}: internal errors", len(faults), at_most=0)
    quota = sum(ending_of(reply) == "insufficient_quota" and reply.should_retry == b"false" for reply in last)
    report.require(f"{name}: last requests refused for good with insufficient_quota", quota, at_least=QUOTA_IN_A_ROW)


def script(rng: random.Random, faults: Sequence[AnswerFault]) -> EngineScript:
    """Answers of an engine: shorter than asked or cut by `max_tokens`, at several speeds, some with a fault."""
    left = list(faults)
    answers = [
        ScriptedAnswer(
            tokens=rng.choices(range(300, 340), k=rng.randint(1, 128)) if rng.random() < 0.6 else None,
            tokens_per_step=rng.randint(2, 16),
            wait_steps=rng.randint(0, 3),
            cached_tokens=rng.choice((0, 0, 4)),
            fault=left.pop() if left else None,
            fault_after=rng.randint(0, 20),
            retryable=rng.random() < 0.5,
        )
        for _ in range(ANSWERS)
    ]
    rng.shuffle(answers)
    return EngineScript(answers=answers, again=True, step_s=0.004)

"""What an installation has written down, held against what its clients have seen."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.support.installation import Gateway, Installation
from benchmarks.support.report import Report
from benchmarks.support.single_request import Reply
from maitred.core.context import Outcome
from maitred.core.request import Usage
from maitred.core.usage import Price, UsageEvent, to_nano_usd
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.usage import MAX_ROWS, UsageQueries

BILLED = (Outcome.FINISHED, Outcome.CANCELLED)
_EVER_S = 1e11
_POLL_S = 0.1


@dataclass(frozen=True)
class Budget:
    """One budget as the administration shows it, in nano-dollars."""

    limit: int
    charged: int
    reserved: int
    remaining: int


async def ledger_of(installation: Installation) -> list[UsageEvent]:
    """Every line, once all gateways have written what they had in their journals."""
    for gateway in installation.gateways:
        while (await asyncio.to_thread(gateway.metrics))["maitred_ledger_backlog"]:  # noqa: ASYNC110 - it is not ours
            await asyncio.sleep(_POLL_S)
    return await read_ledger(installation.store)


async def read_ledger(store: StoreConfig) -> list[UsageEvent]:
    """Reads all lines of the ledger in a database."""
    lines: list[UsageEvent] = []
    async with open_database(store) as database:
        queries, after = UsageQueries(database), ""
        while True:
            page = await queries.events(0, _EVER_S, after=after, limit=MAX_ROWS)
            lines += page.events
            after = page.next
            if not after:
                return lines


def budget_of(gateway: Gateway, tenant: str, admin: str) -> Budget:
    """The only budget of a tenant."""
    answer = json.loads(gateway.get(f"/admin/v1/budgets?subject=tenant:{tenant}", admin))
    (found,) = answer["data"]
    return Budget(*(to_nano_usd(found[f"{name}_usd"]) for name in ("limit", "charged", "reserved", "remaining")))


def leases_of(gateway: Gateway) -> float:
    """Leases that it holds, for requests that run or have ended."""
    return sum(value for sample, value in gateway.metrics().items() if sample.startswith("maitred_leases{"))


async def settled(installation: Installation, tenant: str, admin: str, *, within_s: float) -> tuple[Budget, float]:
    """Waits until nothing is held any more, or the time is over.

    Returns:
        The budget, and the leases that are left.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        budget = await asyncio.to_thread(budget_of, installation.gateways[0], tenant, admin)
        leases = sum([await asyncio.to_thread(leases_of, gateway) for gateway in installation.gateways])
        if (not budget.reserved and not leases) or time.monotonic() > deadline_s:
            return budget, leases
        await asyncio.sleep(_POLL_S)


def require_true_lines(
    report: Report, name: str, lines: Sequence[UsageEvent], replies: Iterable[Reply], price: Price
) -> None:
    """Every answer that a client has seen whole is in the ledger once, as the client saw it, and at its price."""
    finished: dict[str, list[UsageEvent]] = {}
    for line in lines:
        if line.outcome is Outcome.FINISHED:
            finished.setdefault(line.request_id, []).append(line)
    wrong: Counter[str] = Counter()
    for reply in replies:
        if not reply.whole:
            continue
        found = finished.get(reply.request_id, [])
        if not found:
            wrong["missing"] += 1
        elif len(found) > 1:
            wrong["twice"] += 1
        elif (found[0].prompt_tokens, found[0].output_tokens) != (reply.prompt_tokens, reply.output_tokens):
            wrong["different"] += 1
    report.require(f"{name}: whole answers missing in the ledger", wrong["missing"], at_most=0)
    report.require(f"{name}: whole answers billed twice", wrong["twice"], at_most=0)
    report.require(f"{name}: whole answers with other tokens than the client was told", wrong["different"], at_most=0)
    mispriced = sum(line.cost_nusd != cost_of(line, price) for line in lines)
    report.require(f"{name}: lines not at their price", mispriced, at_most=0)


def cost_of(line: UsageEvent, price: Price) -> int:
    """What a line must cost."""
    if line.outcome not in BILLED:
        return 0
    return price.cost_nusd(Usage(line.prompt_tokens, line.output_tokens, line.cached_tokens))


def require_spent_within(
    report: Report, name: str, lines: Sequence[UsageEvent], budget: Budget, leases: float, *, overshoot: int = 0
) -> None:
    """The budget was kept, it is the sum of the ledger, and nothing is held.

    Args:
        report: Gets the bars.
        name: Of the part of the benchmark.
        lines: Of this budget's tenant.
        budget: Once nothing should be held any more.
        leases: Those that are left.
        overshoot: What may be spent beyond the budget, in nano-dollars, or be charged to it beside the ledger: where
            counters were lost, what gateways gave by themselves meanwhile may come to them both from the ledger and
            from the gateway.
    """
    spent = sum(line.cost_nusd for line in lines)
    report.require(f"{name}: overspend, nano-USD", max(0, spent - budget.limit), at_most=overshoot)
    report.require(f"{name}: charged beside the ledger, nano-USD", abs(budget.charged - spent), at_most=overshoot)
    report.require(f"{name}: still reserved, nano-USD", budget.reserved, at_most=0)
    report.require(f"{name}: leases left", leases, at_most=0)
    report.require(f"{name}: balance below zero, nano-USD", max(0, -budget.remaining), at_most=overshoot)


def tokens_beyond(lines: Sequence[UsageEvent], *, burst: float, per_s: float) -> float:
    """Tokens in these lines beyond what a bucket gives from the first request's beginning to the last one's end."""
    if not lines:
        return 0.0
    begun_s = min(line.time_s - line.duration_s for line in lines)
    ended_s = max(line.time_s for line in lines)
    tokens = sum(line.prompt_tokens + line.output_tokens for line in lines)
    return max(0.0, tokens - burst - per_s * (ended_s - begun_s))

"""Opening balances: what declared tenants have spent elsewhere before, as lines of the ledger.

Each is one line, written once, at the first start or reload that declares it. It counts like the cost of a request: in
sums of usage, and in budgets, in their windows of that day. What an organisation has spent includes what its teams
have; its line costs what they have not. Its budget can begin anew on other days than theirs, so each line is charged
to its own tenant's budgets only, and that of an organisation to those of the installation, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from maitred.admission.policy.claims import day_at, spend_claim, watched_counters
from maitred.admission.policy.rules import rules_for
from maitred.admission.prices import FREE
from maitred.core.clock import Clock
from maitred.core.limits import LimitSource
from maitred.core.usage import UsageEvent, to_nano_usd
from maitred.identity.declared_config import OrganisationConfig
from maitred.store.ledger import UsageLedger
from maitred.store.usage import MAX_ROWS, UsageQueries

_REQUEST_ID = "opening-balance"


class OpeningBalance(NamedTuple):
    """Amount that a tenant has spent before.

    Attributes:
        tenant: The tenant.
        organisation: Its organisation, or itself.
        cost_nusd: What counts in sums, in nano-dollars.
        charged_nusd: What counts in budgets.
    """

    tenant: str
    organisation: str
    cost_nusd: int
    charged_nusd: int


async def write_opening_balances(
    tenants: Mapping[str, OrganisationConfig],
    limits: LimitSource,
    usage: UsageQueries,
    ledger: UsageLedger,
    clock: Clock,
) -> None:
    """Writes the lines that are not in the ledger yet.

    Args:
        tenants: The section `tenants`.
        limits: The limits that hold, with those of these tenants.
        usage: Queries of the ledger.
        ledger: The ledger.
        clock: The clock.

    Raises:
        StoreUnavailable: The ledger cannot be read or written.
    """
    lines = [
        line for tenant_id, config in tenants.items() for line in _lines_of(tenant_id, config) if line.charged_nusd
    ]
    if not lines:
        return
    now_s = clock.wall_s()
    written = await _tenants_with_line(usage, now_s)
    for line in lines:
        if line.tenant in written:
            continue
        subjects = [f"tenant:{line.tenant}", *(["*"] if line.tenant == line.organisation else [])]
        event = UsageEvent(
            id=f"{_REQUEST_ID}-{line.tenant}",
            request_id=_REQUEST_ID,
            time_s=now_s,
            key="",
            tenant=line.tenant,
            organisation=line.organisation,
            model="",
            route=_REQUEST_ID,
            cost_nusd=line.cost_nusd,
            charges=dict.fromkeys(_budgets_of(subjects, limits, now_s), line.charged_nusd),
        )
        ledger.begin(event)
        ledger.record(event)
    await ledger.flush()


def _lines_of(organisation: str, config: OrganisationConfig) -> Iterator[OpeningBalance]:
    """Yields the lines of an organisation and its teams."""
    of_teams = {team_id: to_nano_usd(team.spent_usd) for team_id, team in config.teams.items()}
    nusd = to_nano_usd(config.spent_usd) or sum(of_teams.values())
    yield OpeningBalance(organisation, organisation, max(0, nusd - sum(of_teams.values())), nusd)
    for team_id, own in of_teams.items():
        yield OpeningBalance(team_id, organisation, own, own)


async def _tenants_with_line(usage: UsageQueries, now_s: float) -> set[str]:
    """Returns the tenants whose line is in the ledger."""
    found: set[str] = set()
    after = ""
    while True:
        page = await usage.report(
            0.0,
            now_s + 1,
            group_by=["tenant"],
            filters={"request_id": _REQUEST_ID},
            after=after,
            limit=MAX_ROWS,
        )
        found |= {row.group["tenant"] for row in page.rows}
        if not (after := page.next):
            return found


def _budgets_of(subjects: Sequence[str], limits: LimitSource, now_s: float) -> list[str]:
    """Returns the names of the budget counters of all models that these subjects are counted by now."""
    rules = [rule for rule in rules_for(subjects, limits, None) if rule.limit.kind.spend]
    day = day_at(now_s)
    return [spend_claim(watch, FREE.price, day).counter for watch in watched_counters(rules)]

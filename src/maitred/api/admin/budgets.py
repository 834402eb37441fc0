"""Route of budgets: the remaining amount of every spend limit, for every subject that it limits."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from maitred.admission.budgets import BudgetState
from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.errors import InvalidRequest
from maitred.core.tenancy import Scope
from maitred.core.usage import to_usd
from maitred.wire.admin import rules
from maitred.wire.admin.decode import decode_query
from maitred.wire.admin.requests import BudgetsQuery
from maitred.wire.admin.responses import BudgetBody, BudgetList
from maitred.wire.admin.times import to_iso
from maitred.wire.openai.faults import format_value

Budgets = Callable[[str], Awaitable[Sequence[BudgetState]]]
"""Returns the state of the budgets of one subject."""

_MOST_SUBJECTS = 1000
"""Number of subjects that are read for one page: most keys have no budget of their own, and a page must be answered
soon."""
_CHUNK = 200


class BudgetRoutes:
    """Admin routes of budgets.

    Args:
        admin: The parts that admin routes share.
        budgets: Returns the state of the budgets of one subject.
    """

    def __init__(self, admin: DirectoryAdmin, budgets: Budgets) -> None:
        self._admin = admin
        self._budgets = budgets

    def routes(self) -> list[Route]:
        """Returns the route that lists budgets."""
        text = "What budgets have left."
        return [
            Route(
                "GET",
                "/admin/v1/budgets",
                self.list,
                text,
                returns=BudgetList,
                query=BudgetsQuery,
                needs=Scope.ADMIN,
            )
        ]

    async def list(self, exchange: HttpExchange) -> None:
        """Answers with a page of budgets. The order is by subject: the installation, then tenants, then keys."""
        query = decode_query(exchange.query, BudgetsQuery)
        rules.check_page(query.limit, query.after)
        if query.subject is not None:
            rules.check_subject(query.subject)
            data = [_body(state) for state in await self._budgets(query.subject)]
            await self._admin.reply(exchange, BudgetList(data=data, has_more=False, next=None))
            return
        data, looked_at, last = [], 0, None
        async for subject in self._subjects_after(query.after):
            if looked_at == _MOST_SUBJECTS or len(data) >= query.limit:
                break
            data += [_body(state) for state in await self._budgets(subject)]
            looked_at, last = looked_at + 1, subject
        else:
            last = None
        await self._admin.reply(exchange, BudgetList(data=data, has_more=last is not None, next=last))

    async def _subjects_after(self, after: str) -> AsyncIterator[str]:
        sort, _, name = after.partition(":")
        if sort not in ("", "*", "tenant", "key"):
            raise InvalidRequest(f"after must be `next` of another page; got {format_value(after)}.", param="after")
        if not after:
            yield "*"
        if sort != "key":
            last = name
            while tenants := await self._admin.store.tenants(None, last, _CHUNK):
                for tenant in tenants:
                    yield f"tenant:{tenant.id}"
                last = tenants[-1].id
            name = ""
        last = name
        while keys := await self._admin.store.keys(None, last, _CHUNK):
            for key in keys:
                yield f"key:{key.id}"
            last = keys[-1].id


def _body(state: BudgetState) -> BudgetBody:
    return BudgetBody(
        id=state.limit.id,
        subject=state.subject,
        kind=state.limit.kind,
        model=state.limit.model,
        hard=state.limit.hard,
        limit_usd=to_usd(state.limit.value),
        charged_usd=to_usd(state.charged),
        reserved_usd=to_usd(state.reserved),
        remaining_usd=to_usd(state.remaining),
        resets_at=None if state.ends_s is None else to_iso(state.ends_s),
    )

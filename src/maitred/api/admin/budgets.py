"""The route of budgets: what every spend limit has left, for everyone whom it limits."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from maitred.admission.budgets import BudgetState
from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.errors import InvalidRequest
from maitred.core.money import usd_of
from maitred.core.tenancy import Scope
from maitred.wire.admin import rules
from maitred.wire.admin.decode import decode_query
from maitred.wire.admin.requests import BudgetsQuery
from maitred.wire.admin.responses import BudgetBody, BudgetList
from maitred.wire.admin.times import iso_of
from maitred.wire.openai.faults import shown

Budgets = Callable[[str], Awaitable[Sequence[BudgetState]]]
"""How the budgets that hold for one subject stand."""

_MOST_SUBJECTS = 1000
"""Looked at for one page: most keys have no budget of their own, and a page must come soon all the same."""
_CHUNK = 200


class BudgetRoutes:
    """Budgets.

    Args:
        office: What the routes share.
        budgets: How those of one subject stand.
    """

    def __init__(self, office: DirectoryAdmin, budgets: Budgets) -> None:
        self._office = office
        self._budgets = budgets

    def routes(self) -> list[Route]:
        """The route."""
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

    async def list(self, call: HttpExchange) -> None:
        """A page of budgets. Subject by subject: the installation, then tenants, then keys."""
        query = decode_query(call.query, BudgetsQuery)
        rules.check_page(query.limit, query.after)
        if query.subject is not None:
            rules.check_subject(query.subject)
            data = [_body(state) for state in await self._budgets(query.subject)]
            await self._office.reply(call, BudgetList(data=data, has_more=False, next=None))
            return
        data, looked_at, last = [], 0, None
        async for subject in self._subjects_after(query.after):
            if looked_at == _MOST_SUBJECTS or len(data) >= query.limit:
                break
            data += [_body(state) for state in await self._budgets(subject)]
            looked_at, last = looked_at + 1, subject
        else:
            last = None
        await self._office.reply(call, BudgetList(data=data, has_more=last is not None, next=last))

    async def _subjects_after(self, after: str) -> AsyncIterator[str]:
        sort, _, name = after.partition(":")
        if sort not in ("", "*", "tenant", "key"):
            raise InvalidRequest(f"after must be `next` of another page; got {shown(after)}.", param="after")
        if not after:
            yield "*"
        if sort != "key":
            last = name
            while tenants := await self._office.book.tenants(None, last, _CHUNK):
                for tenant in tenants:
                    yield f"tenant:{tenant.id}"
                last = tenants[-1].id
            name = ""
        last = name
        while keys := await self._office.book.keys(None, last, _CHUNK):
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
        limit_usd=usd_of(state.limit.value),
        charged_usd=usd_of(state.charged),
        reserved_usd=usd_of(state.reserved),
        remaining_usd=usd_of(state.remaining),
        resets_at=None if state.ends_s is None else iso_of(state.ends_s),
    )

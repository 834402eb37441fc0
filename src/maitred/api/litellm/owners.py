"""Routes of LiteLLM's `/team/*`, `/user/*` and `/budget/*`."""

from typing import Any
from uuid import uuid4

from msgspec import UNSET

from maitred.api.exchange import HttpExchange
from maitred.api.litellm.accounts import KeyRow, LitellmAccounts
from maitred.api.litellm.dialect import answer, litellm_route
from maitred.api.routes import Route
from maitred.core.errors import Forbidden, InvalidRequest
from maitred.core.tenancy import Scope, Tenant, is_id
from maitred.wire.admin.decode import decode_query
from maitred.wire.litellm.ids import BUDGET_PREFIX, USER_PREFIX, budget_id_of, is_team, tenant_id_of, user_id_of
from maitred.wire.litellm.requests import (
    BudgetFields,
    DeleteBudget,
    DeleteTeams,
    GenerateKey,
    NameBudgets,
    NoQuery,
    TeamFields,
    TeamQuery,
    UserFields,
    UserQuery,
    decode_fields,
)

_ROLES = (None, "internal_user", "internal_user_viewer")


class LitellmOwnerRoutes:
    """Routes of LiteLLM's teams, users and budgets.

    Args:
        accounts: Keys, teams, users and budgets.
        reserved: Ids of organisations that stand for no team.
    """

    def __init__(self, accounts: LitellmAccounts, reserved: frozenset[str] = frozenset({"operators"})) -> None:
        self._accounts = accounts
        self._reserved = reserved

    def routes(self) -> list[Route]:
        """Returns the routes in the order of their paths."""
        return [
            litellm_route("POST", "/team/new", self.new_team, reads=TeamFields),
            litellm_route("GET", "/team/info", self.team_info, query=TeamQuery, needs=Scope.INFERENCE),
            litellm_route("POST", "/team/update", self.update_team, reads=TeamFields),
            litellm_route("GET", "/team/list", self.list_teams, query=NoQuery),
            litellm_route("POST", "/team/delete", self.delete_teams, reads=DeleteTeams),
            litellm_route("POST", "/user/new", self.new_user, reads=UserFields),
            litellm_route("GET", "/user/info", self.user_info, query=UserQuery),
            litellm_route("POST", "/user/update", self.update_user, reads=UserFields),
            litellm_route("POST", "/budget/new", self.new_budget, reads=BudgetFields),
            litellm_route("POST", "/budget/info", self.budget_info, reads=NameBudgets),
            litellm_route("POST", "/budget/update", self.update_budget, reads=BudgetFields),
            litellm_route("GET", "/budget/list", self.list_budgets, query=NoQuery),
            litellm_route("POST", "/budget/delete", self.delete_budget, reads=DeleteBudget),
        ]

    async def new_team(self, exchange: HttpExchange) -> None:
        """Makes a team without keys."""
        request, noted = decode_fields(exchange.body, TeamFields)
        team_id = request.team_id or str(uuid4())
        if not is_id(team_id) or not is_team(team_id):
            raise InvalidRequest(
                "team_id must be lower-case letters, digits, `-` and `_`, and not begin with `user-` or `budget-`. "
                "Leave it out for a new one, and put the name into team_alias.",
                param="team_id",
            )
        alias = request.team_alias if isinstance(request.team_alias, str) else ""
        tenant = await self._accounts.create_owner(team_id, alias, request)
        await answer(exchange, await self._team(tenant), noted)

    async def team_info(self, exchange: HttpExchange) -> None:
        """Shows a team with its keys; a key may ask about its own team."""
        query = decode_query(exchange.query, TeamQuery)
        if Scope.ADMIN not in exchange.principal.scopes and query.team_id != exchange.principal.tenants[-1]:
            raise Forbidden("This key may only ask about its own team. Use the master key, or one of the scope admin.")
        tenant = await self._accounts.owner("team", query.team_id)
        keys = [await self._key(row) async for row in self._accounts.live_keys() if row.organisation.id == tenant.id]
        info = await self._team(tenant)
        await answer(
            exchange, {"team_id": tenant.id, "team_info": {**info, "keys": keys}, "keys": keys, "team_memberships": []}
        )

    async def update_team(self, exchange: HttpExchange) -> None:
        """Changes the fields of a team that the body names."""
        request, noted = decode_fields(exchange.body, TeamFields)
        if not request.team_id:
            raise InvalidRequest("team_id must name the team.", param="team_id")
        tenant = await self._accounts.owner("team", request.team_id)
        alias = None if request.team_alias is UNSET else request.team_alias or ""
        info = await self._team(await self._accounts.update_owner(tenant, request, alias))
        await answer(exchange, {"team_id": tenant.id, "data": info}, noted)

    async def list_teams(self, exchange: HttpExchange) -> None:
        """Lists all teams with their limits."""
        decode_query(exchange.query, NoQuery)
        teams = [
            await self._team(tenant)
            async for tenant in self._accounts.tenants()
            if tenant.parent is None and is_team(tenant.id) and tenant.id not in self._reserved
        ]
        await answer(exchange, teams)

    async def delete_teams(self, exchange: HttpExchange) -> None:
        """Deletes teams with their keys."""
        request, noted = decode_fields(exchange.body, DeleteTeams)
        tenants = [await self._accounts.owner("team", team_id) for team_id in request.team_ids]
        for tenant in tenants:
            await self._accounts.delete_owner(tenant)
        await answer(exchange, [{"team_id": tenant.id, "team_alias": tenant.name or None} for tenant in tenants], noted)

    async def new_user(self, exchange: HttpExchange) -> None:
        """Makes a user, and a key of it unless the body says otherwise."""
        request, noted = decode_fields(exchange.body, UserFields)
        _check_role(request.user_role)
        user_id = request.user_id or str(uuid4())
        tenant = await self._accounts.create_owner(tenant_id_of(user_id, USER_PREFIX), user_id, request)
        made: dict[str, Any] = {"key": ""}
        if request.auto_create_key:
            wish = GenerateKey(user_id=user_id, key_alias=request.key_alias, duration=request.duration)
            text, row = await self._accounts.generate(wish)
            alias = row.key.name or None
            made = {"key": text, "token": row.token, "key_name": f"sk-...{text[-4:]}", "key_alias": alias}
        await answer(exchange, {**await self._user(tenant), **made}, noted)

    async def user_info(self, exchange: HttpExchange) -> None:
        """Shows a user with its keys."""
        query = decode_query(exchange.query, UserQuery)
        tenant = await self._accounts.owner("user", query.user_id, USER_PREFIX)
        keys = [await self._key(row) async for row in self._accounts.live_keys() if row.organisation.id == tenant.id]
        info = await self._user(tenant)
        await answer(exchange, {"user_id": query.user_id, "user_info": info, "keys": keys, "teams": []})

    async def update_user(self, exchange: HttpExchange) -> None:
        """Changes the fields of a user that the body names."""
        request, noted = decode_fields(exchange.body, UserFields)
        _check_role(request.user_role)
        if not request.user_id:
            raise InvalidRequest("user_id must name the user.", param="user_id")
        tenant = await self._accounts.owner("user", request.user_id, USER_PREFIX)
        info = await self._user(await self._accounts.update_owner(tenant, request, None))
        await answer(exchange, {"user_id": request.user_id, "data": info}, noted)

    async def new_budget(self, exchange: HttpExchange) -> None:
        """Makes a budget that keys, teams and users can name."""
        request, noted = decode_fields(exchange.body, BudgetFields)
        budget_id = request.budget_id or str(uuid4())
        tenant_id = tenant_id_of(budget_id, BUDGET_PREFIX)
        tenant = await self._accounts.create_owner(tenant_id, budget_id, request, disabled=True)
        await answer(exchange, await self._budget(tenant), noted)

    async def budget_info(self, exchange: HttpExchange) -> None:
        """Shows the budgets that the body names."""
        request, noted = decode_fields(exchange.body, NameBudgets)
        if not request.budgets:
            raise InvalidRequest("budgets must name at least one budget.", param="budgets")
        tenants = [await self._accounts.owner("budget", name, BUDGET_PREFIX) for name in request.budgets]
        await answer(exchange, [await self._budget(tenant) for tenant in tenants], noted)

    async def update_budget(self, exchange: HttpExchange) -> None:
        """Changes a budget, and the limits of all that name it."""
        request, noted = decode_fields(exchange.body, BudgetFields)
        if not request.budget_id:
            raise InvalidRequest("budget_id must name the budget.", param="budget_id")
        tenant = await self._accounts.owner("budget", request.budget_id, BUDGET_PREFIX)
        await answer(exchange, await self._budget(await self._accounts.update_owner(tenant, request, None)), noted)

    async def list_budgets(self, exchange: HttpExchange) -> None:
        """Lists all budgets with their limits."""
        decode_query(exchange.query, NoQuery)
        budgets = [
            await self._budget(tenant)
            async for tenant in self._accounts.tenants()
            if tenant.parent is None and tenant.id.startswith(BUDGET_PREFIX)
        ]
        await answer(exchange, budgets)

    async def delete_budget(self, exchange: HttpExchange) -> None:
        """Deletes a budget; the limits of those who name it stay."""
        request, noted = decode_fields(exchange.body, DeleteBudget)
        tenant = await self._accounts.owner("budget", request.id, BUDGET_PREFIX)
        body = await self._budget(tenant)
        await self._accounts.delete_owner(tenant)
        await answer(exchange, body, noted)

    async def _team(self, tenant: Tenant) -> dict[str, Any]:
        info = await self._accounts.owner_info(tenant)
        own = {"team_id": tenant.id, "team_alias": tenant.name or None, "organization_id": None}
        return {**own, "admins": [], "members": [], "members_with_roles": [], **info}

    async def _user(self, tenant: Tenant) -> dict[str, Any]:
        return {"user_id": user_id_of(tenant), "user_role": "internal_user", "teams": []} | (
            await self._accounts.owner_info(tenant)
        )

    async def _budget(self, tenant: Tenant) -> dict[str, Any]:
        fields = await self._accounts.limit_fields(f"tenant:{tenant.id}", {})
        del fields["spend"]
        return {"budget_id": budget_id_of(tenant), **fields}

    async def _key(self, row: KeyRow) -> dict[str, Any]:
        return {"token": row.token, **await self._accounts.info(row)}


def _check_role(role: str | None) -> None:
    if role not in _ROLES:
        raise InvalidRequest(
            "Users have no roles here. Who administers has a key of the scope admin: `maitred keys create`, or "
            "/key/generate with key_type: management.",
            param="user_role",
        )

"""Routes of tenants: organisations and their teams."""

from maitred.api.admin.directory_admin import AdminReply, DirectoryAdmin, page_of
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.errors import InvalidRequest, ResourceNotFound
from maitred.core.tenancy import Scope, is_id
from maitred.wire.admin import rules
from maitred.wire.admin.decode import decode_body, decode_query
from maitred.wire.admin.requests import CreateTenant, TenantsQuery, UpdateTenant
from maitred.wire.admin.responses import Deleted, TenantBody, TenantList
from maitred.wire.openai.faults import format_value

PATH = "/admin/v1/tenants"


class TenantRoutes:
    """Admin routes of tenants.

    Args:
        admin: The parts that admin routes share.
    """

    def __init__(self, admin: DirectoryAdmin) -> None:
        self._admin = admin

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        path_with_id = f"{PATH}/{{id}}"
        needs = Scope.ADMIN
        return [
            Route("GET", PATH, self.list, "Tenants.", returns=TenantList, query=TenantsQuery, needs=needs),
            Route(
                "POST",
                PATH,
                self.create,
                "A new tenant.",
                reads=CreateTenant,
                returns=TenantBody,
                needs=needs,
                remembers=True,
            ),
            Route("GET", path_with_id, self.get, "One tenant.", returns=TenantBody, needs=needs),
            Route(
                "PATCH",
                path_with_id,
                self.update,
                "Changes a tenant.",
                reads=UpdateTenant,
                returns=TenantBody,
                needs=needs,
            ),
            Route("DELETE", path_with_id, self.delete, "Deletes a tenant.", returns=Deleted, needs=needs),
        ]

    async def list(self, exchange: HttpExchange) -> None:
        """Answers with a page of tenants."""
        query = decode_query(exchange.query, TenantsQuery)
        rules.check_page(query.limit, query.after)
        if query.parent is not None:
            rules.check_id("parent", query.parent)
        found = await self._admin.store.tenants(query.parent, query.after, query.limit + 1)
        tenants, has_more = page_of(found, query.limit)
        data = [TenantBody.of(tenant) for tenant in tenants]
        answer = TenantList(data=data, has_more=has_more, next=data[-1].id if has_more else None)
        await self._admin.reply(exchange, answer)

    async def create(self, exchange: HttpExchange) -> None:
        """Creates the tenant that the body describes."""
        tenant = rules.to_tenant(decode_body(exchange.body, CreateTenant))

        async def make() -> AdminReply:
            await self._admin.store.create_tenant(tenant)
            await self._admin.on_change()
            return AdminReply(TenantBody.of(tenant))

        await self._admin.once(exchange, make)

    async def get(self, exchange: HttpExchange) -> None:
        """Answers with one tenant."""
        tenant = await self._admin.store.tenant(_id_in(exchange))
        await self._admin.reply(exchange, TenantBody.of(tenant))

    async def update(self, exchange: HttpExchange) -> None:
        """Changes the fields of a tenant that the body names."""
        tenant_id = _id_in(exchange)
        changes = rules.tenant_changes(decode_body(exchange.body, UpdateTenant))
        if not changes:
            raise InvalidRequest("The body changes nothing. Name a field to change.")
        tenant = await self._admin.store.update_tenant(tenant_id, **changes)
        await self._admin.on_change()
        await self._admin.reply(exchange, TenantBody.of(tenant))

    async def delete(self, exchange: HttpExchange) -> None:
        """Deletes the tenant in the path."""
        tenant_id = _id_in(exchange)
        await self._admin.store.delete_tenant(tenant_id)
        await self._admin.on_change()
        await self._admin.reply(exchange, Deleted(id=tenant_id, object="tenant"))


def _id_in(exchange: HttpExchange) -> str:
    if not is_id(exchange.parameter):
        raise ResourceNotFound(
            f"There is no tenant {format_value(exchange.parameter)}. GET {PATH} lists them.", param="id"
        )
    return exchange.parameter

"""`maitred tenants`: organisations and teams."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption
from maitred.cli.output.tables import print_json, print_table

if TYPE_CHECKING:
    from maitred.wire.admin.responses import TenantBody

LIST_EXAMPLES = """
Examples:

    maitred tenants list

    maitred tenants list --parent acme
"""
CREATE_EXAMPLES = """
Examples:

    maitred tenants create acme --name "Acme Inc."

    maitred tenants create research --parent acme --weight 2 --model maitred-tiny
"""
SHOW_EXAMPLES = """
Examples:

    maitred tenants show acme
"""
UPDATE_EXAMPLES = """
Examples:

    maitred tenants update research --weight 3

    maitred tenants update acme --disable
"""
DELETE_EXAMPLES = """
Examples:

    maitred tenants delete research
"""

TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="Its id.")]
NameOption = Annotated[str | None, typer.Option("--name", metavar="TEXT", help="What people call it.")]
WeightOption = Annotated[
    float | None,
    typer.Option("--weight", metavar="NUMBER", help="Share of service relative to its siblings; a new one has 1."),
]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="NAME", help="A model that it may use. Repeatable; default: all of its parent's."),
]
CeilingOption = Annotated[
    int | None,
    typer.Option("--priority-ceiling", metavar="NUMBER", help="Highest priority of its requests, 1 to 10."),
]
RegionsOption = Annotated[
    list[str] | None, typer.Option("--region", metavar="NAME", help="Where it may be served. Repeatable.")
]
TagsOption = Annotated[
    list[str] | None, typer.Option("--tag", metavar="NAME", help="A privacy tag, such as local-only. Repeatable.")
]


def list_tenants(
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="TENANT", help="Teams of this organisation only.")
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """List organisations and teams."""
    from maitred.cli.admin_client import AdminClient, administer
    from maitred.wire.admin.responses import TenantBody, TenantList

    async def work(client: AdminClient) -> list[TenantBody]:
        tenants: AsyncIterator[TenantBody] = client.every("tenants", TenantList, {"parent": parent})
        return [tenant async for tenant in tenants]

    _print(administer(url, key, work), as_json=as_json)


def create(
    tenant: TenantArgument,
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="TENANT", help="The organisation that it is a team of.")
    ] = None,
    name: NameOption = None,
    weight: WeightOption = None,
    models: ModelsOption = None,
    priority_ceiling: CeilingOption = None,
    regions: RegionsOption = None,
    tags: TagsOption = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Create an organisation, or a team in one."""
    fields = {
        "id": tenant,
        "parent": parent,
        **_given_fields(name, weight, models, priority_ceiling, regions, tags),
    }
    _send("POST", "tenants", fields, url, key, as_json=as_json)


def show(
    tenant: TenantArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None
) -> None:
    """Show one organisation or team."""
    from maitred.cli.admin_client import administer, in_path
    from maitred.wire.admin.responses import TenantBody

    found = administer(url, key, lambda client: client.get(f"tenants/{in_path(tenant)}", TenantBody))
    _print([found], as_json=as_json)


def update(
    tenant: TenantArgument,
    name: NameOption = None,
    weight: WeightOption = None,
    models: ModelsOption = None,
    all_models: Annotated[
        bool, typer.Option("--all-models", help="It may use all models that its parent may.")
    ] = False,
    priority_ceiling: CeilingOption = None,
    regions: RegionsOption = None,
    tags: TagsOption = None,
    disable: Annotated[
        bool | None, typer.Option("--disable/--enable", help="Refuse its keys, or take them again.")
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Change an organisation or a team; what is not given stays."""
    from maitred.cli.admin_client import in_path

    fields = _given_fields(name, weight, models, priority_ceiling, regions, tags)
    if all_models:
        fields["models"] = None
    if disable is not None:
        fields["disabled"] = disable
    _send("PATCH", f"tenants/{in_path(tenant)}", fields, url, key, as_json=as_json)


def delete(tenant: TenantArgument, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None) -> None:
    """Delete an organisation or a team that has no keys and no teams."""
    from maitred.cli.admin_client import administer, in_path
    from maitred.wire.admin.responses import Deleted

    administer(url, key, lambda client: client.send("DELETE", f"tenants/{in_path(tenant)}", Deleted))
    typer.echo(f"Deleted {tenant}.")


def _given_fields(
    name: str | None,
    weight: float | None,
    models: list[str] | None,
    priority_ceiling: int | None,
    regions: list[str] | None,
    tags: list[str] | None,
) -> dict[str, Any]:
    fields = {
        "name": name,
        "weight": weight,
        "models": models,
        "priority_ceiling": priority_ceiling,
        "regions": regions,
        "tags": tags,
    }
    # An option that takes a list and was not given is an empty one for some versions of typer.
    return {field: value for field, value in fields.items() if value is not None and value != []}


def _send(method: str, path: str, fields: dict[str, Any], url: str, key: str | None, *, as_json: bool) -> None:
    from maitred.cli.admin_client import administer
    from maitred.wire.admin.responses import TenantBody

    changed = administer(url, key, lambda client: client.send(method, path, TenantBody, fields))
    _print([changed], as_json=as_json)


def _print(tenants: "list[TenantBody]", *, as_json: bool) -> None:
    if as_json:
        print_json(tenants)
        return
    print_table(
        ("TENANT", "PARENT", "NAME", "WEIGHT", "MODELS", "PRIORITY", "REGIONS", "TAGS", "DISABLED"),
        (
            (
                *(tenant.id, tenant.parent, tenant.name, tenant.weight),
                "all" if tenant.models is None else tenant.models,
                *(tenant.priority_ceiling, tenant.regions, tenant.tags, tenant.disabled),
            )
            for tenant in tenants
        ),
        numbers=("WEIGHT", "PRIORITY"),
    )

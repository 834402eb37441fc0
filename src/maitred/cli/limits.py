"""`maitred limits`: rate limits and budgets."""

import math
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption
from maitred.cli.output.tables import amount, print_json, print_table
from maitred.core.errors import Conflict, InvalidRequest

if TYPE_CHECKING:
    from maitred.cli.admin_client import AdminClient
    from maitred.wire.admin.responses import LimitBody

LIST_EXAMPLES = """
Examples:

    maitred limits list

    maitred limits list --subject tenant:acme
"""
SET_EXAMPLES = """
Examples:

    maitred limits set tenant:acme tokens_per_minute 100000 --model maitred-tiny --burst 20000

    maitred limits set tenant:acme usd_per_month 50

    maitred limits set "key:*" concurrent_requests 8
"""
DELETE_EXAMPLES = """
Examples:

    maitred limits delete lim-5b1f0c9e7d2a4c6f
"""
BUDGETS_EXAMPLES = """
Examples:

    maitred limits budgets

    maitred limits budgets --subject tenant:acme --json
"""

SubjectOption = Annotated[
    str | None, typer.Option("--subject", metavar="SUBJECT", help="Those of tenant:ID, key:ID, tenant:*, key:* or *.")
]


def list_limits(
    subject: SubjectOption = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """List limits and budgets."""
    from maitred.cli.admin_client import administer

    limits = administer(url, key, lambda client: _limits(client, subject))
    _print(limits, as_json=as_json)


def set_limit(
    subject: Annotated[
        str,
        typer.Argument(metavar="SUBJECT", help="tenant:ID, key:ID, * for all together, tenant:* or key:* for each."),
    ],
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="Such as requests_per_minute, tokens_per_minute or usd_per_month.")
    ],
    value: Annotated[float, typer.Argument(metavar="VALUE", help="Requests, tokens, or for usd_… dollars.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Counts requests to this model only.")
    ] = None,
    burst: Annotated[
        int | None,
        typer.Option("--burst", metavar="COUNT", help="What may come at once after a pause. Default: VALUE."),
    ] = None,
    soft: Annotated[bool, typer.Option("--soft", help="A budget that says when it is passed, and refuses nobody.")] = (
        False
    ),
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Set a limit or a budget: a new one, or the value of the one that there is."""
    from maitred.cli.admin_client import AdminClient, administer, in_path
    from maitred.wire.admin.responses import LimitBody

    if not math.isfinite(value):  # numbers to Python, and nothing that JSON can say
        raise InvalidRequest(f"VALUE must be a number of requests, tokens or dollars, such as 1000; got {value:g}.")
    number = int(value) if value.is_integer() else value
    fields = {"subject": subject, "kind": kind, "value": number, "model": model, "burst": burst, "hard": not soft}

    async def work(client: AdminClient) -> LimitBody:
        for attempt in range(2):
            for limit in await _limits(client, subject):
                if (limit.kind, limit.model, limit.hard) == (kind, model, not soft):
                    return await client.send("PUT", f"limits/{in_path(limit.id)}", LimitBody, fields)
            try:
                return await client.send("POST", "limits", LimitBody, fields)
            except Conflict:
                # Somebody has set the same limit in between; look again.
                if attempt:
                    raise
        raise AssertionError("The second attempt returns or raises.")

    _print([administer(url, key, work)], as_json=as_json)


def delete(
    limit_id: Annotated[str, typer.Argument(metavar="ID", help="As `maitred limits list` shows it.")],
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Delete a limit or a budget."""
    from maitred.cli.admin_client import administer, in_path
    from maitred.wire.admin.responses import Deleted

    administer(url, key, lambda client: client.send("DELETE", f"limits/{in_path(limit_id)}", Deleted))
    typer.echo(f"Deleted {limit_id}.")


def budgets(
    subject: SubjectOption = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Show what is left of every budget."""
    from maitred.cli.admin_client import AdminClient, administer
    from maitred.wire.admin.responses import BudgetBody, BudgetList

    async def work(client: AdminClient) -> list[BudgetBody]:
        standing: AsyncIterator[BudgetBody] = client.every("budgets", BudgetList, {"subject": subject})
        return [budget async for budget in standing]

    found = administer(url, key, work)
    if as_json:
        print_json(found)
        return
    print_table(
        ("SUBJECT", "BUDGET", "MODEL", "USD", "CHARGED", "RESERVED", "LEFT", "RESETS", "HARD"),
        (
            (
                *(budget.subject, budget.kind, budget.model or "all", budget.limit_usd, budget.charged_usd),
                *(budget.reserved_usd, budget.remaining_usd, budget.resets_at, budget.hard),
            )
            for budget in found
        ),
        numbers=("USD", "CHARGED", "RESERVED", "LEFT"),
    )


async def _limits(client: "AdminClient", subject: str | None) -> "list[LimitBody]":
    from maitred.wire.admin.responses import LimitBody, LimitList

    limits: AsyncIterator[LimitBody] = client.every("limits", LimitList, {"subject": subject})
    return [limit async for limit in limits]


def _print(limits: "list[LimitBody]", *, as_json: bool) -> None:
    if as_json:
        print_json(limits)
        return
    print_table(
        ("ID", "SUBJECT", "KIND", "VALUE", "MODEL", "BURST", "HARD"),
        (
            (
                *(limit.id, limit.subject, limit.kind),
                f"${amount(limit.value)}" if limit.kind.spend else limit.value,
                *(limit.model or "all", limit.burst, limit.hard if limit.kind.spend else None),
            )
            for limit in limits
        ),
        numbers=("VALUE", "BURST"),
    )

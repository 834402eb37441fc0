"""`maitred usage`: what was used, what it cost, and what was thought of it."""

import re
from typing import Annotated

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption, lacks_unit
from maitred.cli.output.tables import print_json, print_table
from maitred.core.errors import InvalidRequest

EXAMPLES = """
Examples:

    maitred usage --group-by tenant,model --since 7d

    maitred usage --group-by day --organisation acme --since 2026-11-01 --csv > november.csv
"""

_BACK = re.compile(r"\d+[smhdw]", re.ASCII)
_NUMBERS = ("REQUESTS", "PROMPT", "CACHED", "OUTPUT", "USD", "HITS", "SAVED", "RATED", "SCORE")


def usage(
    group_by: Annotated[
        str,
        typer.Option(
            "--group-by",
            metavar="NAMES",
            help="Some of tenant, organisation, key, model, rollout, outcome, cache, hour, day and month, with commas.",
        ),
    ] = "tenant,model",
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="So far back (7d, 12h), or a time in ISO 8601.")
    ] = "30d",
    until: Annotated[str, typer.Option("--until", metavar="TIME", help="As --since. Default: now.")] = "now",
    organisation: Annotated[
        str | None, typer.Option("--organisation", metavar="TENANT", help="Of this one, its teams included.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="TENANT", help="Of keys that this very tenant owns.")
    ] = None,
    key_id: Annotated[str | None, typer.Option("--key-id", metavar="ID", help="Of the key with this public id.")] = (
        None
    ),
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Of this model.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Show what was used, what it cost, and what was thought of it."""
    from maitred.cli.admin_client import AdminClient, administer
    from maitred.wire.admin.responses import UsageReport, UsageRow

    chosen = {"organisation": organisation, "tenant": tenant, "key": key_id, "model": model}
    query = {"group_by": group_by, "start": _time("--since", since), "end": _time("--until", until), **chosen}
    if as_csv:
        csv = {**query, "format": "csv"}
        typer.echo(administer(url, key, lambda client: client.raw("GET", "usage", query=csv)), nl=False)
        return

    async def work(client: AdminClient) -> list[UsageRow]:
        return [row async for row in client.every("usage", UsageReport, query)]

    rows = administer(url, key, work)
    if as_json:
        print_json(rows)
        return
    groups = [name.strip() for name in group_by.split(",") if name.strip()]
    print_table(
        (*(name.upper() for name in groups), *_NUMBERS),
        (
            (
                *(getattr(row, name) for name in groups),
                *(row.requests, row.prompt_tokens, row.cached_tokens, row.output_tokens, row.cost_usd),
                *(row.cache_hits, row.saved_tokens, row.rated),
                None if row.mean_score is None else f"{row.mean_score:.2f}",
            )
            for row in rows
        ),
        numbers=_NUMBERS,
    )


def _time(option: str, text: str) -> str:
    if lacks_unit(text):
        raise InvalidRequest(
            f"{option} must be a time with its unit, such as 12h or 7d, or one in ISO 8601; got {text!r}."
        )
    return f"-{text}" if _BACK.fullmatch(text) else text

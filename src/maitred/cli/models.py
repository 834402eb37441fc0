"""`maitred models`: what a server serves."""

from typing import TYPE_CHECKING

from maitred.cli.options import DEFAULT_URL, KeyOption, UrlOption

if TYPE_CHECKING:
    from maitred.cli.client import ListedModel

EXAMPLES = """
Examples:

    maitred models

    maitred models --url http://gpu-box:8000
"""


def models(url: UrlOption = DEFAULT_URL, key: KeyOption = None) -> None:
    """List the models that a server serves."""
    import asyncio

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("MODEL", overflow="fold")
    table.add_column("CONTEXT", justify="right")
    table.add_column("OWNER")
    for model in asyncio.run(_listed(url, key)):
        context = f"{model.max_model_len} tokens" if model.max_model_len else "-"
        table.add_row(escape(model.id), context, escape(model.owned_by))
    Console().print(table)


async def _listed(url: str, key: str | None) -> "list[ListedModel]":
    from maitred.cli.client import Client

    async with Client(url, key) as client:
        return await client.models()

"""`maitred import shadow`: the same requests to another gateway and to this one, and what differs."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import KeyOption, UrlOption

if TYPE_CHECKING:
    import aiohttp

    from maitred.migration.shadow_comparison import ShadowAnswer
    from maitred.migration.shadow_requests import SampleRequest

EXAMPLES = """
Examples:

    maitred import shadow http://litellm:4000

    maitred import shadow http://litellm:4000 --requests recorded.jsonl
"""
_TIMEOUT_S = 600.0


def shadow(
    theirs: Annotated[str, typer.Argument(metavar="URL", help="The gateway that runs now.")],
    requests: Annotated[
        Path | None,
        typer.Option(
            "--requests",
            metavar="FILE",
            help="Requests to send, one JSON object a line: a body, or its path and body. Default: a few for each "
            "model of that gateway.",
        ),
    ] = None,
    url: UrlOption = "http://127.0.0.1:8000",
    key: KeyOption = None,
    their_key: Annotated[
        str | None,
        typer.Option(
            "--their-key", metavar="KEY", envvar="LITELLM_MASTER_KEY", help="The key for that gateway. Default: --key."
        ),
    ] = None,
) -> None:
    """Send the same requests to the gateway that runs now and to this one, and list what differs.

    Each request is sent to both, so it costs twice. Compared are status, model, finish reasons, usage, tool calls,
    errors, headers that clients read, and texts at temperature 0. Exits with 1 if anything differs.
    """
    from maitred.cli.client import server_root
    from maitred.migration.shadow_requests import read_requests

    recorded = None if requests is None else read_requests(requests)
    own_key, other_key = key or their_key, their_key or key
    different = asyncio.run(_compare((server_root(theirs), other_key), (server_root(url), own_key), recorded))
    raise typer.Exit(1 if different else 0)


async def _compare(
    theirs: tuple[str, str | None], ours: tuple[str, str | None], recorded: "list[SampleRequest] | None"
) -> int:
    """Sends all requests, prints what differs, and returns how many answers do."""
    import aiohttp

    from maitred.cli.client import CONNECT_TIMEOUT_S, GatewayClient, bearer
    from maitred.migration.shadow_comparison import find_differences
    from maitred.migration.shadow_requests import sample_requests

    requests = recorded
    if requests is None:
        async with GatewayClient(*theirs) as client:
            requests = [*sample_requests(model.id for model in await client.models())]
    different = 0
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for request in requests:
            answers = [
                await _ask(session, url, request, bearer(key, "MAITRED_API_KEY") if key else {})
                for url, key in (theirs, ours)
            ]
            differences = find_differences(request, *answers)
            different += bool(differences)
            typer.echo(f"{request.name}: {'different' if differences else 'the same'}")
            for each in differences:
                typer.echo(f"  {each}")
    typer.echo(f"{len(requests)} requests: {len(requests) - different} answered alike, {different} differently.")
    return different


async def _ask(
    session: "aiohttp.ClientSession", url: str, request: "SampleRequest", headers: dict[str, str]
) -> "ShadowAnswer":
    """Sends one request to one gateway."""
    from maitred.cli.client import open_client
    from maitred.migration.shadow_comparison import ShadowAnswer

    with open_client(url, "does not answer"):
        async with session.post(url + request.path, json=request.body, headers=headers) as response:
            body = await response.read()
    names = {name.lower(): value for name, value in response.headers.items()}
    return ShadowAnswer(response.status, names, body)

"""`maitred top`: what a server does now, in the terminal."""

from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import ADMIN_KEY_VARIABLE, DEFAULT_URL, KEY_VARIABLE, UrlOption

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from maitred.wire.admin.live import LiveBody

EXAMPLES = """
Examples:

    maitred top

    maitred top --once

    maitred top --once --json | jq .path
"""
_AGAIN_S = 2.0

LiveKeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="KEY",
        envvar=[ADMIN_KEY_VARIABLE, KEY_VARIABLE],
        help="A key with the scope admin, or metrics for less. The variable keeps it out of your shell's history.",
    ),
]


def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once and return; also where nobody looks on.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: with --once one object, else one line every second.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    key: LiveKeyOption = None,
) -> None:
    """Show requests in each stage, queues, batches, replicas, tenants and refusals, every second."""
    import asyncio
    import sys

    if as_json:
        asyncio.run(_print_json(url, key, once=once))
    elif once or not sys.stdout.isatty():
        asyncio.run(_print_once(url, key))
    else:
        asyncio.run(_watch(url, key))


async def _print_json(url: str, key: str | None, *, once: bool) -> None:
    import msgspec

    from maitred.cli.output.tables import print_json

    async for state in _states(url, key):
        if once:
            print_json(state)
            return
        typer.echo(msgspec.json.encode(state).decode())


async def _print_once(url: str, key: str | None) -> None:
    from rich.console import Console

    from maitred.cli.output.top_screen import screen

    async for state in _states(url, key):
        Console().print(screen(state))
        return


async def _watch(url: str, key: str | None) -> None:
    """Until Ctrl-C; a server that goes away is waited for."""
    import asyncio

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from maitred.cli.output.top_screen import screen
    from maitred.core.errors import Refused, Unavailable

    with Live(Text("Connecting…", style="dim"), screen=True, auto_refresh=False) as shown:
        last = None
        while True:
            try:
                async for state in _states(url, key):
                    last = screen(state)
                    shown.update(last, refresh=True)
            except (Unavailable, Refused) as error:
                trouble = Text(f"{error.message} Trying again…", style="yellow")
                shown.update(trouble if last is None else Group(trouble, last), refresh=True)
            await asyncio.sleep(_AGAIN_S)


async def _states(url: str, key: str | None) -> "AsyncIterator[LiveBody]":
    """The state every second, for as long as the connection lasts.

    Raises:
        MaitredError: The server cannot be reached, or refuses.
    """
    import aiohttp
    import msgspec

    from maitred.cli.client import CONNECT_TIMEOUT_S, bearer, open_client, refusal, server_root, unknown_server
    from maitred.core.errors import Unavailable
    from maitred.wire.admin.live import LiveBody
    from maitred.wire.sse import SSEDecoder

    root = server_root(url)
    headers = {"Accept": "text/event-stream", **(bearer(key, "MAITRED_ADMIN_KEY") if key else {})}
    fault = "has no live state"
    # A second without a state is a server that hangs; ten of them are one that is gone.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=10.0)
    with open_client(root, fault):
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{root}/admin/v1/live", headers=headers) as response,
        ):
            if response.status != 200:
                raise refusal(response.status, await response.read())
            if response.content_type != "text/event-stream":
                raise unknown_server(root, fault)
            decoder = SSEDecoder()
            async for data in response.content.iter_any():
                for event in decoder.feed(data):
                    if event.type == "state":
                        yield msgspec.json.decode(event.data, type=LiveBody)
    raise Unavailable(f"{root} ended the live state. See the server's log.")

"""`maitred workers`: the processes of a server that speak HTTP, and new ones in their place."""

from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption
from maitred.cli.output.tables import print_json, print_table

if TYPE_CHECKING:
    from maitred.cli.admin_client import AdminClient
    from maitred.wire.admin.responses import WorkerBody

LIST_EXAMPLES = """
Examples:

    maitred workers list
"""
RESTART_EXAMPLES = """
Examples:

    maitred workers restart

    maitred workers restart --wait
"""
_LOOK_EVERY_S = 0.5


def list_workers(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None) -> None:
    """List the API workers, with the requests that each has; there are none where the server is one process."""
    from maitred.cli.admin_client import administer

    _print(administer(url, key, _all), as_json=as_json)


def restart(
    wait: Annotated[bool, typer.Option("--wait", help="Return when all that were there have ended.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Replace all API workers, one after the other, without dropping a stream.

    Each ends with the last of its answers, and after `server.drain_grace_s` at the latest.
    """
    import asyncio

    from maitred.cli.admin_client import AdminClient, administer

    async def work(client: AdminClient) -> "list[WorkerBody]":
        from maitred.wire.admin.responses import WorkerList

        workers = (await client.send("POST", "workers/restart", WorkerList, {})).data
        old = {worker.pid for worker in workers}
        while wait and old & {worker.pid for worker in workers}:
            await asyncio.sleep(_LOOK_EVERY_S)
            workers = await _all(client)
        return workers

    _print(administer(url, key, work), as_json=as_json)


async def _all(client: "AdminClient") -> "list[WorkerBody]":
    from maitred.wire.admin.responses import WorkerList

    return (await client.get("workers", WorkerList)).data


def _print(workers: "list[WorkerBody]", *, as_json: bool) -> None:
    if as_json:
        print_json(workers)
        return
    print_table(
        ("WORKER", "PID", "STARTED", "LEAVING", "REQUESTS"),
        ((worker.worker, worker.pid, worker.started_at, worker.leaving, worker.requests) for worker in workers),
        numbers=("WORKER", "PID", "REQUESTS"),
    )

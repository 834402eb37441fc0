"""`maitred models`: what a server serves, and which of the models that it loads on demand are in memory."""

from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, KeyOption, UrlOption
from maitred.cli.output.tables import print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from maitred.cli.admin_client import AdminClient
    from maitred.cli.client import ListedModel
    from maitred.wire.admin.responses import LoadableBody, LoadableList

EXAMPLES = """
Examples:

    maitred models

    maitred models list --url http://gpu-box:8000

    maitred models memory
"""
LIST_EXAMPLES = """
Examples:

    maitred models list

    maitred models list --url http://gpu-box:8000
"""
MEMORY_EXAMPLES = """
Examples:

    maitred models memory
"""
LOAD_EXAMPLES = """
Examples:

    maitred models load code --wait
"""
UNLOAD_EXAMPLES = """
Examples:

    maitred models unload code

    maitred models unload code --hold --wait
"""
PIN_EXAMPLES = """
Examples:

    maitred models pin code
"""
UNPIN_EXAMPLES = """
Examples:

    maitred models unpin code
"""
SLEEP_EXAMPLES = """
Examples:

    maitred models sleep code --wait
"""
WAKE_EXAMPLES = """
Examples:

    maitred models wake code --wait
"""
_LOOK_EVERY_S = 0.5

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Its name, as `maitred models memory` shows it.")]


def models(context: typer.Context, url: UrlOption = DEFAULT_URL, key: KeyOption = None) -> None:
    """List the models that a server serves, or say which of them are to be in memory."""
    if context.invoked_subcommand is None:
        list_models(url, key)


def list_models(url: UrlOption = DEFAULT_URL, key: KeyOption = None) -> None:
    """List the models that a server serves."""
    import asyncio

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("MODEL", overflow="fold")
    table.add_column("CONTEXT", justify="right")
    table.add_column("OWNER")
    for model in asyncio.run(_list_models(url, key)):
        context = f"{model.max_model_len} tokens" if model.max_model_len else "-"
        table.add_row(escape(model.id), context, escape(model.owned_by))
    Console().print(table)


def memory(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None) -> None:
    """Show the models that are loaded on demand: which are in memory, what they take, and how long a load takes."""
    from maitred.cli.admin_client import administer

    found = administer(url, key, _all)
    if as_json:
        print_json(found)
        return
    _print(found.data)
    if found.budget_bytes is not None:
        typer.echo(f"{_mebibytes(found.taken_bytes)} of {_mebibytes(found.budget_bytes)} are taken.")


def load(
    model: ModelArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it serves.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Load a model ahead of its first request. It is unloaded again when others need its room: see `pin`."""
    from maitred.core.errors import Unavailable

    async def work(client: "AdminClient") -> "LoadableBody":
        state = await _order(client, "load", model)
        failures = state.failures
        while wait and state.state.value != "serving":
            if state.failures > failures or state.held:
                raise Unavailable(f"{model} was not loaded. The server's log says why.")
            state = await _poll_model(client, model)
        return state

    _do(work, url, key, as_json=as_json)


def unload(
    model: ModelArgument,
    hold: Annotated[
        bool, typer.Option("--hold", help="Keep it out of memory, and refuse requests for it, until it is loaded.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when its memory is free.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Give a model's memory back: its running answers end first, and the next request for it loads it again."""

    async def work(client: "AdminClient") -> "LoadableBody":
        state = await _order(client, "unload", model, hold=hold)
        unloads = state.unloads
        while wait and state.unloads == unloads and state.state.value not in ("out", "held", "waiting"):
            state = await _poll_model(client, model)
        return state

    _do(work, url, key, as_json=as_json)


def pin(
    model: ModelArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None
) -> None:
    """Load a model and keep it in memory, whoever else waits."""
    _do(lambda client: _order(client, "pin", model), url, key, as_json=as_json)


def unpin(
    model: ModelArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None
) -> None:
    """Let a model go when others need its room."""
    _do(lambda client: _order(client, "unpin", model), url, key, as_json=as_json)


def sleep(
    model: ModelArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Return when its memory is free.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Give a model's memory back and keep its process: its running answers end first, and the next request wakes it."""
    _rest("sleep", model, ("waking", "draining"), wait=wait, as_json=as_json, url=url, key=key)


def wake(
    model: ModelArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it serves.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Wake a model ahead of its next request."""
    _rest("wake", model, ("asleep", "waking"), wait=wait, as_json=as_json, url=url, key=key)


def _rest(
    verb: str, model: str, meanwhile: tuple[str, ...], *, wait: bool, as_json: bool, url: str, key: str | None
) -> None:
    import asyncio

    from maitred.cli.admin_client import AdminClient, administer
    from maitred.wire.admin.responses import SleeperBody, SleeperList

    async def work(client: AdminClient) -> SleeperBody:
        state = await client.send("POST", f"models/{verb}", SleeperBody, {"model": model})
        while wait and state.state.value in meanwhile:
            await asyncio.sleep(_LOOK_EVERY_S)
            sleepables = (await client.get("models/sleep", SleeperList)).data
            state = next(sleeper for sleeper in sleepables if sleeper.model == model)
        return state

    done = administer(url, key, work)
    if as_json:
        print_json([done])
        return
    size = None if done.measured_bytes is None else _mebibytes(done.measured_bytes)
    print_table(
        ("MODEL", "STATE", "ENGINES", "SIZE", "WAKES IN"),
        [(done.model, done.state.value, done.engines, size, _seconds(done.wakes_in_s))],
        numbers=("ENGINES", "SIZE", "WAKES IN"),
    )


async def _list_models(url: str, key: str | None) -> "list[ListedModel]":
    from maitred.cli.client import GatewayClient

    async with GatewayClient(url, key) as client:
        return await client.models()


def _do(work: "Callable[[AdminClient], Awaitable[LoadableBody]]", url: str, key: str | None, *, as_json: bool) -> None:
    from maitred.cli.admin_client import administer

    done = administer(url, key, work)
    if as_json:
        print_json([done])
    else:
        _print([done])


async def _all(client: "AdminClient") -> "LoadableList":
    from maitred.wire.admin.responses import LoadableList

    return await client.get("models", LoadableList)


async def _poll_model(client: "AdminClient", model: str) -> "LoadableBody":
    """Waits a moment and returns the state of a model."""
    import asyncio

    await asyncio.sleep(_LOOK_EVERY_S)
    return next(sleeper for sleeper in (await _all(client)).data if sleeper.model == model)


async def _order(client: "AdminClient", verb: str, model: str, **more: bool) -> "LoadableBody":
    from maitred.wire.admin.responses import LoadableBody

    return await client.send("POST", f"models/{verb}", LoadableBody, {"model": model, **more})


def _print(models: "list[LoadableBody]") -> None:
    print_table(
        ("MODEL", "STATE", "PINNED", "SIZE", "RUNNING", "WAITING", "LOADS", "IDLE", "LOAD TAKES", "READY IN"),
        (
            (
                *(
                    sleeper.model,
                    sleeper.state.value,
                    sleeper.pinned,
                    _mebibytes(sleeper.reserved_bytes),
                    sleeper.running,
                    sleeper.waiting,
                ),
                *(
                    sleeper.loads,
                    _seconds(sleeper.idle_s),
                    _seconds(sleeper.predicted_load_s),
                    _seconds(sleeper.ready_in_s),
                ),
            )
            for sleeper in models
        ),
        numbers=("SIZE", "RUNNING", "WAITING", "LOADS", "IDLE", "LOAD TAKES", "READY IN"),
    )


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.1f} s"


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"

"""`maitred pins`: prefixes that stay in the KV caches."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption
from maitred.cli.output.tables import print_json, print_table
from maitred.core.errors import InvalidRequest

if TYPE_CHECKING:
    from maitred.cli.admin_client import AdminClient
    from maitred.wire.admin.responses import PinBody

LIST_EXAMPLES = """
Examples:

    maitred pins list
"""
HOLD_EXAMPLES = """
Examples:

    maitred pins hold chat --system system.txt --tenant acme --name support --ttl-s 86400

    maitred pins hold chat --prompt "Translate into French: "
"""
RELEASE_EXAMPLES = """
Examples:

    maitred pins release pin-019aa6f1c0e5b1f0c9e7d2a4
"""


def list_pins(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None) -> None:
    """List the prefixes that this gateway has pinned."""
    from maitred.cli.admin_client import administer

    _print(administer(url, key, _all), as_json=as_json)


def hold(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="One that maitred's own engines run.")],
    system: Annotated[
        Path | None,
        typer.Option("--system", metavar="FILE", help="Holds the system prompt that conversations begin with."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="Or the text that prompts begin with, as it is.")
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", metavar="TENANT", help="Whose requests find it. Default: those of the key's tenant."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="It takes the place of the pin of this name.")
    ] = None,
    ttl_s: Annotated[float, typer.Option("--ttl-s", metavar="SECONDS", help="For how long it stays.")] = 3600.0,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Compute a prefix and keep it in the KV caches of a model; returns when it is there."""
    from maitred.cli.admin_client import administer
    from maitred.wire.admin.responses import PinBody

    body: dict[str, object] = {"model": model, "tenant": tenant, "name": name, "ttl_s": ttl_s}
    if (system is None) == (prompt is None):
        raise InvalidRequest("What is to be kept? Pass either --system FILE or --prompt TEXT.")
    body |= {"prompt": prompt} if system is None else {"messages": [{"role": "system", "content": _text(system)}]}
    _print([administer(url, key, lambda client: client.send("POST", "pins", PinBody, body))], as_json=as_json)


def release(
    pin: Annotated[str, typer.Argument(metavar="PIN", help="Its id, as `maitred pins list` shows it.")],
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Let a pinned prefix go."""
    from maitred.cli.admin_client import administer, in_path
    from maitred.wire.admin.responses import Deleted

    administer(url, key, lambda client: client.send("DELETE", f"pins/{in_path(pin)}", Deleted))
    typer.echo(f"Released {pin}.")


async def _all(client: "AdminClient") -> "list[PinBody]":
    from maitred.wire.admin.responses import PinList

    return (await client.get("pins", PinList)).data


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--system: {path} cannot be read as text: {error}") from error


def _print(pins: "list[PinBody]", *, as_json: bool) -> None:
    if as_json:
        print_json(pins)
        return
    print_table(
        ("PIN", "MODEL", "TENANT", "NAME", "TOKENS", "UNTIL", "REPLICAS"),
        ((pin.id, pin.model, pin.tenant, pin.name, pin.tokens, pin.expires_at, pin.replicas) for pin in pins),
        numbers=("TOKENS",),
    )

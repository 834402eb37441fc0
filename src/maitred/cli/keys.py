"""`maitred keys`: API keys of tenants."""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption, parse_duration
from maitred.cli.output.tables import print_json, print_table

if TYPE_CHECKING:
    from maitred.wire.admin.responses import KeyBody

LIST_EXAMPLES = """
Examples:

    maitred keys list

    maitred keys list --tenant research
"""
CREATE_EXAMPLES = """
Examples:

    maitred keys create research --name "nightly evaluation" --expires 90d

    maitred keys create ops --scope admin --scope metrics
"""
GENERATE_EXAMPLES = """
Examples:

    maitred keys generate

    maitred keys generate > /run/secrets/acme-ci
"""
ROTATE_EXAMPLES = """
Examples:

    maitred keys rotate 5b1f0c9e7d2a4c6f

    maitred keys rotate 5b1f0c9e7d2a4c6f --overlap 1h
"""
REVOKE_EXAMPLES = """
Examples:

    maitred keys revoke 5b1f0c9e7d2a4c6f
"""

KeyArgument = Annotated[str, typer.Argument(metavar="ID", help="The public id, the middle part of the key.")]


def list_keys(
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="TENANT", help="Keys of this tenant only.")] = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """List API keys. Their secrets are stored nowhere, and cannot be shown."""
    from time import time

    from maitred.cli.admin_client import AdminClient, administer
    from maitred.wire.admin.responses import KeyBody, KeyList

    async def work(client: AdminClient) -> list[KeyBody]:
        keys: AsyncIterator[KeyBody] = client.every("keys", KeyList, {"tenant": tenant})
        return [entry async for entry in keys]

    keys = administer(url, key, work)
    if as_json:
        print_json(keys)
        return
    print_table(
        ("ID", "TENANT", "NAME", "SCOPES", "EXPIRES", "STATE"),
        ((entry.id, entry.tenant, entry.name, entry.scopes, entry.expires_at, _state(entry, time())) for entry in keys),
    )


def create(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it is.")],
    name: Annotated[str | None, typer.Option("--name", metavar="TEXT", help="What it is for.")] = None,
    scopes: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="NAME", help="inference, metrics or admin. Repeatable; default: inference."),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="TIME", help="After so long (90d), or at a time (2027-01-01T00:00:00Z)."),
    ] = None,
    cache_controls: Annotated[
        list[str] | None,
        typer.Option(
            "--cache-control",
            metavar="NAME",
            help="What its requests may say about answers from a cache: no-cache, no-store, ttl, s-maxage, namespace "
            "or only-if-cached; none: nothing. Repeatable; default: what the configuration allows.",
        ),
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Create an API key, and print it this once."""
    from maitred.cli.admin_client import administer
    from maitred.wire.admin.responses import KeyBody

    controls = [] if cache_controls == ["none"] else cache_controls or None
    fields = {
        "tenant": tenant,
        "name": name,
        "scopes": scopes or None,
        "expires_at": _expiry(expires),
        "cache_controls": controls,
    }
    given = {field: value for field, value in fields.items() if value is not None}
    _print_secret(administer(url, key, lambda client: client.send("POST", "keys", KeyBody, given)), as_json=as_json)


def generate() -> None:
    """Print a new key for the configuration file to refer to. It asks no server, and no server knows the key yet."""
    from maitred.identity.keys import make_key

    typer.echo(make_key().plaintext)


def rotate(
    key_id: KeyArgument,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="TIME", help="So long the old secret stays valid; 0 ends it now.")
    ] = "1d",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Give a key a new secret, and print the key this once."""
    from maitred.cli.admin_client import administer, in_path
    from maitred.wire.admin.responses import KeyBody

    path = f"keys/{in_path(key_id)}/rotate"
    fields = {"overlap_s": parse_duration("--overlap", overlap)}
    _print_secret(administer(url, key, lambda client: client.send("POST", path, KeyBody, fields)), as_json=as_json)


def revoke(key_id: KeyArgument, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None) -> None:
    """End a key for good. Every gateway refuses it within a second."""
    from maitred.cli.admin_client import administer, in_path
    from maitred.wire.admin.responses import KeyBody

    administer(url, key, lambda client: client.send("POST", f"keys/{in_path(key_id)}/revoke", KeyBody))
    typer.echo(f"Revoked {key_id}.")


def _print_secret(key: "KeyBody", *, as_json: bool) -> None:
    if as_json:
        print_json(key)
        return
    # The key alone goes to standard output, so that a script can take it from there.
    typer.echo(key.key)
    typer.echo(f"Key {key.id} of {key.tenant}. Keep it now: it is stored nowhere and cannot be shown again.", err=True)


def _state(key: "KeyBody", now_s: float) -> str:
    if key.revoked:
        return "revoked"
    if key.expires_at is not None and datetime.fromisoformat(key.expires_at).timestamp() <= now_s:
        return "expired"
    return "in rotation" if len(key.secrets) > 1 else "valid"


def _expiry(text: str | None) -> str | float | None:
    import time

    # A date begins with a year, and ends with a digit or a zone.
    if text is None or "-" in text.strip()[1:]:
        return text
    return time.time() + parse_duration("--expires", text)

"""`maitred cache`: what the cache of answers keeps."""

from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption
from maitred.cli.output.tables import print_json, print_table
from maitred.core.errors import InvalidRequest

if TYPE_CHECKING:
    from maitred.wire.admin.cache import CacheBody

LIST_EXAMPLES = """
Examples:

    maitred cache list
"""
CLEAR_EXAMPLES = """
Examples:

    maitred cache clear --tenant acme --model chat

    maitred cache clear --answer 6f1d0c5e9a7b42d3a8e1f4c09b7d2e65

    maitred cache clear --epoch 2026-10

    maitred cache clear --all
"""


def list_answers(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None) -> None:
    """List what the cache of answers keeps, by tenant, model and epoch, and what it was good for."""
    from maitred.cli.admin_client import administer
    from maitred.wire.admin.cache import CacheBody

    state = administer(url, key, lambda client: client.get("cache", CacheBody))
    if as_json:
        print_json(state)
        return
    print_table(
        ("TENANT", "MODEL", "EPOCH", "ANSWERS", "BYTES"),
        ((group.tenant, group.model, group.epoch or None, group.answers, group.bytes) for group in state.data),
        numbers=("ANSWERS", "BYTES"),
    )
    typer.echo(_summary(state))


def clear(
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="TENANT", help="Those that requests of this tenant have stored.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Those of this model.")] = None,
    answer: Annotated[
        str | None,
        typer.Option("--answer", metavar="NAME", help="The one that `x-maitred-cache-key` of a response names."),
    ] = None,
    epoch: Annotated[
        str | None,
        typer.Option(
            "--epoch", metavar="EPOCH", help='Those of this `cache.epoch`; "": of the time before one was set.'
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All answers.")] = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Remove answers from the cache: those that have all of what is given."""
    from maitred.cli.admin_client import administer
    from maitred.wire.admin.cache import RemovedAnswers

    selection = {"tenant": tenant, "model": model, "key": answer, "epoch": epoch, "all": "true" if everything else None}
    if epoch is None and not any(selection.values()):
        raise InvalidRequest("Which answers? Pass --tenant, --model, --answer or --epoch; or --all for all of them.")
    confirmation = administer(url, key, lambda client: client.send("DELETE", "cache", RemovedAnswers, query=selection))
    typer.echo(f"Removed {_answers(confirmation.removed)}.")


def _summary(state: "CacheBody") -> str:
    """Returns a sentence about the look-ups since the gateway started, and one about the store."""
    from maitred.core.context import CacheStatus

    use, store = state.use, state.store
    served = sum(
        use.lookups.get(status, 0) for status in (CacheStatus.HIT, CacheStatus.COALESCED, CacheStatus.SEMANTIC)
    )
    asked = served + sum(use.lookups.get(status, 0) for status in (CacheStatus.MISS, CacheStatus.PARTIAL))
    share = f" ({served / asked:.0%})" if asked else ""
    text = f"{served:,} of {asked:,} look-ups{share} were served without computing, which saved "
    text += f"{use.saved_tokens:,} tokens. {_answers(store.stores)} stored since the start"
    if store.bytes is None or store.max_bytes is None:
        return f"{text}, in the Redis that gateways share."
    return f"{text}, {store.evictions:,} evicted; {store.bytes:,} of {store.max_bytes:,} bytes are used."


def _answers(number: int) -> str:
    return f"{number:,} {'answer' if number == 1 else 'answers'}"

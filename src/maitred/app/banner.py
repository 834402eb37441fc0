"""Banner of a ready server: its address, its model, and a first request to paste."""

import shlex
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.markup import escape

from maitred.core.replica import ModelCard
from maitred.routing.catalog import ServedModel, TextModel


def show_key(console: Console, first_key: str) -> None:
    """Prints the first admin key, which is shown only once, at once, before any later step can fail."""
    console.print("The admin key, shown only now:\n", highlight=False)
    # The line is not wrapped or coloured, because it is meant to be copied.
    console.print(f"export MAITRED_ADMIN_KEY={first_key}\n", soft_wrap=True, markup=False, highlight=False)


def announce(console: Console, url: str, model: str, card: ModelCard) -> None:
    """Prints the banner of a ready server."""
    console.print(f"[bold green]Ready[/] at [bold]{escape(url)}[/]", highlight=False)
    console.print(f"  model     {escape(model)}  ({card.dtype} on {card.device})", highlight=False)
    console.print(
        f"  capacity  {card.kv_capacity_tokens:,} KV tokens, {card.max_sequences:,} sequences at once, "
        f"{card.context_tokens:,} tokens of context",
        highlight=False,
    )
    _show_first_steps(console, url, model)


def announce_upstreams(console: Console, url: str, models: Sequence[TextModel], *, first: bool) -> None:
    """Prints which models are served by which upstream servers.

    Args:
        console: The console to print to.
        url: The URL of this server.
        models: The models that upstream servers run.
        first: Whether a first request is to be shown.
    """
    if first:
        console.print(f"[bold green]Ready[/] at [bold]{escape(url)}[/]", highlight=False)
    for model in models:
        servers = ", ".join(replica.name for replica in model.replicas)
        console.print(f"  model     {escape(model.name)}  (at {escape(servers)})", highlight=False)
    if first:
        _show_first_steps(console, url, models[0].name)


def announce_on_demand(console: Console, url: str, models: Sequence[ServedModel], *, first: bool) -> None:
    """Prints which models are loaded when they are needed.

    Args:
        console: The console to print to.
        url: The URL of this server.
        models: The models that are loaded on demand.
        first: Whether a first request is to be shown.
    """
    if first:
        console.print(f"[bold green]Ready[/] at [bold]{escape(url)}[/]", highlight=False)
    for model in models:
        console.print(f"  model     {escape(model.name)}  (loaded when it is needed)", highlight=False)
    if first:
        _show_first_steps(console, url, models[0].name)


def _show_first_steps(console: Console, url: str, model: str) -> None:
    console.print("\nTry it:\n", highlight=False)
    console.print(first_request(url, model), soft_wrap=True, markup=False, highlight=False)
    console.print("\nCtrl-C drains and stops; a second one stops at once.", highlight=False)


def first_request(url: str, model: str) -> str:
    """Returns a curl command that streams an answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": True}
    return (
        f"curl -N {url}/v1/chat/completions \\\n"
        f"  -H 'content-type: application/json' \\\n"
        f"  -d {shlex.quote(msgspec.json.encode(body).decode())}"
    )

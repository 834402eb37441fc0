"""`maitred rollout`: new versions of models on trial."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption
from maitred.cli.output.tables import print_json, print_table

if TYPE_CHECKING:
    from maitred.wire.admin.responses import RolloutBody

LIST_EXAMPLES = """
Examples:

    maitred rollout list
"""
SHOW_EXAMPLES = """
Examples:

    maitred rollout show chat
"""
START_EXAMPLES = """
Examples:

    maitred rollout start chat --canary chat-v2 --weight 0.05 --shadow 0.1

    maitred rollout start chat --canary chat-v2 --sticky session --automatic promote

    maitred rollout start chat --canary chat-v2 --region eu
"""
WEIGHT_EXAMPLES = """
Examples:

    maitred rollout weight chat 0.25
"""
SWITCH_EXAMPLES = """
Examples:

    maitred rollout switch chat
"""
PROMOTE_EXAMPLES = """
Examples:

    maitred rollout promote chat
"""
ROLLBACK_EXAMPLES = """
Examples:

    maitred rollout rollback chat
"""
END_EXAMPLES = """
Examples:

    maitred rollout end chat
"""

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name that requests use.")]
WeightArgument = Annotated[float, typer.Argument(metavar="WEIGHT", help="Share of the keys, from 0 to 1.")]
ShadowOption = Annotated[
    float | None,
    typer.Option("--shadow", metavar="SHARE", help="Share of the stable version's requests that are copied."),
]


def list_rollouts(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None) -> None:
    """List the rollouts, and how they stand."""
    _print(_all(url, key), as_json=as_json)


def show(
    name: NameArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None
) -> None:
    """Show what a trial has seen so far."""
    from maitred.core.errors import ResourceNotFound

    found = [rollout for rollout in _all(url, key) if rollout.name == name]
    if not found:
        raise ResourceNotFound(f"There is no rollout {name!r}. `maitred rollout list` lists them.")
    if as_json:
        print_json(found)
        return
    print_table(
        ("FAULT", "EVIDENCE", "SHOWN", "STANDS AGAINST A PROMOTION"),
        (
            (fault, found[0].evidence.get(fault), fault in found[0].faults, fault in found[0].unproven)
            for fault in sorted({*found[0].evidence, *found[0].unproven, *found[0].faults})
        ),
        numbers=("EVIDENCE",),
    )
    _print(found, as_json=False)


def start(
    name: NameArgument,
    canary: Annotated[str | None, typer.Option("--canary", metavar="MODEL", help="What is to be tried.")] = None,
    stable: Annotated[
        str | None, typer.Option("--stable", metavar="MODEL", help="What serves so far; at first, the model NAME.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option("--weight", metavar="SHARE", help="Share of the keys that the canary serves.")
    ] = None,
    shadow: ShadowOption = None,
    regions: Annotated[
        list[str] | None,
        typer.Option("--region", metavar="NAME", help="Whose gateways take part. Repeatable; all: --region ''."),
    ] = None,
    sticky: Annotated[
        str | None, typer.Option("--sticky", metavar="WHAT", help="What stays at one version: key, session, request.")
    ] = None,
    automatic: Annotated[
        str | None, typer.Option("--automatic", metavar="WHAT", help="What the trial may do: none, abort, promote.")
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Begin a rollout, or begin one again. What is left out is as it was."""
    values = {
        "canary": canary,
        "stable": stable,
        "weight": weight,
        "shadow": shadow,
        "regions": None if regions is None else [region for region in regions if region],
        "sticky": sticky,
        "automatic": automatic,
    }
    body = {"name": name, **{field: value for field, value in values.items() if value is not None}}
    _order("start", body, url, key, as_json=as_json)


def weight(
    name: NameArgument,
    weight: WeightArgument,
    shadow: ShadowOption = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Give the canary another share. Its trial goes on."""
    _order("weight", {"name": name, "weight": weight, "shadow": shadow}, url, key, as_json=as_json)


def switch(
    name: NameArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None
) -> None:
    """Give the canary everybody, at once; `rollback` undoes it."""
    _order("switch", {"name": name}, url, key, as_json=as_json)


def promote(
    name: NameArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None
) -> None:
    """Give the canary everybody, for good."""
    _order("promote", {"name": name}, url, key, as_json=as_json)


def rollback(
    name: NameArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None
) -> None:
    """Give the stable version everybody, at once. What runs at the canary ends there."""
    _order("rollback", {"name": name}, url, key, as_json=as_json)


def end(
    name: NameArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None
) -> None:
    """Take a rollout away: the name leads where it leads without."""
    _order("end", {"name": name}, url, key, as_json=as_json)


def _all(url: str, key: str | None) -> "list[RolloutBody]":
    from maitred.cli.admin_client import administer
    from maitred.wire.admin.responses import RolloutList

    return administer(url, key, lambda client: client.get("rollouts", RolloutList)).data


def _order(verb: str, body: dict[str, Any], url: str, key: str | None, *, as_json: bool) -> None:
    from maitred.cli.admin_client import administer
    from maitred.wire.admin.responses import RolloutBody

    _print(
        [administer(url, key, lambda client: client.send("POST", f"rollouts/{verb}", RolloutBody, body))],
        as_json=as_json,
    )


def _print(rollouts: "list[RolloutBody]", *, as_json: bool) -> None:
    if as_json:
        print_json(rollouts)
        return
    print_table(
        ("NAME", "STABLE", "CANARY", "PHASE", "WEIGHT", "SHADOW", "AT STABLE", "AT CANARY", "VERDICT", "WHY"),
        (
            (
                *(rollout.name, rollout.stable, rollout.canary, rollout.phase.value, rollout.weight, rollout.shadow),
                *(rollout.stable_requests, rollout.canary_requests, rollout.verdict, rollout.why or None),
            )
            for rollout in rollouts
        ),
        numbers=("WEIGHT", "SHADOW", "AT STABLE", "AT CANARY"),
    )

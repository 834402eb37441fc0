"""`maitred replicas`: where models run, and which of them take requests."""

from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption
from maitred.cli.output.tables import print_json, print_table

if TYPE_CHECKING:
    from maitred.cli.admin_client import AdminClient
    from maitred.wire.admin.responses import AgentBody, ReplicaBody

LIST_EXAMPLES = """
Examples:

    maitred replicas list
"""
AGENTS_EXAMPLES = """
Examples:

    maitred replicas agents
"""
DRAIN_EXAMPLES = """
Examples:

    maitred replicas drain local-1

    maitred replicas drain tcp:10.0.0.1:9100 --wait

    maitred replicas drain local-0 --at-once
"""
RESUME_EXAMPLES = """
Examples:

    maitred replicas resume local-1
"""
_LOOK_EVERY_S = 0.5

ReplicaArgument = Annotated[str, typer.Argument(metavar="REPLICA", help="Its name, as `maitred replicas list` shows.")]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Of which model; needed where several have a replica of that name."),
]


def list_replicas(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None) -> None:
    """List the replicas of all models, with their state and their load."""
    from maitred.cli.admin_client import administer

    _print(administer(url, key, _all), as_json=as_json)


def list_agents(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None) -> None:
    """List the agents that own engines on other machines, also those that may not take part."""
    from maitred.cli.admin_client import AdminClient, administer
    from maitred.wire.admin.responses import AgentList

    async def work(client: AdminClient) -> "list[AgentBody]":
        return (await client.get("replicas/agents", AgentList)).data

    agents = administer(url, key, work)
    if as_json:
        print_json(agents)
        return
    print_table(
        ("AGENT", "ADDRESS", "REGION", "ZONE", "CONNECTED", "GPUS", "REPLICAS", "PLACES", "PENDING", "FAULT"),
        (
            (
                *(agent.agent, agent.address, agent.region or None, agent.zone or None, agent.connected, agent.gpus),
                *(agent.replicas, agent.max_replicas, agent.pending_orders, agent.fault),
            )
            for agent in agents
        ),
        numbers=("GPUS", "REPLICAS", "PLACES", "PENDING"),
    )


def drain(
    replica: ReplicaArgument,
    model: ModelOption = None,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Do not wait for what runs there: it is in maintenance now.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when nothing runs there any more.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Take a replica out of service: it gets nothing new, and what runs there ends."""
    import asyncio

    from maitred.cli.admin_client import AdminClient, administer

    async def work(client: AdminClient) -> "ReplicaBody":
        state = await _order(client, "maintenance" if at_once else "drain", replica, model)
        while wait and state.requests:
            await asyncio.sleep(_LOOK_EVERY_S)
            state = next(
                replica
                for replica in await _all(client)
                if (replica.model, replica.replica) == (state.model, state.replica)
            )
        return state

    _print([administer(url, key, work)], as_json=as_json)


def resume(
    replica: ReplicaArgument,
    model: ModelOption = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Put a replica back into service."""
    from maitred.cli.admin_client import administer

    _print([administer(url, key, lambda client: _order(client, "resume", replica, model))], as_json=as_json)


async def _all(client: "AdminClient") -> "list[ReplicaBody]":
    from maitred.wire.admin.responses import ReplicaList

    return (await client.get("replicas", ReplicaList)).data


async def _order(client: "AdminClient", verb: str, replica: str, model: str | None) -> "ReplicaBody":
    from maitred.wire.admin.responses import ReplicaBody

    return await client.send("POST", f"replicas/{verb}", ReplicaBody, {"replica": replica, "model": model})


def _print(replicas: "list[ReplicaBody]", *, as_json: bool) -> None:
    if as_json:
        print_json(replicas)
        return
    print_table(
        (
            *("MODEL", "REPLICA", "KIND", "REGION", "STATE", "READY", "REQUESTS", "SEQUENCES", "WAITING", "KV FREE"),
            *("WEIGHT", "ROUND TRIP"),
        ),
        (
            (
                *(
                    replica.model,
                    replica.replica,
                    replica.kind,
                    replica.region,
                    replica.state.value,
                    replica.ready,
                    replica.requests,
                    replica.sequences,
                ),
                *(
                    replica.waiting_sequences,
                    None if replica.kv_free is None else f"{replica.kv_free:.0%}",
                    round(replica.weight, 2),
                    None if replica.round_trip_ms is None else f"{replica.round_trip_ms:.1f} ms",
                ),
            )
            for replica in replicas
        ),
        numbers=("REQUESTS", "SEQUENCES", "WAITING", "KV FREE", "WEIGHT", "ROUND TRIP"),
    )

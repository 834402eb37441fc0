"""Two real gateways that share a pool: the one that decides counts what the other one gets."""

import asyncio

from maitred.testing.server_process import free_port
from tests.integration.fleet.test_agents import site
from tests.integration.fleet.test_scaling import AUTOSCALING, Scaling, crowd
from tests.support.servers.redis_server import redis_server

__all__ = ["site"]


async def test_who_decides_counts_what_another_gateway_gets(site, postgres_url):
    redis = site.stack.enter_context(redis_server())
    site.environment |= {"DATABASE": postgres_url, "REDIS": redis.url.reveal()}
    shared = {"store.url.env": "DATABASE", "counters.url.env": "REDIS", **AUTOSCALING}
    ports = free_port(), free_port()
    site.machine("a", *ports)
    async with site.gateway(ports[0], **shared) as first, site.gateway(ports[1], **shared) as second:
        for gateway in (first, second):
            await gateway.wait_phases(serving=1)
        scalings = [Scaling(gateway.client) for gateway in (first, second)]
        decides = [(await scaling.state())["deciding"] for scaling in scalings]
        assert sorted(decides) == [False, True], "one of them decides"
        deciding, asked = (scalings[0], second) if decides[0] else (scalings[1], first)
        await deciding.override(1)  # the number is no matter here
        ends = asyncio.Event()
        load = asyncio.create_task(crowd(asked.client, 24, ends))
        await deciding.until(lambda state: state["decision"]["running"] >= 12)
        await deciding.until(lambda state: state["decision"]["forecast"]["mean"] > 0.1)
        ends.set()
        assert await load > 0
        await deciding.until(lambda state: not state["decision"]["waiting"] and not state["decision"]["running"])

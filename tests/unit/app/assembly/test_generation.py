"""How one configuration follows the other while requests are answered."""

import asyncio

from maitred.admission.policy.retries import RetryBudget
from maitred.api.app import GatewayApp, RetryAdvisor
from maitred.api.config import ServerConfig
from maitred.api.in_flight import InFlightLimiter
from maitred.api.origin_policy import OriginPolicy
from maitred.api.routes import Route, RouteTable
from maitred.app.assembly.generation import GenerationSwitch
from maitred.core.clock import SystemClock

SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": []}


class Generation:
    """A config generation with one route, which answers when its event is set."""

    def __init__(self):
        self.door, self.answered = asyncio.Event(), 0
        self.app = GatewayApp(
            RouteTable([Route("GET", "/", self.handle, "")]),
            *(None, InFlightLimiter(9), [], None, RetryAdvisor(RetryBudget(0.0, 0), SystemClock())),
            max_body_bytes=1,
            body_timeout_s=1.0,
            origin_policy=OriginPolicy(ServerConfig()),
            clock=SystemClock(),
        )

    async def handle(self, call):
        await self.door.wait()
        self.answered += 1


async def test_a_generation_ends_with_the_last_of_its_requests():
    first, second, third = Generation(), Generation(), Generation()
    current_lists = []
    switch = GenerationSwitch(first, lambda generations: current_lists.append([*generations]))

    def ask():
        return asyncio.create_task(switch.current.app(SCOPE, None, None))

    early = [ask(), ask()]
    await asyncio.sleep(0)
    switch.switch_to(second)
    assert (switch.current, switch.alive, current_lists) == (second, 2, [])
    late = ask()
    await asyncio.sleep(0)
    early[0].cancel()
    await asyncio.wait(early[:1])
    assert not current_lists
    first.door.set()
    await early[1]
    assert current_lists == [[second]]
    second.door.set()
    await late
    assert (first.answered, second.answered) == (1, 1)
    switch.switch_to(third)
    assert current_lists[1:] == [[third]], "nobody was there any more"

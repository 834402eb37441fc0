"""How one configuration follows the other while requests are answered."""

import asyncio

from maitred.admission.policy.retries import RetryBudget
from maitred.api.app import GatewayApp, RetryAdvisor
from maitred.api.in_flight import InFlightLimiter
from maitred.api.routes import Route, RouteTable
from maitred.app.assembly.generation import GenerationSwitch
from maitred.core.clock import SystemClock

SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": []}


class House:
    """A regime with one route, which answers when it is told to."""

    def __init__(self):
        self.door, self.answered = asyncio.Event(), 0
        self.app = GatewayApp(
            RouteTable([Route("GET", "/", self.handle, "")]),
            *(None, InFlightLimiter(9), [], None, RetryAdvisor(RetryBudget(0.0, 0), SystemClock())),
            max_body_bytes=1,
            body_timeout_s=1.0,
            clock=SystemClock(),
        )

    async def handle(self, call):
        await self.door.wait()
        self.answered += 1


async def test_a_regime_is_over_when_the_last_of_its_requests_has_ended():
    first, second, third = House(), House(), House()
    living = []
    reception = GenerationSwitch(first, lambda regimes: living.append([*regimes]))

    def ask():
        return asyncio.create_task(reception.current.app(SCOPE, None, None))

    early = [ask(), ask()]
    await asyncio.sleep(0)
    reception.switch_to(second)
    assert (reception.current, reception.alive, living) == (second, 2, [])
    late = ask()
    await asyncio.sleep(0)
    early[0].cancel()
    await asyncio.wait(early[:1])
    assert not living
    first.door.set()
    await early[1]
    assert living == [[second]]
    second.door.set()
    await late
    assert (first.answered, second.answered) == (1, 1)
    reception.switch_to(third)
    assert living[1:] == [[third]], "nobody was there any more"

"""Hybrid overflow from outside: an own model that is too slow for its load, and a provider beside it; real HTTP.

A sixth of the requests begins like a conversation that was served here before, the others like none. Time passes only
while the own server works, so that how fast the machine is decides nothing.
"""

import asyncio
from collections import Counter, deque
from contextlib import asynccontextmanager

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.admission.degradation import DegradationStep
from maitred.config.tree import TextModelConfig
from maitred.core.context import Outcome
from maitred.core.limits import Limit, LimitKind
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.balance.config import BalanceConfig
from tests.integration.upstream.test_upstream_passing import Server, chunk, running
from tests.support.clock import FakeClock
from tests.support.upstream_gateway import upstream_gateway

KNOWN = "A long conversation about gardens. " * 16
EVERY_S = 0.04
"""From one answer of the own server to the next."""
REQUESTS = 96
"""As many as the client has connections for: each waits for its answer on its own."""
OBJECTIVE_MS = 1200
PRICES = AdmissionConfig(prices={"cloud": PriceConfig(output=1_000_000)})
ANSWER = [
    chunk(content="one two"),
    chunk("length"),
    {"choices": [], "usage": {"prompt_tokens": 90, "completion_tokens": 8}},
]


class OwnServer(Server):
    """Answers those who wait one after the other, each when it is told to."""

    def __init__(self):
        super().__init__(ANSWER)
        self.waiting = deque()

    async def answer(self, request):
        if request.method == "POST":
            told = asyncio.get_running_loop().create_future()
            self.waiting.append(told)
            await told
        return await super().answer(request)

    def answer_next(self):
        self.waiting.popleft().set_result(None)


def models(own, cloud):
    def model(url, **settings):
        upstream = UpstreamConfig(url=f"{url}/v1", dialect="openai", first_part_timeout_s=300.0)
        return TextModelConfig(upstreams=[upstream], **settings)

    return {
        "mine": model(own, degradation=[DegradationStep(step="overflow", to="cloud")]),
        "cloud": model(cloud, local=False),
    }


class Unanswered:
    """Counts what the clients have asked and not heard of yet."""

    def __init__(self, client):
        self.count = 0
        client.event_hooks = {"request": [self.ask], "response": [self.hear]}

    async def ask(self, _):
        self.count += 1

    async def hear(self, _):
        self.count -= 1


@asynccontextmanager
async def before(**settings):
    """A gateway before both, which follows what the first holds."""
    own, clock = OwnServer(), FakeClock()
    async with running(own.answer) as own_url, running(Server(ANSWER).answer) as cloud_url:
        served = models(own_url, cloud_url)
        async with upstream_gateway("", balance=BalanceConfig(), models=served, clock=clock, **settings) as system:
            working = asyncio.create_task(work(system, own, clock, Unanswered(system.client)))
            yield system
            working.cancel()


async def work(system, own, clock, unanswered):
    """Lets the own server's time pass whenever all that was asked waits for it, and nobody is to leave."""
    mine, cloud = system.dispatchers
    while True:
        mine.check_overflow()
        await asyncio.sleep(0.002)
        queued = sum(mine.snapshot().waiting.values())
        leaving = any(mine.overflow_planner._requested_by_group.values()) or in_service(cloud)
        if own.waiting and len(own.waiting) == in_service(mine) == unanswered.count - queued and not leaving:
            clock.now_s += EVERY_S
            own.answer_next()


def in_service(dispatcher):
    return sum(state.credits.request_count for state in dispatcher.core.endpoint_states)


async def ask(system, text, number, headers=None, **fields):
    body = {"model": "mine", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
    return await system.client.post(
        "/v1/chat/completions", json=body, headers={"x-request-id": f"r-{number}", **(headers or {})}, timeout=300
    )


def fresh(number):
    return f"{number} is a number that nobody has asked about before. " * 10


async def send_together(system, **headers):
    """More than can be served in time, all at once; the answers in their order. How fast it goes is known by then."""
    for turn in range(2):
        texts = [KNOWN + f"Which of {number}?" for number in range(REQUESTS)]
        await asyncio.gather(*(ask(system, text, f"{turn}-{number}") for number, text in enumerate(texts)))
    system.ledger.events.clear()
    wish = {"x-maitred-ttft-ms": str(OBJECTIVE_MS), **headers}
    texts = [fresh(number) if number % 6 else KNOWN + f"And {number}?" for number in range(REQUESTS)]
    answers = await asyncio.gather(*(ask(system, text, number, wish) for number, text in enumerate(texts)))
    await system.wait_until(lambda: system.nothing_left)
    return answers


def sent_away(answers):
    """The numbers of those that were."""
    return [
        number
        for number, answer in enumerate(answers)
        if answer.status_code == 200 and answer.headers.get("x-maitred-degraded") == "overflow=cloud"
    ]


async def test_those_of_whom_least_is_cached_here_leave_and_every_account_is_exact():
    async with before(admitting=PRICES) as system:
        answers = await send_together(system)
        assert Counter(answer.status_code for answer in answers) == {200: REQUESTS}
        away = sent_away(answers)
        assert 4 <= len(away) <= REQUESTS - 12
        moved = system.dispatcher.snapshot().moved
        assert moved > 0
        lines = Counter((event.request_id, event.model, event.outcome) for event in system.ledger.events)
        assert set(lines.values()) == {1}
        for number in range(REQUESTS):
            model = "cloud" if number in away else "mine"
            assert lines[f"r-{number}", model, Outcome.FINISHED] == 1
        refused = [event for event in system.ledger.events if event.outcome is not Outcome.FINISHED]
        assert {(event.model, event.outcome, event.output_tokens, event.cost_nusd) for event in refused} == {
            ("mine", Outcome.REFUSED, 0, 0)
        }
        assert len(refused) == moved, "who has waited here and left has a line that says so"
        # Those go first of whom nothing is here.
        first = [int(event.request_id.removeprefix("r-")) for event in refused[: moved // 3]]
        assert [number for number in first if number % 6 == 0] == []
        assert sum(event.cost_nusd for event in system.ledger.events) == len(away) * 8 * 10**9
        assert system.admission.leases.active == 0


async def test_no_more_leave_than_the_budget_for_the_provider_pays():
    budget = Limit(id="day", subject="*", kind=LimitKind.USD_PER_DAY, value=3 * 8 * 10**9)
    async with before(admitting=PRICES, limited=[budget]) as system:
        answers = await send_together(system)
        away = sent_away(answers)
        assert len(away) == 3
        assert sum(event.cost_nusd for event in system.ledger.events) == 3 * 8 * 10**9
        # A request that stays is served in time or rejected; none hangs, and nothing is held.
        assert {answer.status_code for answer in answers} <= {200, 429, 504}
        assert system.admission.leases.active == 0


async def test_a_request_that_may_not_move_waits_while_others_are_moved():
    async with before() as system:
        answers = await send_together(system, **{"x-maitred-local-only": "true"})
        assert sent_away(answers) == []
        assert {event.model for event in system.ledger.events} == {"mine"}


async def test_when_the_pressure_is_over_requests_stay_again():
    async with before() as system:
        assert sent_away(await send_together(system))
        later = [await ask(system, fresh(900 + number), f"later-{number}") for number in range(2)]
        assert sent_away(later) == []
        finished = [event for event in system.ledger.events if event.request_id.startswith("r-later")]
        assert [event.model for event in finished] == ["mine", "mine"]

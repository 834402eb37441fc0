"""Hybrid overflow from outside: an own model that is too slow for its load, and a provider beside it; real HTTP.

A sixth of the requests begins like a conversation that was served here before, the others like none.
"""

import asyncio
import time
from collections import Counter

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.admission.degradation import DegradationStep
from maitred.config.tree import TextModelConfig
from maitred.core.context import Outcome
from maitred.core.limits import Limit, LimitKind
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.balance.config import BalanceConfig
from maitred.testing.scripted_openai import DelayDistribution, ServerScript, scripted_openai
from tests.support.upstream_gateway import upstream_gateway

KNOWN = "A long conversation about gardens. " * 16
SLOW = ServerScript(ttft=DelayDistribution(mean_s=0.25), itl=DelayDistribution(mean_s=0.005), max_concurrent=8)
QUICK = ServerScript(ttft=DelayDistribution(mean_s=0.01), itl=DelayDistribution(mean_s=0.002))
REQUESTS, BEFORE = 96, 48
OBJECTIVE = 0.7
"""Times what half of the requests take: on a machine that is half as fast, everything takes twice as long."""
SERVED_OR_REFUSED = {200, 429, 504}
PRICES = AdmissionConfig(prices={"cloud": PriceConfig(output=1_000_000)})


def models(own, cloud):
    def model(server, **settings):
        return TextModelConfig(upstreams=[UpstreamConfig(url=f"{server.url}/v1", dialect="sglang")], **settings)

    return {
        "mine": model(own, degradation=[DegradationStep(step="overflow", to="cloud")]),
        "cloud": model(cloud, local=False),
    }


def before(own, cloud, **settings):
    """A gateway before both, which follows what the first holds."""
    return upstream_gateway("", balance=BalanceConfig(), models=models(own, cloud), **settings)


async def ask(system, text, number, headers=None, **fields):
    body = {"model": "mine", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
    return await system.client.post(
        "/v1/chat/completions", json=body, headers={"x-request-id": f"r-{number}", **(headers or {})}, timeout=120
    )


def fresh(number):
    return f"{number} is a number that nobody has asked about before. " * 10


async def send_together(system, **headers):
    """More than can be served in time, all at once; the answers in their order. How fast it goes is known by then."""
    began_s = time.monotonic()
    texts = [KNOWN + f"Which of {number}?" for number in range(BEFORE)]
    await asyncio.gather(*(ask(system, text, f"before-{number}") for number, text in enumerate(texts)))
    objective_ms = 1000 * OBJECTIVE * (time.monotonic() - began_s)
    system.ledger.events.clear()
    wish = {"x-maitred-ttft-ms": f"{objective_ms:.0f}", **headers}
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
    with scripted_openai(SLOW) as own, scripted_openai(QUICK) as cloud:
        async with before(own, cloud, admitting=PRICES) as system:
            answers = await send_together(system)
            assert {answer.status_code for answer in answers} <= SERVED_OR_REFUSED
            away = sent_away(answers)
            assert 4 <= len(away) <= REQUESTS - 12
            moved = system.dispatcher.snapshot().moved
            assert moved > 0
            lines = Counter((event.request_id, event.model, event.outcome) for event in system.ledger.events)
            assert set(lines.values()) == {1}
            for number, answer in enumerate(answers):
                model = "cloud" if number in away else "mine"
                assert lines[f"r-{number}", model, Outcome.FINISHED] == (answer.status_code == 200)
            refused = [event for event in system.ledger.events if event.outcome is not Outcome.FINISHED]
            assert {(event.outcome, event.output_tokens, event.cost_nusd) for event in refused} == {
                (Outcome.REFUSED, 0, 0)
            }
            # Who waited here and left has a line that says so; on a busy machine some are refused in the end.
            refused = [event for event in refused if event.model == "mine"]
            assert moved <= len(refused) <= moved + sum(answer.status_code != 200 for answer in answers)
            # Those go first of whom nothing is here; in the end a slow machine can keep few.
            first = [int(event.request_id.removeprefix("r-")) for event in refused[: moved // 3]]
            assert [number for number in first if number % 6 == 0] == []
            assert sum(event.cost_nusd for event in system.ledger.events) == len(away) * 8 * 10**9
            assert system.admission.leases.active == 0


async def test_no_more_leave_than_the_budget_for_the_provider_pays():
    budget = Limit(id="day", subject="*", kind=LimitKind.USD_PER_DAY, value=3 * 8 * 10**9)
    with scripted_openai(SLOW) as own, scripted_openai(QUICK) as cloud:
        async with upstream_gateway(
            "", balance=BalanceConfig(), models=models(own, cloud), admitting=PRICES, limited=[budget]
        ) as system:
            answers = await send_together(system)
            away = sent_away(answers)
            assert len(away) == 3
            assert sum(event.cost_nusd for event in system.ledger.events) == 3 * 8 * 10**9
            # A request that stays is served in time or rejected; none hangs, and nothing is held.
            assert {answer.status_code for answer in answers} <= SERVED_OR_REFUSED
            assert system.admission.leases.active == 0


async def test_a_request_that_may_not_move_waits_while_others_are_moved():
    with scripted_openai(SLOW) as own, scripted_openai(QUICK) as cloud:
        async with before(own, cloud) as system:
            answers = await send_together(system, **{"x-maitred-local-only": "true"})
            assert sent_away(answers) == []
            assert {event.model for event in system.ledger.events} == {"mine"}


async def test_when_the_pressure_is_over_requests_stay_again():
    with scripted_openai(SLOW) as own, scripted_openai(QUICK) as cloud:
        async with before(own, cloud) as system:
            assert sent_away(await send_together(system))
            later = [await ask(system, fresh(900 + number), f"later-{number}") for number in range(2)]
            assert sent_away(later) == []
            finished = [event for event in system.ledger.events if event.request_id.startswith("r-later")]
            assert [event.model for event in finished] == ["mine", "mine"]

"""Three servers over real HTTP, of which one's metrics stop answering after their first page.

Its last report is trusted while it is fresh. Later it gets its part of the requests whatever it reported: neither all
of them nor none.
"""

import asyncio
from collections import Counter

import pytest

from maitred.config.tree import TextModelConfig
from maitred.dispatch.config import ReportsConfig
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.balance.config import BalanceConfig
from maitred.testing.scripted_openai import DelayDistribution, ServerScript, scripted_openai
from tests.support.upstream_gateway import upstream_gateway

ROUNDS, AT_ONCE = 4, 6
ANSWERS_AFTER_S = 0.7
"""Long enough for all requests of a round to be sent before one is answered, on a busy machine as well."""
NEVER_OLD, SOON_OLD = ReportsConfig(fresh_s=3600.0), ReportsConfig(fresh_s=0.02, half_s=0.02)


def server(strangers, pages=None):
    """Says that so many requests of others wait in it."""
    page = f"sglang:num_running_reqs {{open}}\nsglang:num_queue_reqs {strangers}\n"
    return ServerScript(
        ttft=DelayDistribution(mean_s=ANSWERS_AFTER_S),
        itl=DelayDistribution(mean_s=0.001),
        metrics=page,
        metrics_pages=pages,
    )


async def shares(reported, peers_say, reports):
    """Which part of the requests each of three gets, of which the first has stopped telling; and its trust."""
    with (
        scripted_openai(server(reported, pages=1)) as silent,
        scripted_openai(server(peers_say)) as one,
        scripted_openai(server(peers_say)) as other,
    ):
        model = TextModelConfig(
            upstreams=[
                UpstreamConfig(url=f"{each.url}/v1", name=name, dialect="sglang", probe_every_s=0.1)
                for name, each in (("silent", silent), ("one", one), ("other", other))
            ]
        )
        async with upstream_gateway("", model=model, balance=BalanceConfig(), reports=reports) as system:
            core = system.dispatcher.core
            endpoint_state = core.endpoint_states[0]

            def trust():
                return core.load_estimator.trust(endpoint_state, asyncio.get_running_loop().time())

            await system.wait_until(
                lambda: all(replica.scraped_load.waiting is not None for replica in system.model.replicas)
            )
            await system.wait_until(lambda: trust() < 0.01 or reports is NEVER_OLD)
            for _ in range(ROUNDS):
                answers = await asyncio.gather(*(system.chat() for _ in range(AT_ONCE)))
                assert {answer.status_code for answer in answers} == {200}
            await system.wait_until(lambda: system.nothing_left)
            assert silent.process.poll() is None
            assert system.model.replicas[0].status.is_up, "a server whose metrics hang is not down"
            counts = Counter(event.replica for event in system.ledger.events)
            return counts["silent"] / (ROUNDS * AT_ONCE), trust()


@pytest.mark.parametrize(("reported", "peers_say", "believed"), [(90, 2, 0.0), (0, 90, 1.0)], ids=["busy", "idle"])
async def test_an_old_word_neither_shuts_a_server_out_nor_makes_it_look_idle(reported, peers_say, believed):
    share, trust = await shares(reported, peers_say, NEVER_OLD)
    assert abs(share - believed) <= 0.12, "it is believed while it is fresh"
    assert trust == 1.0
    share, trust = await shares(reported, peers_say, SOON_OLD)
    assert 0.15 <= share <= 0.55
    assert trust < 0.01

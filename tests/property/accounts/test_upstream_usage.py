"""Ten thousand answers of a server that lies in every count: no budget is overspent, nothing is charged that was not
reserved, and what is recorded fits what was asked and granted.
"""

import json
import math
import random
from collections import defaultdict

from maitred.app.request.usage_counter import OutputGrant, UpstreamUsageCounter
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import MaitredError, QuotaExceeded
from maitred.replica.upstream.dialects import DIALECTS
from maitred.replica.upstream.event_stream import EventStreamParser
from maitred.replica.upstream.openai_stream import OpenAIStreamParser
from maitred.routing.catalog import TextModel
from maitred.wire.anthropic.answer import MessagesStreamParser
from tests.support.admission_services import AdmissionSetup, limit

ANSWERS = 10_000
WINDOW = 4_096
BUDGET_NUSD = 1_000_000_000
PRICE = {"prompt": 10.0, "cached": 1.0, "output": 30.0, "cache_write": 12.5, "cache_write_1h": 20.0}
NAMES = {
    "openai": [
        *("prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens", "cached_tokens"),
        *("prompt_cache_hit_tokens", "prompt_cache_miss_tokens", "cache_read_input_tokens", "reasoning_tokens"),
        *("cache_creation_input_tokens", "promptTokenCount", "candidatesTokenCount", "thoughtsTokenCount"),
    ],
    "anthropic": ["input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"],
}


def a_lie(rng):
    return rng.choice(
        [
            *(None, 0, 1, -1, -5000, 7, 40, 41, 1000, 5000.5, "12", "x", [], {}, True, 10**6, 10**8, 2**31, 10**17),
            *(9e15, 1e308, rng.randrange(100), rng.randrange(10_000), str(rng.randrange(10_000))),
        ]
    )


def lies(rng, kind):
    names = NAMES[kind]
    reported = {name: a_lie(rng) for name in rng.sample(names, rng.randrange(len(names)))}
    if rng.random() < 0.5:
        reported["prompt_tokens_details"] = {"cached_tokens": a_lie(rng), "cache_write_tokens": a_lie(rng)}
        reported["cache_creation"] = {"ephemeral_1h_input_tokens": a_lie(rng)}
    return reported


def event(data, kind=None):
    return (f"event: {kind}\n" if kind else "").encode() + b"data: " + json.dumps(data).encode() + b"\n\n"


def openai_answer(rng, choices):
    for _ in range(rng.choice([0, 1, 3, 30, 300])):
        delta = {rng.choice(["content", "reasoning_content"]): rng.choice(["a ", "word ", "語" * 9, " " * 500])}
        usage = lies(rng, "openai") if rng.random() < 0.1 else None
        yield event({"choices": [{"index": rng.randrange(choices), "delta": delta}], "usage": usage})
    for index in range(choices):
        yield event({"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]})
    for _ in range(rng.randrange(3)):
        yield event({"choices": [], "usage": lies(rng, "openai")})
    yield b"data: [DONE]\n\n"


def anthropic_answer(rng):
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": []}
    yield event({"type": "message_start", "message": {**message, "usage": lies(rng, "anthropic")}}, "message_start")
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield event(block, "content_block_start")
    for _ in range(rng.choice([0, 1, 30, 300])):
        delta = {"type": "text_delta", "text": rng.choice(["a ", "word ", " " * 500])}
        yield event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")
    yield event({"type": "content_block_stop", "index": 0}, "content_block_stop")
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": lies(rng, "anthropic")}
    yield event(end, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


async def serve(setup, model, rng):
    """One request, from its reservation to its settlement; returns what was reserved and what was recorded."""
    choices = rng.choice([1, 1, 3])
    speaks_anthropic = choices == 1 and rng.random() < 0.3
    prompt_tokens, max_tokens = rng.randrange(1, 200), rng.randrange(1, 100)
    context = RequestContext("req", 0.0, prompt_tokens=prompt_tokens)
    request = setup.request(prompt_tokens, max_tokens, choices=choices, context=context)
    grant = await setup.admission.admit(request)
    async with grant:
        counter = UpstreamUsageCounter(
            model, context, float(prompt_tokens), OutputGrant(grant.max_tokens, choices, WINDOW)
        )
        parser = (
            EventStreamParser("there", MessagesStreamParser())
            if speaks_anthropic
            else OpenAIStreamParser("there", choices, DIALECTS[rng.choice(["generic", "vllm", "openai", "sglang"])])
        )
        outcome = Outcome.FINISHED
        try:
            for piece in anthropic_answer(rng) if speaks_anthropic else openai_answer(rng, choices):
                if (batch := parser.feed(piece)) is not None:
                    counter.count(batch)
                    grant.record_usage(context.usage)
                    assert context.completion_tokens <= choices * grant.max_tokens
                    if len(counter.choices_over_grant) == choices:
                        break
                    if rng.random() < 0.001:
                        outcome = Outcome.CANCELLED
                        break
        except MaitredError:
            outcome = Outcome.FAILED
        if outcome is Outcome.FINISHED:
            counter.close()
        await grant.settle(context.usage, outcome)
    event = setup.ledger.events[-1]
    price = setup.admission.price_of("m")
    assert event.cost_nusd <= price.max_cost_nusd(prompt_tokens, choices * grant.max_tokens)
    assert set(event.charges.values()) <= {event.cost_nusd}
    assert 0 <= event.output_tokens <= choices * grant.max_tokens
    assert 1 <= event.prompt_tokens <= WINDOW
    assert 0 <= event.cached_tokens + event.cache_write_tokens <= event.prompt_tokens


async def test_a_server_that_lies_in_every_count_overspends_nothing():
    setup = AdmissionSetup(limit("*", "usd_per_day", BUDGET_NUSD), price=PRICE)
    model, rng = TextModel("m", []), random.Random(28)
    for _ in range(ANSWERS):
        try:
            await serve(setup, model, rng)
        except QuotaExceeded:
            setup.clock.now_s += 86_400
        (budget,) = await setup.admission.budgets("*")
        assert 0 <= budget.charged <= BUDGET_NUSD
        assert not budget.reserved
    spent = defaultdict(int)
    for event in setup.ledger.events:
        for counter, amount in event.charges.items():
            spent[counter] += amount
    assert len(spent) > 5
    assert max(spent.values()) <= BUDGET_NUSD
    assert sum(spent.values()) == sum(event.cost_nusd for event in setup.ledger.events)
    assert math.isfinite(model.output_ratio.value)
    assert {event.outcome for event in setup.ledger.events} >= {Outcome.FINISHED, Outcome.CANCELLED}

"""Whatever is refused before it is decoded would have been refused afterwards, too."""

import asyncio
from contextlib import AsyncExitStack

from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.core.errors import InvalidRequest, LimitReached
from tests.support.admission_services import ALICE, AdmissionSetup, limit

KINDS = [
    *("requests_per_minute", "tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute"),
    *("concurrent_requests", "concurrent_tokens", "usd_per_day", "usd_total"),
]
LIMITS = st.lists(
    st.builds(
        lambda subject, kind, value, model: limit(subject, kind, value, model=model),
        st.sampled_from(["key:alice", "tenant:team", "tenant:acme", "*"]),
        st.sampled_from(KINDS),
        st.integers(1, 60),
        st.sampled_from([None, None, "tiny"]),
    ),
    max_size=4,
    unique_by=lambda made: (made.subject, made.kind, made.model),
)
PRICES = st.dictionaries(
    st.sampled_from(["*", "tiny", "large"]),
    st.builds(PriceConfig, prompt=st.sampled_from([0.0, 0.001, 0.01]), output=st.sampled_from([0.0, 0.002, 0.01])),
)
SIZES = st.tuples(st.integers(1, 20), st.integers(1, 20), st.sampled_from(["tiny", "large"]))
STEPS = st.lists(st.tuples(SIZES, st.floats(0.0, 5.0)), max_size=6)


@settings(deadline=None)
@given(limits=LIMITS, prices=PRICES, steps=STEPS, last=SIZES)
def test_nothing_is_refused_that_would_have_been_accepted(limits, prices, steps, last):
    async def run():
        setup = AdmissionSetup(*limits)
        setup.admission.reconfigure(AdmissionConfig(prices=prices))

        async def is_refused(size):
            prompt_tokens, max_tokens, model = size
            try:
                await stack.enter_async_context(setup.admit(prompt_tokens, max_tokens, model=model))
            except (LimitReached, InvalidRequest):
                return True
            return False

        async def is_refused_before():
            try:
                await setup.admission.check_limits(ALICE, 1)
            except LimitReached:
                return True
            return False

        async with AsyncExitStack() as stack:
            for size, pause_s in steps:
                await is_refused(size)
                setup.clock.now_s += pause_s
            if await is_refused_before():
                assert await is_refused(last)

    asyncio.run(run())

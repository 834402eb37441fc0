"""What is given instead of a refusal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.admission.degradation import DegradationStep
from maitred.admission.policy.ladder import DegradationLadder, DegradedRequest
from maitred.core.errors import (
    Bug,
    DeadlineUnmeetable,
    MaitredError,
    ModelNotFound,
    QueueFull,
    RateLimited,
    ReplicaUnavailable,
)
from maitred.core.inference import InferenceRequest
from maitred.core.request import SamplingParams

WINDOW_LEFT = 4000
REFUSAL = DeadlineUnmeetable("Come back in 9 s.", retry_after_s=9.0)
S512 = DegradationStep(step="shorten", to_tokens=512)
S128 = DegradationStep(step="shorten", to_tokens=128)
SMALL = DegradationStep(step="model", to="small")
TINY = DegradationStep(step="model", to="tiny")
OVERFLOW = DegradationStep(step="overflow", to="provider")


def asked(max_tokens: int | None = 1000, *, min_tokens: int = 0, degradable: bool = True) -> InferenceRequest:
    sampling = SamplingParams(max_tokens=0, seed=0, min_tokens=min_tokens)
    return InferenceRequest("large", ["Hi"], sampling, max_tokens=max_tokens, degradable=degradable)


class LadderRun:
    """Runs a ladder where only some variants fit, and keeps what was tried."""

    def __init__(self, *steps: DegradationStep, fits: tuple[str, ...] = ()) -> None:
        self.tried: list[str] = []
        self.skipped: list[tuple[str, str]] = []
        self._fits = fits
        self._ladder = DegradationLadder(steps, skipped=lambda *skip: self.skipped.append(skip))

    async def attempt(self, variant: DegradedRequest) -> str:
        name = f"{variant.ask.model}/{variant.ask.max_tokens}"
        self.tried.append(name)
        if name not in self._fits:
            raise QueueFull
        return name

    async def down(self, ask: InferenceRequest, refusal: MaitredError = REFUSAL) -> tuple[str, ...]:
        variant, name = await self._ladder.first_that_fits(ask, WINDOW_LEFT, refusal, self.attempt)
        assert name == self.tried[-1]
        return variant.degraded


async def test_the_first_step_that_helps_is_taken() -> None:
    ladder_run = LadderRun(S512, S128, SMALL, fits=("large/128", "small/1000"))
    assert await ladder_run.down(asked()) == ("max_tokens=128",)
    assert ladder_run.tried == ["large/512", "large/128"]
    assert ladder_run.skipped == [("shorten", "queue_full")]


async def test_each_step_is_tried_alone_and_then_on_those_above() -> None:
    ladder_run = LadderRun(S512, SMALL, S128, TINY)
    with pytest.raises(DeadlineUnmeetable):
        await ladder_run.down(asked())
    assert ladder_run.tried == [
        *("large/512", "small/1000", "small/512", "large/128", "small/128", "tiny/1000", "tiny/128"),
    ]


async def test_all_that_was_taken_is_announced() -> None:
    assert await LadderRun(S128, SMALL, fits=("small/128",)).down(asked()) == ("max_tokens=128", "model=small")


async def test_without_help_the_refusal_is_the_one_of_the_whole_request() -> None:
    with pytest.raises(DeadlineUnmeetable) as caught:
        await LadderRun(S128, SMALL).down(asked())
    assert caught.value is REFUSAL


@pytest.mark.parametrize("refusal", [QueueFull(), ReplicaUnavailable()])
async def test_load_and_absence_lead_to_the_ladder(refusal: MaitredError) -> None:
    assert await LadderRun(SMALL, fits=("small/1000",)).down(asked(), refusal) == ("model=small",)


async def test_limits_and_the_wish_of_the_caller_do_not() -> None:
    ladder_run = LadderRun(SMALL, fits=("small/1000",))
    limited = RateLimited("", subject="", limit="", value=0, reading=None)  # type: ignore[arg-type]
    with pytest.raises(RateLimited):
        await ladder_run.down(asked(), limited)
    with pytest.raises(DeadlineUnmeetable):
        await ladder_run.down(asked(degradable=False))
    assert ladder_run.tried == []


async def test_what_is_short_already_is_not_shortened() -> None:
    ladder_run = LadderRun(S128)
    for ask in (asked(128), asked(1), asked(max_tokens=2000, min_tokens=2000)):
        with pytest.raises(DeadlineUnmeetable):
            await ladder_run.down(ask)
    assert ladder_run.tried == []
    assert ladder_run.skipped == [("shorten", "nothing_to_take")] * 3


async def test_a_request_without_a_length_is_as_long_as_it_would_get() -> None:
    assert await LadderRun(S128, fits=("large/128",)).down(asked(None)) == ("max_tokens=128",)
    ladder_run = LadderRun(DegradationStep(step="shorten", to_tokens=WINDOW_LEFT), fits=("large/4000",))
    with pytest.raises(DeadlineUnmeetable):
        await ladder_run.down(asked(None))


async def test_a_model_without_a_length_keeps_the_length_open() -> None:
    """So that the smaller model's own window decides."""
    assert await LadderRun(SMALL, fits=("small/None",)).down(asked(None)) == ("model=small",)


async def test_the_least_length_of_the_caller_holds() -> None:
    assert await LadderRun(S512, S128, fits=("large/600",)).down(asked(min_tokens=600)) == ("max_tokens=600",)
    ladder_run = LadderRun(S512, S128)
    with pytest.raises(DeadlineUnmeetable):
        await ladder_run.down(asked(min_tokens=600))
    assert ladder_run.tried == ["large/600"], "the second step has nothing left to take"
    assert ladder_run.skipped == [("shorten", "queue_full"), ("shorten", "nothing_to_take")]


async def test_a_step_to_the_same_model_is_none() -> None:
    ladder_run = LadderRun(DegradationStep(step="model", to="large"))
    with pytest.raises(DeadlineUnmeetable):
        await ladder_run.down(asked())
    assert ladder_run.skipped == [("model", "nothing_to_take")]


async def test_overflow_takes_the_whole_request() -> None:
    ladder_run = LadderRun(S128, OVERFLOW, fits=("provider/1000",))
    assert await ladder_run.down(asked()) == ("overflow=provider",)


async def test_what_the_smaller_model_cannot_do_is_no_step() -> None:
    skipped = []

    async def attempt(variant: DegradedRequest) -> None:
        raise ModelNotFound

    ladder = DegradationLadder([SMALL], skipped=lambda *skip: skipped.append(skip))
    with pytest.raises(DeadlineUnmeetable):
        await ladder.first_that_fits(asked(), WINDOW_LEFT, REFUSAL, attempt)
    assert skipped == [("model", "model_not_found")]


async def test_a_fault_of_ours_is_not_hidden() -> None:
    async def attempt(variant: DegradedRequest) -> None:
        raise Bug

    with pytest.raises(Bug):
        await DegradationLadder([SMALL]).first_that_fits(asked(), WINDOW_LEFT, REFUSAL, attempt)


STEPS = st.lists(
    st.one_of(
        st.builds(DegradationStep, step=st.just("shorten"), to_tokens=st.integers(1, 40)),
        st.builds(DegradationStep, step=st.just("model"), to=st.sampled_from(["large", "small", "tiny"])),
        st.just(OVERFLOW),
    ),
    max_size=6,
)


@given(STEPS, st.none() | st.integers(1, 50), st.integers(0, 20))
async def test_no_variant_is_tried_twice_or_takes_nothing(
    steps: list[DegradationStep], max_tokens: int | None, min_tokens: int
) -> None:
    ask = asked(max_tokens, min_tokens=min(min_tokens, max_tokens or min_tokens))
    tried: list[DegradedRequest] = []

    async def attempt(variant: DegradedRequest) -> None:
        tried.append(variant)
        raise QueueFull

    with pytest.raises(DeadlineUnmeetable):
        await DegradationLadder(steps).first_that_fits(ask, 45, REFUSAL, attempt)
    assert len(tried) <= 2 * len(steps)
    here = [variant for variant in tried if variant.ask.model != "provider"]
    assert len({(variant.ask.model, variant.ask.max_tokens) for variant in here}) == len(here)
    assert all(variant.degraded for variant in tried)
    for variant in here:
        least = variant.ask.max_tokens
        assert least is None or ask.sampling.min_tokens <= least <= (45 if max_tokens is None else max_tokens)

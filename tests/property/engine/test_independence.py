"""An answer does not depend on its neighbours.

Every request of a random batch is answered twice: alone, by an engine that computes whole prompts and remembers
nothing; and together with all others, by an engine whose KV cache is too small for them (so it preempts), whose steps
are short (so it chunks) and which shares prefixes. Tokens and their log-probabilities, and those of the prompts, must
be the same, to the last bit. Nor does an answer depend on where it is computed: one that is taken over in the middle by
another engine goes on as it would have; nor on guesses at what it will be, right or wrong.
"""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.core.request import EngineRequest, FinishReason, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig, SpeculationConfig
from maitred.engine.speculate.speculator import Speculator
from tests.support.clock import FakeClock
from tests.support.drafters import Always, Rumour
from tests.support.models import make_model

VOCABULARY = 131
SHARED_PREFIX = [5 + position % 97 for position in range(40)]

sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 40),
    seed=st.integers(0, 2**63),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.5]),
    top_p=st.sampled_from([1.0, 1.0, 0.9]),
    top_k=st.sampled_from([0, 0, 7]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    top_logprobs=st.sampled_from([None, 2]),
    prompt_logprobs=st.sampled_from([None, None, 0, 3]),
    min_tokens=st.integers(0, 5),
    allowed_token_ids=st.sampled_from([(), (), tuple(range(4, VOCABULARY, 3))]),
    bad_words_token_ids=st.sampled_from([(), (), tuple((5 + i % 50, 4 + i % 120) for i in range(200)), ((7,), (10,))]),
    n=st.sampled_from([1, 1, 1, 3]),
)
prompts = st.tuples(st.integers(0, 40), st.lists(st.integers(4, VOCABULARY - 1), min_size=1, max_size=60)).map(
    lambda drawn: SHARED_PREFIX[: drawn[0]] + drawn[1]
)


class Engines:
    """The calm one and the crowded ones, on the same weights."""

    def __init__(self, folder):
        common = {"device": "cpu", "dtype": "fp32", "threads": 1, "block_tokens": 8}
        self.calm, _ = build(
            folder,
            EngineConfig(
                **common,
                kv_memory_bytes=4 << 20,
                step_tokens=512,
                max_sequences=128,
                prefix_cache=False,
                speculation=SpeculationConfig(method="none"),
            ),
        )
        # What a step computes is not to depend on how long others took: whether it preempts would, too.
        batched_config = EngineConfig(
            **common, kv_memory_bytes=1 << 20, step_tokens=70, max_sequences=64, bake_off="off"
        )
        self.batched, _ = build(folder, batched_config, clock=FakeClock())
        self.drafting, _ = build(folder, batched_config, clock=FakeClock())
        self.drafter = Rumour(VOCABULARY)
        self.drafting._speculator = Speculator(self.drafter, 6, FakeClock(), worth=Always())


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "llama3")
    return Engines(folder)


def prompt_entries(part):
    """What is said of each position, so that the chunks of a prompt make no difference."""
    sizes = {"logprobs": 4, "ranks": 4, "top_tokens": 4 * part.top, "top_logprobs": 4 * part.top}
    return [
        (part.start + i, *(getattr(part, field)[i * size : (i + 1) * size] for field, size in sizes.items()))
        for i in range(part.count)
    ]


def run(engine, requests, between=lambda engine, step: None):
    """Per (request, choice): tokens, log-probabilities, finish reason.

    Args:
        engine: Where they run.
        requests: All at once.
        between: Called before each step with the engine and the step's number.
    """
    for request in requests:
        engine.submit("owner", request)
    step = 0
    answers: dict[tuple[str, int], tuple[list[int], list[float], list[FinishReason]]] = {}
    while engine.occupied:
        between(engine, step)
        step += 1
        for output in engine.step().get("owner", []):
            tokens, logprobs, finishes = answers.setdefault((output.request_id, output.delta.index), ([], [], []))
            if output.delta.prompt_logprobs is not None:
                assert not tokens, "the log-probabilities of a prompt come before the answer"
                logprobs += prompt_entries(output.delta.prompt_logprobs)
            tokens += output.delta.tokens
            logprobs += [entry.logprob for entry in output.delta.logprobs or []]
            finishes += [output.delta.finish] if output.delta.finish else []
    load = engine.load()
    assert load.free_blocks == load.total_blocks
    return answers


def check(engines, requests, between=lambda engine, step: None):
    alone = {}
    for request in requests:
        alone |= run(engines.calm, [request])
    engines.drafter.answers = {key: tokens for key, (tokens, _, _) in alone.items()}
    for engine in (engines.batched, engines.drafting):
        together = run(engine, requests, between)
        assert together.keys() == alone.keys()
        for key, (tokens, logprobs, finishes) in alone.items():
            assert together[key][0] == tokens, key
            assert together[key][2] == finishes
            assert len(finishes) == 1
            assert together[key][1] == logprobs, key


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(asked=st.lists(st.tuples(prompts, sampling), min_size=2, max_size=24))
def test_answers_alone_equal_answers_in_a_random_batch(engines, asked):
    check(
        engines, [EngineRequest(id=str(i), prompt=prompt, sampling=params) for i, (prompt, params) in enumerate(asked)]
    )


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=st.lists(
        st.tuples(prompts, sampling, st.lists(st.integers(0, 45), min_size=3, max_size=3)), min_size=1, max_size=16
    )
)
def test_alone_or_taken_over_in_the_middle(engines, asked):
    whole, left = {}, []
    for number, (prompt, params, cuts) in enumerate(asked):
        params = msgspec.structs.replace(params, prompt_logprobs=None)  # they are complete before there is an output
        request = EngineRequest(id=str(number), prompt=prompt, sampling=params)
        answers = run(engines.calm, [request])
        resumes = {
            index: tokens[: cuts[index]] for (_, index), (tokens, _, _) in answers.items() if cuts[index] < len(tokens)
        }
        whole |= {(id_, index): answers[id_, index] for id_, index in answers if index in resumes}
        if resumes:
            left.append(msgspec.structs.replace(request, resumes=resumes))
    engines.drafter.answers = {key: tokens for key, (tokens, _, _) in whole.items()}
    for engine in (engines.batched, engines.drafting):
        rest = run(engine, left)
        assert rest.keys() == whole.keys()
        for request in left:
            for index, output in request.resumes.items():
                tokens, logprobs, finishes = whole[request.id, index]
                assert output + rest[request.id, index][0] == tokens
                assert rest[request.id, index][2] == finishes
                assert rest[request.id, index][1] == logprobs[len(output) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alone_or_among_sixty_four(engines, temperature):
    before, guessed_before = engines.batched.load(), engines.drafting.load()
    requests = [
        EngineRequest(
            id=str(i),
            prompt=SHARED_PREFIX[: i % 41] + [4 + (7 * i + j) % 120 for j in range(1 + i % 50)],
            sampling=SamplingParams(max_tokens=40, seed=i, temperature=temperature, ignore_eos=True),
        )
        for i in range(64)
    ]
    check(engines, requests)
    after = engines.batched.load()
    assert after.preemptions > before.preemptions, "the test is meant to preempt"
    assert after.cached_tokens > before.cached_tokens, "the test is meant to share prefixes"
    guessed = engines.drafting.load()
    assert guessed.preemptions > guessed_before.preemptions
    assert guessed.steps - guessed_before.steps < 0.8 * (after.steps - before.steps), "right guesses save steps"
    right = guessed.accepted_tokens - guessed_before.accepted_tokens
    drafted = guessed.drafted_tokens - guessed_before.drafted_tokens
    assert 0.2 * drafted < right < drafted


def test_a_prompt_longer_than_a_step_is_chunked_even_with_nobody_else_there(engines):
    prompt = [4 + position % 120 for position in range(250)]
    check(engines, [EngineRequest(id="long", prompt=prompt, sampling=SamplingParams(max_tokens=5, seed=1))])


def test_alone_or_among_tenants_while_readers_stop_and_go_on(engines):
    requests = [
        EngineRequest(
            id=str(i),
            prompt=SHARED_PREFIX[: i % 41] + [4 + (5 * i + j) % 120 for j in range(1 + (7 * i) % 80)],
            sampling=SamplingParams(max_tokens=30, seed=i, temperature=0.8, ignore_eos=True, n=1 + i % 2),
            flow=Flow((FlowLevel(f"tenant-{i % 5}", 1.0 + i % 3),), list(PriorityClass)[i % 4]),
        )
        for i in range(24)
    ]

    def stop_and_go(engine, step):
        for i in range(len(requests)):
            # Each of them stands still for 5 steps in 17, never all at once, and at the end they all go on.
            if (step + 3 * i) % 17 == 0 and step < 200:
                engine.pause("owner", str(i), paused=True)
            elif (step + 3 * i) % 17 == 5 or step == 200:
                engine.pause("owner", str(i), paused=False)

    check(engines, requests, stop_and_go)

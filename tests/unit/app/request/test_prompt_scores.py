"""Log-probabilities of a prompt, on their way from the engine's arrays to the first delta of each choice."""

import struct

import msgspec
import pytest

from maitred.app.request.planner import RequestBounds
from maitred.app.request.prompt_scores import PromptScoreReader
from maitred.core.errors import InvalidRequest, ReplicaLost
from maitred.core.request import FinishReason, PromptLogprobs, TokenDelta, Usage
from tests.unit.app.request.test_pipeline import LENGTH, TOKENIZER, MemoryReplica, ask, ids, run, text_of
from tests.unit.app.request.test_token_continuation import LOST, Fragile, Gateway

PROMPT = ids("The little Füße")
TEXT = TOKENIZER.decode(PROMPT)


def part(start, stop, top=2):
    """Position 3 has -3.0 and rank 3; the others there are tokens 4 and 5 with -3.5 and -4.0."""
    places = range(start, stop)
    others = [(place + 1 + k, -place - 0.5 * (k + 1)) for place in places for k in range(top)]
    return PromptLogprobs(
        start=start,
        top=top,
        logprobs=struct.pack(f"<{len(places)}f", *(-float(place) for place in places)),
        ranks=struct.pack(f"<{len(places)}i", *places),
        top_tokens=struct.pack(f"<{len(others)}i", *(token for token, _ in others)),
        top_logprobs=struct.pack(f"<{len(others)}f", *(logprob for _, logprob in others)),
    )


def scored(start, stop, index=0):
    return TokenDelta(index, [], prompt_logprobs=part(start, stop))


def echoing(**fields):
    return ask(prompt=[PROMPT], echo=True, **{"top_logprobs": 2, **fields})


def check_whole(scores):
    assert [score.chosen.logprob for score in scores.echoed] == [None, *(-float(i) for i in range(1, len(PROMPT)))]
    assert [score.chosen.raw for score in scores.echoed] == [TOKENIZER.token_bytes(token) for token in PROMPT]
    offsets = [len(TOKENIZER.decode(PROMPT[:count]).rstrip("\ufffd")) for count in range(len(PROMPT))]
    assert [score.offset for score in scores.echoed] == offsets
    assert [len(score.top) for score in scores.echoed] == [0] + [2] * (len(PROMPT) - 1)


async def test_an_echoed_prompt_is_scored_like_the_beginning_of_the_answer():
    (token,) = ids(" there")
    end = TokenDelta(0, [token], LENGTH)
    for cut in (2, len(PROMPT)):
        replica = MemoryReplica(
            [scored(1, cut)], *([[scored(cut, len(PROMPT)), end]] if cut < len(PROMPT) else [[end]])
        )
        parts, context = await run(replica, echoing(prompt_logprobs=1))
        assert text_of(parts) == TEXT + " there"
        check_whole(parts[0].prompt_scores)
        entries = parts[0].prompt_scores.logprobs
        assert entries[0] is None
        assert {token: (entry.logprob, entry.rank) for token, entry in entries[2].items()} == {
            PROMPT[2]: (-2.0, 2),
            3: (-2.5, 1),
        }
        assert list(entries[2]) == [PROMPT[2], 3]
        assert replica.requests[0].sampling.prompt_logprobs == 2, "what both want of it"
        assert context.usage == Usage(len(PROMPT), 1)


async def test_other_choices_wait_for_the_first_which_scores_the_prompt():
    tokens = ids(" there my")
    replica = MemoryReplica(
        [TokenDelta(1, tokens[:1]), scored(1, 2)],
        [TokenDelta(1, tokens[1:], LENGTH)],
        [scored(2, len(PROMPT)), TokenDelta(0, tokens, LENGTH)],
    )
    parts, context = await run(replica, echoing(n=2))
    for index in range(2):
        (first, *rest) = [part for part in parts if part.index == index]
        check_whole(first.prompt_scores)
        assert all(part.prompt_scores is None for part in rest)
        assert text_of(parts, index) == TEXT + " there my"
    assert context.usage == Usage(len(PROMPT), 2 * len(tokens))


async def test_without_output_only_the_prompt_is_billed_and_may_fill_the_window():
    replica = MemoryReplica([scored(1, len(PROMPT)), TokenDelta(0, [], LENGTH)])
    parts, context = await run(replica, echoing(max_tokens=0))
    assert (text_of(parts), parts[-1].finish) == (TEXT, LENGTH)
    check_whole(parts[0].prompt_scores)
    assert replica.requests[0].sampling.max_tokens == 0
    assert context.usage == Usage(len(PROMPT), 0)
    assert context.first_token_s is not None
    long = [5] * 64  # the window of the model
    replica = MemoryReplica([TokenDelta(0, [], prompt_logprobs=part(1, 64)), TokenDelta(0, [], LENGTH)])
    parts, context = await run(replica, ask(prompt=[long], max_tokens=0, prompt_logprobs=0))
    assert len(parts[0].prompt_scores.logprobs) == 64
    assert parts[0].prompt_scores.echoed is None


async def test_a_prompt_of_one_token_has_no_log_probability_to_wait_for():
    parts, _ = await run(MemoryReplica([TokenDelta(0, ids("x"), LENGTH)]), ask(prompt=[[5]], prompt_logprobs=3))
    assert parts[0].prompt_scores.logprobs == [None]


async def test_what_would_fill_the_memory_is_refused_by_name():
    replica = MemoryReplica()
    for fields, param in (
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"prompt_logprobs": 9, "n": 3}, "prompt_logprobs"),
        ({"echo": True, "top_logprobs": 10, "n": 3}, "logprobs"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await run(
                replica,
                ask(prompt=[PROMPT, PROMPT], **fields),
                bounds=RequestBounds(max_prompt_logprobs=60 * len(PROMPT) - 1),
            )
        assert refused.value.param == param
    assert replica.requests == []


async def test_a_partial_answer_does_not_wait_for_a_prompt_that_is_given_up():
    late, others = TokenDelta(0, [], FinishReason.DEADLINE), [TokenDelta(1, ids(" x")), TokenDelta(1, ids("y"), LENGTH)]
    for batches in ([[scored(1, 2)], [others[0]], [late], [others[1]]], [[scored(1, 2)], others, [late]]):
        parts, _ = await run(MemoryReplica(*batches), msgspec.structs.replace(echoing(n=2), partial=True))
        assert {part.index: part.finish for part in parts if part.finish} == {0: FinishReason.DEADLINE, 1: LENGTH}
        assert text_of(parts, 1) == TEXT + " xy"


async def test_another_replica_scores_the_prompt_anew_unless_it_is_scored():
    end = TokenDelta(0, ids(" there"), LENGTH)
    first, second = Fragile(([[scored(1, 2)]], LOST)), Fragile(([[scored(1, len(PROMPT)), end]], None))
    parts = await Gateway(first, second).run(echoing())
    check_whole(parts[0].prompt_scores)
    assert second.requests[0].sampling.prompt_logprobs == 2
    begun = [[scored(1, len(PROMPT)), TokenDelta(0, ids(" there"))]]
    first, second = Fragile((begun, LOST)), Fragile(([[TokenDelta(0, ids(" my"), LENGTH)]], None))
    parts = await Gateway(first, second).run(echoing())
    check_whole(parts[0].prompt_scores)
    assert text_of(parts) == TEXT + " there my"
    assert second.requests[0].sampling.prompt_logprobs is None


def test_scores_of_other_tokens_than_the_next_are_an_engine_that_cannot_be_trusted():
    for wrong in (part(2, 3), part(1, len(PROMPT) + 1)):
        with pytest.raises(ReplicaLost):
            PromptScoreReader(TOKENIZER, PROMPT, echoing()).add(wrong)

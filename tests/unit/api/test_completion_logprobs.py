"""Log-probabilities on /v1/completions, whose tokens are keys of an object."""

import json

import pytest

from maitred.api.completions import CompletionFormatter
from maitred.api.streaming import CollectedChoice
from maitred.core.context import RequestContext
from maitred.core.inference import TokenLogprob, TokenScore
from maitred.core.request import FinishReason, Usage
from maitred.wire.openai.decode import decode_completion


def token(raw: bytes, logprob: float) -> TokenLogprob:
    return TokenLogprob(raw.decode("utf-8", "replace"), raw, logprob)


def told(chosen: TokenLogprob, *top: TokenLogprob) -> tuple[list[str], list[dict[str, float]]]:
    formatter = CompletionFormatter(
        decode_completion(b'{"model":"m","prompt":"x"}', strict=True), "cmpl-1", RequestContext("req-1", 0.0)
    )
    choice = CollectedChoice(["x"], finish=FinishReason.LENGTH, scores=[TokenScore(chosen, [*top], 0)])
    logprobs = json.loads(formatter.whole([choice], Usage(1, 1)))["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["top_logprobs"]


def test_parts_of_characters_are_told_apart():
    first, second, whole = token(b"\xe2", -0.5), token(b"\xf0\x9f", -1.0), token("\ufffd".encode(), -2.0)
    assert told(first, first, second, whole) == (
        ["bytes:\\xe2"],
        [{"bytes:\\xe2": -0.5, "bytes:\\xf0\\x9f": -1.0, "\ufffd": -2.0}],
    )


@pytest.mark.parametrize("chosen", [token(b"c", -5.0), token(b"\x80", -5.0)])
def test_the_chosen_token_is_among_the_tops(chosen):
    names, (tops,) = told(chosen, token(b"a", -0.5), token(b"b", -1.0))
    assert list(tops) == ["a", "b", *names]
    assert told(chosen) == (names, [{names[0]: -5.0}])


def test_of_tokens_with_one_text_the_most_probable_counts():
    assert told(token(b"a", -0.5), token(b"a", -0.5), token(b"a", -3.0))[1] == [{"a": -0.5}]

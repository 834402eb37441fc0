"""What is counted of an upstream answer: the server's counts where they are credible, and estimates elsewhere."""

import pytest

from maitred.app.request.usage_counter import OutputGrant, UpstreamUsageCounter
from maitred.core.context import RequestContext
from maitred.core.inference import TextDelta
from maitred.core.request import Usage
from maitred.core.text_replica import TextBatch
from maitred.routing.catalog import TextModel

PROMPT = 100
WINDOW = 50_000


class Counted:
    """A counter whose request has a prompt of 100 estimated tokens and may have 40 tokens of answer."""

    def __init__(self, choices=1, choice_tokens=40):
        self.context = RequestContext("req", 0.0, prompt_tokens=PROMPT)
        self.model = TextModel("m", [])
        grant = OutputGrant(choice_tokens, choices, WINDOW)
        self.counter = UpstreamUsageCounter(self.model, self.context, float(PROMPT), grant)

    def text(self, text, index=0, *, usage=None, extra=None, chunks=1):
        self.counter.count(TextBatch([TextDelta(index, text, extra=extra)], usage, chunks))
        return self

    def close(self, usage=None):
        self.counter.count(TextBatch([], usage))
        self.reason = self.counter.close()
        return self.context.usage


def test_what_a_server_counted_is_what_counts():
    counted = Counted().text("word " * 10)
    assert counted.close(Usage(90, 12, 50, reasoning_tokens=2, cache_write_tokens=30)) == Usage(
        90, 12, 50, reasoning_tokens=2, cache_write_tokens=30
    )
    assert counted.reason == ""


@pytest.mark.parametrize("tokens", [0, 1, 20_000, WINDOW + 1, 10**8])
def test_a_count_of_the_prompt_that_cannot_be_is_estimated(tokens):
    counted = Counted().text("word " * 10)
    usage = counted.close(Usage(tokens, 12, tokens, cache_write_tokens=tokens))
    assert usage == Usage(PROMPT, 12, estimated=True)
    assert f"{tokens:,} tokens of prompt" in counted.reason
    assert counted.model.prompt_ratio.value == counted.model.output_ratio.value == 1.0


@pytest.mark.parametrize("tokens", [25, 1_000, 16_000])
def test_a_server_may_add_to_the_prompt(tokens):
    assert Counted().text("word").close(Usage(tokens, 1)) == Usage(tokens, 1)


@pytest.mark.parametrize("tokens", [0, 41, 10**6])
def test_a_count_of_the_answer_that_cannot_be_is_estimated(tokens):
    usage = Counted().text("word " * 16).close(Usage(90, tokens, reasoning_tokens=tokens))
    assert usage == Usage(90, 20, estimated=True)


def test_an_answer_without_tokens_is_believed():
    assert Counted().close(Usage(90, 0)) == Usage(90, 0)


def test_an_estimate_stays_within_the_grant():
    counted = Counted().text("word " * 40)
    assert counted.close() == Usage(PROMPT, 40, estimated=True)
    assert not counted.counter.choices_over_grant


def test_a_choice_with_certainly_more_than_was_granted_is_over_it():
    counted = Counted()
    for piece in range(89):
        counted.text("word ")
        assert not counted.counter.choices_over_grant, piece
    counted.text("word " * 89)
    (kept,) = counted.counter.choices_over_grant.values()
    assert 0 < kept < 0.1
    counted.text("word " * 1000)
    assert counted.close(Usage(90, 2_000)) == Usage(90, 40, estimated=True)


def test_a_running_count_beyond_the_grant_ends_the_choice():
    counted = Counted().text("a ", usage=Usage(90, 40))
    assert not counted.counter.choices_over_grant
    counted.text("a ", usage=Usage(90, 41))
    assert counted.counter.choices_over_grant == {0: 1.0}


def test_chunks_without_end_end_the_choice():
    counted = Counted()
    for _ in range(8 * (40 + 32)):
        counted.text("")
        assert not counted.counter.choices_over_grant
    counted.text("")
    assert counted.counter.choices_over_grant


def test_calls_without_end_end_the_choice():
    counted = Counted(choice_tokens=100_000)
    for number in range(1_024):
        counted.text("", extra={"tool_calls": [{"index": number, "function": {"name": "f"}}] * 2})
        assert not counted.counter.choices_over_grant
    counted.text("", extra={"tool_calls": [{"index": 10**9, "function": {"name": "f"}}]})
    assert counted.counter.choices_over_grant


def test_each_choice_has_a_grant_of_its_own():
    counted = Counted(choices=2)
    for _ in range(80):
        counted.text("word ", 0).text("word ", 1)
    assert not counted.counter.choices_over_grant
    for _ in range(20):
        counted.text("word ", 1)
    assert counted.counter.choices_over_grant.keys() == {1}


def test_only_what_the_model_wrote_counts():
    picture = {"images": [{"image_url": {"url": "data:image/png;base64," + "A" * 100_000}}], "annotations": [{}] * 99}
    calls = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}
    ]
    counted = Counted().text("", extra=picture).text("", extra={"tool_calls": calls})
    assert counted.context.completion_tokens == 4
    counted.text("", extra={"reasoning": "I think.", "reasoning_content": "I think."})
    assert counted.context.completion_tokens == 6
    assert not counted.counter.choices_over_grant


def test_a_continuation_counts_what_came_before_once():
    counted = Counted().text("word " * 8, usage=Usage(90, 10))
    counted.counter.resume()
    counted.text("word " * 8)
    assert counted.close(Usage(100, 10)) == Usage(90, 20)


@pytest.mark.parametrize(("text", "chunks", "tokens"), [("words ", 12, 12), ("word " * 16, 2, 40)])
def test_chunks_are_tokens_unless_their_text_is_that_of_several(text, chunks, tokens):
    counted = Counted()
    for _ in range(chunks):
        counted.text(text)
    counted.counter.resume()
    assert counted.context.completion_tokens == tokens


def test_a_continuation_shares_the_grant():
    counted = Counted().text("word " * 8, usage=Usage(90, 30))
    counted.counter.resume()
    counted.text("word " * 8)
    assert counted.close(Usage(120, 11)) == Usage(90, 40, estimated=True)

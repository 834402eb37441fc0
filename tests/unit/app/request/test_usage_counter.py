"""What is counted of an upstream answer: the server's counts where they are credible, and estimates elsewhere."""

import pytest

from maitred.app.request.usage_counter import OutputGrant, UpstreamUsageCounter
from maitred.core.context import RequestContext
from maitred.core.inference import TextDelta
from maitred.core.request import Usage
from maitred.core.text_replica import TextBatch
from maitred.routing.catalog import TextModel
from tests.support.tokenizers import byte_level

PROMPT = 100
WINDOW = 50_000


class Counted:
    """A counter whose request has a prompt of 100 estimated tokens and may have 40 tokens of answer."""

    def __init__(self, choices=1, choice_tokens=40, *, model=None, fields=None, sent=True):
        self.context = RequestContext("req", 0.0, prompt_tokens=PROMPT)
        self.model = model or TextModel("m", [])
        grant = OutputGrant(choice_tokens, choices, WINDOW, is_sent=sent)
        self.counter = UpstreamUsageCounter(self.model, self.context, float(PROMPT), grant, fields or {})

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
    for _ in range(8 * (40 + 16)):
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


def taught(text="word ", tokens=1, answers=8):
    """A model whose servers have sent chunks of one token."""
    model = TextModel("m", [])
    for _ in range(answers):
        counted = Counted(choice_tokens=10_000, model=model)
        for _ in range(64):
            counted.text(text)
        counted.close(Usage(90, 64 * tokens))
    return model


def cut_after(text="word ", most=400, **settings):
    """The number of chunks until the choice is over its grant."""
    counted = Counted(**settings)
    for number in range(1, most):
        counted.text(text)
        if counted.counter.choices_over_grant:
            assert counted.close() == Usage(PROMPT, 40, estimated=True)
            return number
    return None


def test_chunks_are_tokens_where_they_always_were():
    assert cut_after(model=taught(answers=7)) > 60
    assert cut_after(model=taught()) == 40 + 16 + 1
    assert cut_after("I", model=taught("I")) == 40 + 16 + 1
    # A server that sends several chunks for a token, or was given no limit, is not held to that.
    model = taught()
    counted = Counted(choice_tokens=10_000, model=model)
    for _ in range(64):
        counted.text("wo")
    counted.close(Usage(90, 32))
    assert cut_after("w", model=model, most=112) is None
    assert cut_after("I", model=taught(), sent=False, most=112) is None


def test_chunks_of_calls_are_not_their_tokens():
    counted = Counted(model=taught())
    for _ in range(100):
        counted.text("", extra={"tool_calls": [{"index": 0, "function": {"arguments": "1"}}]})
    assert not counted.counter.choices_over_grant


def test_the_tokenizer_of_the_model_knows_the_tokens():
    tokenizer = byte_level()
    text = "The fox went to the wood. "
    tokens = len(tokenizer.encode(text * 100, add_special_tokens=False)) / 100
    cut = cut_after(text, model=TextModel("m", [], tokenizer))
    assert 40 / tokens < cut <= (40 + 2 * 16 + 2) / tokens + 1
    for thoughts in ("reasoning_content", "refusal"):
        counted = Counted(model=TextModel("m", [], tokenizer))
        for _ in range(int(90 / tokens) + 1):
            counted.text("", extra={thoughts: text})
        assert counted.counter.choices_over_grant


@pytest.mark.parametrize("text", ["    ", "\n\t\t\t", "-----", "01234567", "€", "word ", "aB9$"])
def test_an_honest_answer_is_never_cut(text):
    """Each chunk is a token, and the answer ends with its grant, whatever was learnt of other texts."""
    for model in (TextModel("m", []), taught(), taught("w"), taught("wordlike ")):
        assert cut_after(text, most=41, model=model) is None


MEDIA = [
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://e.x/i"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "A"}}]}]},
    {"messages": [], "web_search_options": {}},
    {"messages": [], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
]


@pytest.mark.parametrize("fields", MEDIA)
def test_a_server_that_reads_more_than_text_may_count_what_fits_its_window(fields):
    counted = Counted(fields=fields).text("word ")
    assert counted.close(Usage(40_000, 2)) == Usage(40_000, 2)
    assert counted.model.prompt_ratio.value == 1.0  # it says nothing of texts
    assert Counted(fields=fields).text("word ").close(Usage(WINDOW + 1, 2)).estimated


def test_a_prompt_has_at_most_a_token_for_each_byte_of_the_request():
    schema = {"type": "object", "properties": {f"p{number}": {"enum": ["x"]} for number in range(800)}}
    fields = {"messages": [], "response_format": {"json_schema": {"schema": schema}}}
    assert not Counted(fields=fields).text("word ").close(Usage(30_000, 2)).estimated
    assert Counted(fields=fields).text("word ").close(Usage(49_000, 2)).estimated


def test_results_of_tools_at_the_server_are_read_too():
    counted = Counted()
    counted.counter.count(TextBatch([TextDelta(0, "", block={"type": "content_block_start"})], None, 1))
    assert not counted.text("word ").close(Usage(45_000, 2)).estimated


@pytest.mark.parametrize(
    "delta",
    [
        TextDelta(0, "", extra={"annotations": [{"n": 1}]}),
        TextDelta(0, "", extra={"images": ["x"], "content_parts": []}),
        TextDelta(0, "", block={"type": "content_block_start"}),
    ],
)
def test_entries_without_end_end_the_choice(delta):
    counted = Counted(choice_tokens=100_000)
    counted.counter.count(TextBatch([delta] * 16_384, None, 1))
    assert not counted.counter.choices_over_grant
    counted.counter.count(TextBatch([delta], None, 1))
    assert counted.counter.choices_over_grant


LONG = "word " * 1_000


@pytest.mark.parametrize("prompt", [LONG, list(range(1_000)), [LONG], [list(range(1_000))]])
def test_a_prompt_that_the_answer_repeats_is_no_output(prompt):
    counted = Counted(2, fields={"prompt": prompt, "echo": True, "n": 2})
    for index in range(2):
        counted.text(LONG, index).text("an answer", index)
    assert counted.counter.choices_over_grant == {}
    assert counted.context.completion_tokens == 4
    assert counted.close(Usage(90, 7)) == Usage(90, 7)
    counted = Counted(fields={"prompt": LONG, "echo": True})
    counted.text(LONG + "word " * 400)
    assert [*counted.counter.choices_over_grant] == [0], "what follows it may not be longer than was granted"


def test_a_prompt_that_is_only_echoed_has_no_output_whatever_its_server_counted():
    for reported in (0, 40):
        counted = Counted(40, 0, fields={"prompt": [LONG] * 40, "echo": True})
        for index in range(40):
            counted.text(LONG, index, usage=Usage(90, reported and index + 1))
        assert counted.counter.choices_over_grant == {}
        assert counted.close(Usage(90, reported)) == Usage(90, 0)
    assert Counted(1, 0, fields={"prompt": LONG, "echo": True}).text(LONG).close() == Usage(PROMPT, 0, estimated=True)

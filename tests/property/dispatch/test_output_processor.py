"""However a choice's tokens are cut into deltas and parts, what is shown and what is counted stays the same."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.app.request.output import OutputProcessor
from maitred.config.tree import BUNDLED_MODEL
from maitred.core.inference import InferenceRequest
from maitred.core.request import FinishReason, SamplingParams, TokenDelta
from maitred.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(BUNDLED_MODEL)
END = 3
WORDS = ["one", " two", " three", "é", " 日本", "🙂", "a", "b", "ab", " the", "\n"]
FAMILIAR = sorted({token for word in WORDS for token in TOKENIZER.encode(word, add_special_tokens=False)})
tokens = st.lists(st.one_of(st.sampled_from(FAMILIAR), st.integers(4, TOKENIZER.vocab_size - 1)), max_size=40)
stops = st.lists(
    st.one_of(st.sampled_from(["one", "two", "ab", "ba", "é", "日", "a", "\n\n"])), max_size=3, unique=True
)


def run(sequence, cuts, stop, min_tokens, finish):
    """Everything that a choice shows, its count, and why it ended."""
    sampling = SamplingParams(max_tokens=0, seed=0, min_tokens=min_tokens)
    ask = InferenceRequest("m", ["x"], sampling, stops=tuple(stop))
    choice = OutputProcessor(TOKENIZER, [5], ask, eos_token_ids=(END,))
    shown = ""
    edges = sorted({0, len(sequence), *(cut % (len(sequence) + 1) for cut in cuts)})
    for begin, end in itertools.pairwise(edges):
        last = end == len(sequence)
        choice.process(TokenDelta(0, sequence[begin:end], finish if last else None))
        for part in choice.deltas(0):
            shown += part.text
        if choice.finish is not None:
            break
    return shown, choice.tokens, choice.finish


@given(tokens, st.lists(st.integers(0, 100)), stops, st.integers(0, 10))
@settings(max_examples=75, deadline=None)
def test_cutting_changes_nothing(sequence, cuts, stop, min_tokens):
    sequence = [*sequence, END]
    one_by_one = run(sequence, range(len(sequence)), stop, min_tokens, FinishReason.STOP)
    assert run(sequence, cuts, stop, min_tokens, FinishReason.STOP) == one_by_one
    assert run(sequence, [], stop, min_tokens, FinishReason.STOP) == one_by_one


@given(tokens, st.lists(st.integers(0, 100)), stops)
@settings(max_examples=75, deadline=None)
def test_the_text_is_the_whole_text_up_to_the_stop_that_completes_first(sequence, cuts, stop):
    sequence = [*sequence, END]
    shown, count, finish = run(sequence, cuts, stop, 0, FinishReason.STOP)
    whole = TOKENIZER.decode(sequence)
    ends = [(whole.index(text) + len(text), -len(text)) for text in stop if text in whole]
    if not ends:
        assert (shown, count) == (whole, len(sequence))
    else:
        end, negative_length = min(ends)
        assert shown == whole[: end + negative_length]
        assert finish is FinishReason.STOP
        # The tokens counted hold the stop string, and those before the last of them do not.
        assert len(TOKENIZER.decode(sequence[:count])) >= end
        assert count == len(sequence) or TOKENIZER.decode(sequence[: count - 1])[:end] != whole[:end]

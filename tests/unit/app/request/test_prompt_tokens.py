"""What requests ask of tokens, made ready for a model: masks of the sampling, and the limit of a prompt."""

import msgspec
import pytest

from maitred.app.request.validation import prompt_truncation, with_token_masks
from maitred.core.errors import ContextLengthExceeded, InvalidRequest
from maitred.core.inference import InferenceRequest
from maitred.core.request import SamplingParams
from maitred.testing.script import SCRIPTED_CARD
from maitred.text.tokenizer import truncate_tokens
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
CARD = msgspec.structs.replace(SCRIPTED_CARD, context_tokens=100, kv_capacity_tokens=90)


def ask(**fields):
    return InferenceRequest("m", ["x"], SamplingParams(0, 0), **fields)


def banned(*words):
    return with_token_masks(TOKENIZER, ask(bad_words=words)).sampling.bad_words_token_ids


def tokens_of(text):
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def test_a_word_is_banned_at_the_beginning_and_behind_a_space():
    plain, spaced = tokens_of("the"), tokens_of(" the")
    assert (len(plain), len(spaced)) == (1, 1)
    assert banned("the") == banned(" the") == banned("the", "  the") == (plain, spaced)


def test_a_word_of_other_tokens_behind_a_space_is_banned_as_it_is_written():
    word = next(word for word in ("zzz", "xylophone", "Ünïcode") if len(tokens_of(word)) != len(tokens_of(f" {word}")))
    assert banned(word) == (tokens_of(word),)


def test_several_words_and_phrases():
    sequences = banned("the", "of the king")
    assert sequences[:2] == banned("the")
    assert sequences[2] == tokens_of("of the king")
    assert len(sequences[2]) > 1


def test_words_of_too_many_tokens_are_refused():
    words = tuple("abc def ghi jkl mno " * 10 + str(number) for number in range(20))
    with pytest.raises(InvalidRequest, match="at most 1,024 tokens") as refusal:
        banned(*words)
    assert refusal.value.param == "bad_words"


def test_many_prompts_have_fewer_allowed_tokens():
    request = InferenceRequest("m", ["x"] * 300, SamplingParams(0, 0), allowed_token_ids=tuple(range(4_000)))
    with pytest.raises(InvalidRequest, match="Send them in several requests") as refusal:
        with_token_masks(TOKENIZER, request)
    assert refusal.value.param == "allowed_token_ids"


def test_masks_of_nothing_change_nothing():
    assert with_token_masks(TOKENIZER, ask()) == ask()
    assert with_token_masks(TOKENIZER, ask(allowed_token_ids=(5, 6))).sampling.allowed_token_ids == (5, 6)


@pytest.mark.parametrize(
    ("limit", "max_tokens", "kept"), [(5, None, 5), (89, None, 89), (-1, None, 89), (-1, 30, 60), (60, 30, 60)]
)
def test_a_prompt_is_cut_to_its_limit_or_to_what_the_answer_leaves(limit, max_tokens, kept):
    truncation = prompt_truncation(CARD, ask(truncate_prompt_tokens=limit, max_tokens=max_tokens))
    assert truncation == (kept, "left")
    assert truncate_tokens([*range(100)], *truncation) == [*range(100 - kept, 100)]
    assert truncate_tokens([*range(100)], kept, "right") == [*range(kept)]
    assert truncate_tokens([1, 2], *truncation) == [1, 2]


def test_an_encoder_fills_its_window():
    card = msgspec.structs.replace(CARD, embedding_dimensions=8)
    assert prompt_truncation(card, ask(truncate_prompt_tokens=-1, truncation_side="right")) == (90, "right")


@pytest.mark.parametrize(
    ("limit", "max_tokens", "kind"),
    [(0, None, InvalidRequest), (90, None, ContextLengthExceeded), (61, 30, ContextLengthExceeded)],
)
def test_limits_that_leave_nothing_or_do_not_fit_are_refused(limit, max_tokens, kind):
    with pytest.raises(kind) as refusal:
        prompt_truncation(CARD, ask(truncate_prompt_tokens=limit, max_tokens=max_tokens))
    assert refusal.value.param == "truncate_prompt_tokens"
    assert type(refusal.value) is kind

"""What is made of the tokens of one choice: stop strings, reasoning and calls."""

import pytest

from maitred.app.request.output import OutputProcessor
from maitred.app.request.tokenized import make_answer_parser
from maitred.core.inference import InferenceRequest
from maitred.core.request import FinishReason, SamplingParams, TokenDelta
from maitred.text.answer_format import AnswerFormat
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
EOS = 4
FORMAT = AnswerFormat.of(TOKENIZER, reasoning="think")


def told(text: str, finish: FinishReason, *, prompt: str = "<think>", step: int = 1, **fields) -> tuple[str, str, str]:
    """Returns the reasoning and the text of an answer, and how it ended."""
    prompt_tokens = TOKENIZER.encode(prompt, add_special_tokens=False)
    request = InferenceRequest("m", ["x"], SamplingParams(100, 0), **fields)
    parser = make_answer_parser(FORMAT, TOKENIZER, prompt_tokens, None)
    choice = OutputProcessor(TOKENIZER, prompt_tokens, request, eos_token_ids=(EOS,), parser=parser)
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    tokens += [EOS] if finish is FinishReason.STOP else []
    deltas = []
    for start in range(0, len(tokens), step):
        last = start + step >= len(tokens)
        choice.process(TokenDelta(0, tokens[start : start + step], finish if last else None))
        deltas += choice.deltas(0)
        if choice.finish is not None:
            break
    thoughts = "".join((delta.extra or {}).get("reasoning", "") for delta in deltas)
    return thoughts, "".join(delta.text for delta in deltas), str(choice.finish)


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_stop_strings_are_looked_for_behind_the_reasoning(step, finish):
    text = "the king thinks</think>Hail the king!"
    assert told(text, finish, step=step, stops=("king",)) == ("the king thinks", "Hail the ", "stop")
    assert told(text, finish, step=step, stops=("nks", "nobody")) == ("the king thinks", "Hail the king!", finish)
    assert told(f"<think>{text}", finish, prompt="x", step=step, stops=("king",)) == (
        "the king thinks",
        "Hail the ",
        "stop",
    )
    assert told("Hail the king!", finish, prompt="x", step=step, stops=("king",)) == ("", "Hail the ", "stop")


@pytest.mark.parametrize("step", [1, 3, 100])
def test_stop_strings_act_within_the_reasoning_if_asked(step):
    text = "the king thinks</think>Hail the king!"
    thought, answer, finish = told(text, FinishReason.STOP, step=step, stops=("king",), stops_in_reasoning=True)
    assert (thought.strip(), answer, finish) == ("the", "", "stop")


@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_turn_that_ends_in_the_reasoning_that_the_prompt_opened_is_the_answer(step):
    assert told("Hail the king!", FinishReason.STOP, step=step) == ("Hail the king!", "Hail the king!", "stop")
    assert told("Hail the king!", FinishReason.STOP, step=step, stops=("king",)) == (
        "Hail the king!",
        "Hail the ",
        "stop",
    )
    assert told("Hail", FinishReason.STOP, step=step, stops_in_reasoning=True) == ("Hail", "Hail", "stop")
    # Stop strings that act within the reasoning have found nothing there.
    assert told("Hail the king!", FinishReason.STOP, step=step, stops=("x",), stops_in_reasoning=True) == (
        "Hail the king!",
        "Hail the king!",
        "stop",
    )
    assert told("Hail the king!", FinishReason.LENGTH, step=step) == ("Hail the king!", "", "length")
    assert told("Hail the", FinishReason.LENGTH, step=step, stops=("ex",), stops_in_reasoning=True) == (
        "Hail the",
        "",
        "length",
    )
    assert told("<think>Hail", FinishReason.STOP, prompt="x", step=step) == ("Hail", "", "stop")
    assert told("Hail</think>", FinishReason.STOP, step=step) == ("Hail", "", "stop")

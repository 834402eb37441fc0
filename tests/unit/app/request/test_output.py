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


def shown(deltas, **fields) -> list[tuple[str, list[int] | None, str | None, str | None]]:
    """Returns text, token ids, finish reason and stop string of the deltas of a choice."""
    choice = OutputProcessor(TOKENIZER, [2], InferenceRequest("m", ["x"], **fields), eos_token_ids=(EOS,))
    told = []
    for delta in deltas:
        choice.process(delta)
        told += [(part.text, part.token_ids, part.finish, part.stop) for part in choice.deltas(0)]
        if choice.finish is not None:
            break
    return told


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_token_ids_come_with_their_text_and_with_the_end(stops):
    one, two = TOKENIZER.encode("👋", add_special_tokens=False)[:1], TOKENIZER.encode("Hi", add_special_tokens=False)
    deltas = [TokenDelta(0, two), TokenDelta(0, one), TokenDelta(0, [EOS], FinishReason.STOP)]
    told = shown(deltas, sampling=SamplingParams(9, 0), stops=stops, return_token_ids=True)
    assert told == [("Hi", two, None, None), ("", one, None, None), ("\ufffd", [EOS], "stop", None)]


def test_token_ids_end_with_the_token_that_completes_a_stop_string():
    tokens = TOKENIZER.encode("Hail the king of all", add_special_tokens=False)
    at = next(n for n in range(len(tokens)) if "king" in TOKENIZER.decode(tokens[: n + 1]))
    told = shown([TokenDelta(0, tokens)], sampling=SamplingParams(99, 0), stops=("king",), return_token_ids=True)
    assert [(text, ids) for text, ids, _, _ in told] == [("Hail the ", tokens[: at + 1])]


@pytest.mark.parametrize(("include", "text"), [(False, "Hail the "), (True, "Hail the king")])
def test_the_stop_string_is_part_of_the_answer_if_asked(include, text):
    deltas = [TokenDelta(0, [token]) for token in TOKENIZER.encode("Hail the kings", add_special_tokens=False)]
    params = SamplingParams(99, 0)
    told = shown(deltas, sampling=params, stops=("king",), include_stop_str_in_output=include)
    assert "".join(part[0] for part in told) == text
    assert told[-1][2:] == ("stop", "king")


@pytest.mark.parametrize(
    ("include", "skip", "text"),
    [(False, True, "Hi"), (True, True, "Hi"), (False, False, "Hi<|user|>"), (True, False, "Hi<|user|><|end|>")],
)
def test_special_tokens_and_the_one_that_ends_the_answer_are_shown_if_asked(include, skip, text):
    (user,) = TOKENIZER.encode("<|user|>", add_special_tokens=False)
    tokens = [*TOKENIZER.encode("Hi", add_special_tokens=False), user, EOS]
    told = shown(
        [TokenDelta(0, tokens, FinishReason.STOP)],
        sampling=SamplingParams(9, 0),
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
    )
    assert told == [(text, None, "stop", None)]


@pytest.mark.parametrize(
    ("begun", "text", "told_apart"),
    [
        ("The answer", " is 4.<think>no</think>", ("", " is 4.<think>no</think>")),
        ("<think>2 + 2", " is 4.</think>It is 4.", (" is 4.", "It is 4.")),
        ("<think>It is 4.</think>It", " is 4.", ("", " is 4.")),
        ("", "<think>2 + 2</think>4", ("2 + 2", "4")),
    ],
)
def test_reasoning_of_an_answer_that_the_prompt_has_begun(begun, text, told_apart):
    prompt = TOKENIZER.encode(f"x{begun}", add_special_tokens=False)
    parser = make_answer_parser(FORMAT, TOKENIZER, prompt, None, begun=begun)
    request = InferenceRequest("m", ["x"], SamplingParams(99, 0))
    choice = OutputProcessor(TOKENIZER, prompt, request, eos_token_ids=(), parser=parser)
    choice.process(TokenDelta(0, TOKENIZER.encode(text, add_special_tokens=False), FinishReason.STOP))
    deltas = choice.deltas(0)
    thoughts = "".join((delta.extra or {}).get("reasoning", "") for delta in deltas)
    assert (thoughts, "".join(delta.text for delta in deltas)) == told_apart

"""Which of the models behind a name a request is for."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.inference import Conversation, InferenceRequest
from maitred.core.request import SamplingParams
from maitred.routing.auto.config import AutoConfig
from maitred.routing.auto.tasks import Task
from maitred.routing.auto.tiers import HEAD_CHARACTERS, TAIL_CHARACTERS, WEIGHTS_PATH, AutoModel, prompt_text
from maitred.routing.complexity import SURFACE_FEATURES, ComplexityModel

SAMPLING = SamplingParams(max_tokens=1, seed=0)
CONFIG = {"small": "s", "medium": "m", "large": "l"}
HARD = (
    "Statement 1 | Every function from a finite set onto itself must be one to one. Statement 2 | Every subgroup of an "
    "abelian group is abelian. Which of the following is not false?\nA. True, True\nB. False, False\nC. True, False\n"
    "D. False, True\nAnswer:"
)


def by_questions(**settings):
    """A choice by the number of question marks: with none the score is 0.5, and each makes it larger."""
    weights = [1.0 if feature == "questions" else 0.0 for feature in SURFACE_FEATURES]
    size = len(SURFACE_FEATURES)
    model = ComplexityModel(
        encoder="", surface=SURFACE_FEATURES, means=[0.0] * size, spreads=[1.0] * size, weights=weights, bias=0.0
    )
    return AutoModel(AutoConfig(**CONFIG, **settings), model)


def ask(prompt, **wants):
    return InferenceRequest("auto", [prompt], SAMPLING, **wants)


@pytest.mark.parametrize(
    ("thresholds", "upward", "downward", "reason"),
    [
        ([0.6, 0.7], ("s", "m", "l"), (), "small"),
        ([0.5, 0.6], ("m", "l"), ("s",), "medium"),
        ([0.4, 0.5], ("l",), ("m", "s"), "large"),
        ([0.5, 0.5], ("l",), ("m", "s"), "large"),
    ],
)
def test_the_thresholds_divide_the_scores(thresholds, upward, downward, reason):
    preference = by_questions(thresholds=thresholds).preference_for(ask("Go on"))
    assert (preference.upward, preference.downward) == (upward, downward)
    assert (preference.reason, preference.score) == (reason, pytest.approx(0.5))


@pytest.mark.parametrize("prompt", [[1, 2, 3], "", Conversation([]), Conversation([{"role": "user", "content": None}])])
def test_what_cannot_be_scored_goes_to_the_middle(prompt):
    preference = by_questions(tasks={Task.CHAT: "c"}).preference_for(ask(prompt))
    assert (preference.upward, preference.reason, preference.score) == (("m", "l"), "medium", None)
    assert by_questions().preference_for() == by_questions().preference_for(ask([1]))


def test_a_kind_of_work_with_a_model_of_its_own_goes_there_and_then_by_its_score():
    auto = by_questions(thresholds=[0.6, 0.7], tasks={Task.CODE: "coder", Task.EXTRACTION: "filler"})
    assert auto.model_names == ["s", "m", "l", "coder", "filler"]
    code = auto.preference_for(ask("Write a Python function."))
    assert (code.upward, code.reason) == (("coder", "s", "m", "l"), "code")
    schema = auto.preference_for(ask("Hi", needs=("response_format",)))
    assert (schema.upward, schema.reason) == (("filler", "s", "m", "l"), "extraction")
    assert auto.preference_for(ask("Hi", needs=("tools",))).reason == "small"


def test_the_weights_that_come_with_maitred_need_no_embedding():
    assert ComplexityModel.load(WEIGHTS_PATH).embedding_dimensions == 0
    auto = AutoModel(AutoConfig(**CONFIG))
    easy, hard = (auto.preference_for(ask(text)).score for text in ("What is the capital of France?", HARD))
    assert easy < 0.3 < hard


@given(st.text(max_size=3000), st.floats(0, 1), st.floats(0, 1))
def test_every_request_gets_every_model_at_most_once_and_none_is_lost(text, one, other):
    auto = AutoModel(AutoConfig(**CONFIG, thresholds=sorted([one, other])))
    preference = auto.preference_for(ask(text))
    assert [*preference.downward[::-1], *preference.upward] == ["s", "m", "l"]


@pytest.mark.parametrize("text", ["Why is the sky blue? " * 20, "word " * 1_000_000, "\n" * 1_000_000, "A. " * 9_000])
def test_a_choice_takes_no_time_that_others_would_notice(text):
    auto = AutoModel(AutoConfig(**CONFIG, tasks={Task.CODE: "coder"}))
    request = ask(text)
    spent_s = []
    for _ in range(20):
        began_s = time.process_time()
        auto.preference_for(request)
        spent_s.append(time.process_time() - began_s)
    assert min(spent_s) < 0.005, "a millisecond where the machine is not busy"


def said(role, content):
    return {"role": role, "content": content}


def test_the_last_words_of_the_person_count():
    told = [said("system", "Be brief."), said("user", "Hi"), said("assistant", "Hello"), said("user", "Why?")]
    assert prompt_text(Conversation(told)) == "Why?"
    assert prompt_text(Conversation([*told, said("assistant", "Because"), said("tool", "42")])) == "Why?"
    parts = [
        {"type": "text", "text": "What is"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "it?"},
    ]
    assert prompt_text(Conversation([said("user", parts)])) == "What is\nit?"


def test_what_cannot_be_read_has_no_text():
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    for messages in ([], [said("system", "Be brief.")], [said("user", image)], [said("user", None)], [said("user", 3)]):
        assert prompt_text(Conversation(messages)) is None
    assert prompt_text([1, 2, 3]) is None
    assert prompt_text(" \n") is None


@given(st.text(min_size=1).filter(str.strip), st.integers(1, 2000))
def test_a_long_text_is_known_by_its_ends(text, times):
    whole = text * times
    shown = prompt_text(whole)
    if len(whole) <= HEAD_CHARACTERS + TAIL_CHARACTERS:
        assert shown == whole
    elif shown is not None:
        assert len(shown) == HEAD_CHARACTERS + TAIL_CHARACTERS + 1
        assert (whole[:HEAD_CHARACTERS], whole[-TAIL_CHARACTERS:]) == (
            shown[:HEAD_CHARACTERS],
            shown[-TAIL_CHARACTERS:],
        )

"""What kind of work a prompt asks for."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.routing.auto.tasks import Task, detect_task

CODE = [
    "Write a Python function that reverses a list.",
    "Can you implement quicksort as a generic method in Rust?",
    "What does this print?\n\ndef f(x):\n    return x + 1\n",
    "#include <stdio.h>\nint main() { return 0; }",
    "Traceback (most recent call last):\n  File 'a.py', line 1",
    "Please refactor this function so that it is shorter.",
    "Explain:\n```\nx = y\n```",
    "SELECT name FROM users WHERE id = 3",
]
EXTRACTION = [
    "Extract the names and dates from the text below.",
    "Classify the sentiment of this review: it was fine.",
    "Here is a letter. Return a JSON object with sender and date.",
    "Read the contract.\nList all parties in the contract.",
    "Pull out every price from this page:\n```\nTea 3.20\n```",
]
CHAT = [
    "Hi",
    "What is the capital of France?",
    "Write a poem about a python that eats children.",
    "import tariffs hurt whom?",
    "Why do people learn SQL?",
    "I want to write a novel. Where do I begin?",
    "The vanilla extract in my cake tastes bitter.",
    "",
]
CASES = [(text, task) for task, texts in zip(Task, (CODE, EXTRACTION, CHAT), strict=True) for text in texts]


@pytest.mark.parametrize(("text", "task"), CASES)
def test_the_wording_tells_the_kind_of_work(text, task):
    assert detect_task(text) is task


@pytest.mark.parametrize("text", CODE + CHAT)
def test_a_schema_says_more_than_any_word(text):
    assert detect_task(text, has_schema=True) is Task.EXTRACTION


@given(st.text())
def test_every_text_has_a_kind(text):
    assert detect_task(text) in Task


@pytest.mark.parametrize(
    "part", [" ", "\n", "\t\n", "write ", "write code ", "SELECT ", "extract ", "review ", "return json ", ". ", "```"]
)
def test_what_is_written_to_be_slow_is_not(part):
    def spent_s(characters):
        text = (part * characters)[:characters]
        began_s = time.process_time()
        for _ in range(3):
            detect_task(text)
        return time.process_time() - began_s

    # Sixteen times the text: about as many times the work, where a pattern that goes back and forth would take 256.
    assert spent_s(64_000) < 80 * max(spent_s(4_000), 0.001)

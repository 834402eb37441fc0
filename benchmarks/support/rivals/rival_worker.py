"""The side of a rival's process: a line of JSON in, requests answered, a line of JSON out.

Runs in every rival's environment, so it needs nothing but Python. What a library prints goes to the log: the answers
have a pipe of their own.

In  ``{"prompts": [[1, 2, …], …], "output_tokens": 64}``
Out ``{"seconds": 12.3, "counts": [64, 64, …]}``, after a first line ``{"ready": …}`` with the words of `Loaded.how`.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Answer = Callable[[list[list[int]], int], list[int]]
"""All prompts at once, and how many tokens each answer has; gives the number of tokens of each."""

THREADS = 2
CONTEXT_TOKENS = 1024
STEP_TOKENS = 2048
"""Computed at once at most, by whoever has such a setting."""
WARM_UP_TOKENS = 8


class Asked(NamedTuple):
    """What to load."""

    folder: Path
    """The model, in safetensors."""
    converted: Path
    """Where a form of it for this rival is, or is to be made."""
    precision: str
    sequences: int
    """Requests at once, at most."""


class Loaded(NamedTuple):
    """A rival that is ready."""

    answer: Answer
    how: str
    """How it is run and asked, in words."""


def serve(load: Callable[[Asked], Loaded]) -> None:
    """Loads, answers until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("converted", type=Path)
    parser.add_argument("precision")
    parser.add_argument("sequences", type=int)
    asked = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    loaded = load(Asked(asked.folder, asked.converted, asked.precision, asked.sequences))
    for requests in (1, asked.sequences):  # what is compiled for a batch is compiled now
        loaded.answer([[7 + number] * WARM_UP_TOKENS for number in range(requests)], WARM_UP_TOKENS)
    print(json.dumps({"ready": loaded.how}), file=answers)
    for line in sys.stdin:
        work = json.loads(line)
        gc.collect()
        start_s = time.perf_counter()
        counts = loaded.answer(work["prompts"], work["output_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - start_s, "counts": counts}), file=answers)

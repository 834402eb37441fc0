"""Questions and conversations for a live semantic cache, and the answers that a server gives to them."""

import json
import lzma
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.support.semantic_cache.questions import read_questions

_WORDS = (
    *("account", "address", "amount", "balance", "branch", "button", "change", "charge", "choose", "code", "confirm"),
    *("contact", "currency", "delay", "deposit", "details", "device", "document", "enter", "exchange", "follow"),
    *("form", "fund", "help", "identity", "keep", "letter", "limit", "link", "login", "machine", "menu", "merchant"),
    *("message", "method", "minute", "money", "notice", "office", "open", "option", "order", "page", "paper"),
    *("password", "payment", "phone", "picture", "place", "process", "profile", "purchase", "rate", "reason"),
    *("receipt", "record", "refund", "report", "request", "reset", "review", "screen", "section", "secure", "select"),
    *("send", "service", "setting", "sign", "statement", "store", "submit", "support", "system", "team", "terminal"),
    *("ticket", "transfer", "update", "upload", "verify", "visit", "wait", "window", "word", "write"),
)
_ANSWER_WORDS = 24
_OPENINGS = ("Certainly.", "Of course.", "Sure.", "Happy to help.")


class Intents:
    """Questions of BANKING77, and a server that answers each by the intent of its asker.

    Every intent has one answer, in words of its own; its opening differs from one question to another. The answer ends
    with the name of the caller, so that one which reaches somebody else can be told.

    Args:
        folder: Folder of the data.
        seed: Order of the questions.

    Attributes:
        questions: Texts with their intents.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        source = random.Random(seed)
        self.questions = read_questions(folder, "banking77")
        source.shuffle(self.questions)
        self._intents = dict(self.questions)
        self._answers = {
            intent: f"{' '.join(source.choices(_WORDS, k=_ANSWER_WORDS)).capitalize()}."
            for intent in sorted({intent for _, intent in self.questions})
        }

    def answer(self, messages: Sequence[dict[str, Any]], user: str) -> str:
        """Answers the last question of a conversation for a caller; one of another origin has an answer of its own."""
        asked = str(messages[-1]["content"])
        opening = _OPENINGS[sum(asked.encode()) % len(_OPENINGS)]
        answer = self._answers[self._intents[asked]] if asked in self._intents else asked
        return f"{opening} {answer} Yours, {user}."

    def is_right(self, asked: str, answer: str) -> bool:
        """Whether an answer, of whichever question, is that to the intent of this one."""
        return self._answers[self._intents[asked]] in answer


def read_dialogues(file: Path, count: int) -> list[list[dict[str, str]]]:
    """Reads the first dialogues of SGD, each as the messages of a conversation."""
    roles = {"u": "user", "a": "assistant"}
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        return [
            [{"role": roles[who], "content": text} for who, text in json.loads(line)["turns"]]
            for line in islice(lines, count)
        ]


class Dialogues:
    """Dialogues of people, and a server that answers each turn as it was answered.

    Args:
        dialogues: Messages of each.

    Attributes:
        requests: Messages up to each turn of a user, dialogue by dialogue.
    """

    def __init__(self, dialogues: Sequence[list[dict[str, str]]]) -> None:
        self.requests = [
            dialogue[: place + 1]
            for dialogue in dialogues
            for place in range(0, len(dialogue) - 1, 2)
            if dialogue[place]["role"] == "user"
        ]
        self._answers = {
            json.dumps(dialogue[: place + 1]): dialogue[place + 1]["content"]
            for dialogue in dialogues
            for place in range(0, len(dialogue) - 1, 2)
        }

    def answer(self, messages: Sequence[dict[str, Any]]) -> str | None:
        """Answers a conversation; None: it is none of these."""
        return self._answers.get(json.dumps(messages))

"""What the callers of a chaos run ask, what they must get, and what is wrong with what they got.

A request ends as one of two: whole and right, or with an explicit error, which is a status or an error event without
``[DONE]`` behind it. What came before the error is the beginning of the right answer.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from benchmarks.support.installation import MODEL
from benchmarks.support.single_request import CHAT, COMPLETIONS, Call, Client, Reply

UPSTREAM_MODEL = "scripted"
CALM_AT_ONCE = 8
PAUSE_S = 0.3
"""Longest pause of a caller between two requests."""
HANGING, DIFFERENT, SILENT, BOTH_ENDS = "hanging", "different", "cut silently", "an error that ends as if whole"


@dataclass(frozen=True)
class Question:
    """What is asked, and the answer to it.

    Attributes:
        body: Of the request.
        path: To ask it at.
        answer: The whole text.
    """

    body: Mapping[str, object]
    path: str
    answer: str = ""

    @property
    def tokens(self) -> int:
        """So many has the whole answer."""
        tokens = self.body["max_tokens"]
        assert isinstance(tokens, int)
        return tokens

    def call(self, request_id: str, key: str, *, stream: bool) -> Call:
        """A request for it."""
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return Call(request_id, key, {**self.body, **options}, self.path)


@dataclass(frozen=True)
class Asked:
    """A question that was asked, and what came."""

    question: Question
    stream: bool
    asked_s: float
    """Since the run began."""
    reply: Reply

    @property
    def fault(self) -> str:
        """In which way it did not end as it must; empty: it did."""
        reply, answer = self.reply, self.question.answer
        if reply.left:
            return HANGING
        if reply.whole:
            right = reply.text == answer and reply.output_tokens == self.question.tokens
            return "" if right else DIFFERENT
        if not reply.status or (reply.status == 200 and reply.code in ("", "connection")):
            return SILENT
        if reply.done:
            return BOTH_ENDS
        return "" if reply.status != 200 or answer.startswith(reply.text) else DIFFERENT

    @property
    def end(self) -> str:
        """How it ended, in a few words."""
        if self.fault or self.reply.whole:
            return self.fault or "whole"
        broken = "error event" if self.reply.status == 200 else str(self.reply.status)
        return f"{broken} {self.reply.code}"


def own_questions() -> list[Question]:
    """For the engines of this machine; their answers are not known yet."""
    return [
        Question(
            {
                **{"model": MODEL, "temperature": 0.0, "ignore_eos": True, "max_tokens": 32 + 8 * (number % 17)},
                "prompt": f"{number} animals met in the deep wood, and the oldest of them said:",
            },
            COMPLETIONS,
        )
        for number in range(24)
    ]


def upstream_questions() -> list[Question]:
    """For the scripted servers, which count."""
    return [
        Question(
            {
                **{"model": UPSTREAM_MODEL, "max_tokens": tokens},
                "messages": [{"role": "user", "content": "one two three"}],
            },
            CHAT,
            " ".join(map(str, range(tokens))),
        )
        for tokens in range(4, 36)
    ]


async def undisturbed(client: Client, key: str, questions: Sequence[Question]) -> list[Question]:
    """The same questions with their answers, which are the same whether streamed or not.

    Raises:
        RuntimeError: An answer is not whole, or not what was known of it.
    """
    turns = asyncio.Semaphore(CALM_AT_ONCE)

    async def answered(number: int, question: Question) -> Question:
        texts = set()
        for stream in (False, True):
            async with turns:
                reply = await client.ask(question.call(f"calm-{question.path}-{number}-{stream}", key, stream=stream))
            texts.add(reply.text if reply.whole else f"{reply.status} {reply.code} {reply.message}")
        if len(texts) != 1 or not reply.whole or (question.answer and texts != {question.answer}):
            raise RuntimeError(f"Undisturbed, question {number} of {question.path} is answered in {texts}.")
        return replace(question, answer=reply.text)

    return await asyncio.gather(*(answered(number, question) for number, question in enumerate(questions)))


class Load:
    """Callers that ask one question after the other, until the time is over.

    Args:
        client: For all of them.
        key: Theirs.
        seconds: From now on.

    Attributes:
        asked: All that have ended.
    """

    def __init__(self, client: Client, key: str, seconds: float) -> None:
        self.asked: list[Asked] = []
        self._client = client
        self._key = key
        self._now_s: Callable[[], float] = asyncio.get_running_loop().time
        self._began_s = self._now_s()
        self._seconds = seconds

    async def caller(self, name: str, questions: Sequence[Question], rng: random.Random) -> None:
        """One of them."""
        for number in count():
            asked_s = self._now_s() - self._began_s
            if asked_s > self._seconds:
                return
            question, stream = rng.choice(questions), rng.random() < 0.6
            reply = await self._client.ask(question.call(f"{name}-{number}", self._key, stream=stream))
            self.asked.append(Asked(question, stream, asked_s, reply))
            await asyncio.sleep(rng.uniform(0.0, PAUSE_S) if reply.whole else PAUSE_S)

"""Where requests bring what their answers are to look like, and get a grammar that the engine takes."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import msgspec

from maitred.admission.grammars.config import GrammarsConfig
from maitred.admission.grammars.result import GrammarResult
from maitred.admission.grammars.workers import GrammarWorkers
from maitred.core.errors import InvalidRequest, Saturated
from maitred.core.grammar import Constraint, Grammar

_RETRY_AFTER_S = 1.0


class GrammarValidator:
    """Has every grammar tried once, without holding up anybody.

    What was found is remembered, by the text of what was asked. An organisation has only some of the processes at a
    time, and of what waits nobody waits behind another organisation's queue: costly grammars hold up who sends them.

    Args:
        config: How much work may be made.
        workers: What tries; by default processes. Tests bring their own.
    """

    def __init__(self, config: GrammarsConfig = GrammarsConfig(), workers: GrammarWorkers | None = None) -> None:  # noqa: B008
        self._config = config
        self._workers = workers or GrammarWorkers(config.workers, config.compile_s)
        self._known: OrderedDict[bytes, GrammarResult] = OrderedDict()
        self._known_bytes = 0
        self._organisations: dict[str, _ValidationTurns] = {}

    def reconfigure(self, config: GrammarsConfig) -> None:
        """Goes by these settings from now on, but for the number of processes and their time."""
        self._config = config

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._workers.close()

    async def validate(self, organisation: str, constraint: Constraint) -> Grammar:
        """The grammar for a request.

        Args:
            organisation: Whose request it is.
            constraint: What its answer is to look like.

        Raises:
            InvalidRequest: It is faulty, too large, or cannot be enforced; the message says what to do.
            Saturated: Too many grammars of the organisation wait.
        """
        param = constraint.param
        try:
            question = msgspec.msgpack.encode(constraint)
        except RecursionError:
            raise InvalidRequest(f"{param} is nested too deeply. Send a flatter one.", param=param) from None
        if len(question) > self._config.most_bytes:
            raise InvalidRequest(
                f"{param} is too large: {len(question):,} bytes, and {self._config.most_bytes:,} are allowed. Send a "
                "smaller one.",
                param=param,
            )
        verdict = self._recall(question)
        if verdict is None:
            async with self._compile_slot(organisation):
                verdict = self._recall(question) or await self._workers.compile(question)
            self._remember(question, verdict)
        if verdict.grammar is None:
            raise InvalidRequest(f"{param} cannot be used. {verdict.fault}", param=param)
        return verdict.grammar

    @asynccontextmanager
    async def _compile_slot(self, organisation: str) -> AsyncIterator[None]:
        """The organisation's turn to have a grammar tried."""
        turns = self._organisations.setdefault(organisation, _ValidationTurns(self._config.per_organisation))
        if turns.taken >= self._config.per_organisation + self._config.waiting_per_organisation:
            raise Saturated(
                "Too many grammars of your organisation wait to be compiled. Send them more slowly, or the same ones "
                "again: those are remembered.",
                retry_after_s=_RETRY_AFTER_S,
            )
        turns.taken += 1
        try:
            async with turns.free:
                yield
        finally:
            turns.taken -= 1
            if not turns.taken:
                self._organisations.pop(organisation, None)

    def _recall(self, question: bytes) -> GrammarResult | None:
        verdict = self._known.get(question)
        if verdict is not None:
            self._known.move_to_end(question)
        return verdict

    def _remember(self, question: bytes, verdict: GrammarResult) -> None:
        if question in self._known:
            return
        self._known[question] = verdict
        self._known_bytes += _size_bytes(question, verdict)
        while self._known_bytes > self._config.cache_bytes:
            self._known_bytes -= _size_bytes(*self._known.popitem(last=False))


class _ValidationTurns:
    """Validations of one organisation that run or wait."""

    def __init__(self, most: int) -> None:
        self.free = asyncio.Semaphore(most)
        self.taken = 0


def _size_bytes(question: bytes, verdict: GrammarResult) -> int:
    return len(question) + len(verdict.fault) + (len(verdict.grammar.text) if verdict.grammar else 0)

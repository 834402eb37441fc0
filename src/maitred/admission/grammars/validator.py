"""Validator of constraints: turns a constraint into a grammar for the engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import msgspec

from maitred.admission.grammars.config import GrammarsConfig
from maitred.admission.grammars.workers import GrammarWorkers
from maitred.core.errors import InvalidRequest, Saturated
from maitred.core.grammar import Constraint, Grammar, GrammarResult
from maitred.fairness.shared_cache import SharedCache

_RETRY_AFTER_S = 1.0


class GrammarValidator:
    """Compiles every grammar once, without blocking other requests.

    Results are cached by the text of the constraint; an organisation that fills the cache drives out its own results.
    Each organisation may use only some of the processes at one time and has its own queue, so costly grammars delay
    only the organisation that sends them.

    Args:
        config: Bounds on the work.
        workers: Compiles the grammars; worker processes by default. Tests pass their own.
    """

    def __init__(self, config: GrammarsConfig = GrammarsConfig(), workers: GrammarWorkers | None = None) -> None:  # noqa: B008
        self._config = config
        self._workers = workers or GrammarWorkers(config.workers, config.compile_s)
        self._known: SharedCache[bytes, GrammarResult] = SharedCache(config.cache_bytes)
        self._organisations: dict[str, _ValidationTurns] = {}

    def reconfigure(self, config: GrammarsConfig) -> None:
        """Applies new settings, except the number of processes and their time limit."""
        self._config = config
        self._known.most = config.cache_bytes

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._workers.close()

    async def validate(self, organisation: str, constraint: Constraint, relaxed: list[str] | None = None) -> Grammar:
        """Returns the grammar for a request.

        Args:
            organisation: Organisation that sent the request.
            constraint: Constraint on its answer.
            relaxed: Is extended by the keywords that the grammar does not enforce, with their places.

        Raises:
            InvalidRequest: The constraint is faulty, too large or impossible to enforce; the message names the remedy.
            Saturated: The organisation has too many waiting grammars.
        """
        param = constraint.param
        try:
            question = msgspec.json.encode(constraint)
        except RecursionError:
            raise InvalidRequest(f"{param} is nested too deeply. Send a flatter one.", param=param) from None
        if len(question) > self._config.most_bytes:
            raise InvalidRequest(
                f"{param} is too large: {len(question):,} bytes, and {self._config.most_bytes:,} are allowed. Send a "
                "smaller one.",
                param=param,
            )
        verdict = self._known.get(question)
        if verdict is None:
            async with self._compile_slot(organisation):
                verdict = self._known.get(question) or await self._workers.compile(question)
            self._known.put(question, verdict, organisation, _size_bytes(question, verdict))
        if verdict.grammar is None:
            raise InvalidRequest(f"{param} cannot be used. {verdict.fault}", param=param)
        if relaxed is not None:
            relaxed += [f"{param}: {keyword}" for keyword in verdict.relaxed]
        return verdict.grammar

    @asynccontextmanager
    async def _compile_slot(self, organisation: str) -> AsyncIterator[None]:
        """Holds a compile slot of the organisation for the length of the context."""
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


class _ValidationTurns:
    """Validations of one organisation that run or wait."""

    def __init__(self, most: int) -> None:
        self.free = asyncio.Semaphore(most)
        self.taken = 0


def _size_bytes(question: bytes, verdict: GrammarResult) -> int:
    return (
        len(question)
        + len(verdict.fault)
        + sum(map(len, verdict.relaxed))
        + (len(verdict.grammar.text) if verdict.grammar else 0)
    )

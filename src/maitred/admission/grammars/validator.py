"""Validator of constraints: turns a constraint into a grammar for the engine."""

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import msgspec

from maitred.admission.grammars.config import GrammarsConfig
from maitred.admission.grammars.workers import GrammarWorkers
from maitred.admission.semaphore import FairSemaphore
from maitred.core.errors import InvalidRequest, Saturated
from maitred.core.flow import SHARE_OF_FREE
from maitred.core.grammar import Constraint, Grammar, GrammarResult
from maitred.core.shared_cache import SharedCache
from maitred.core.tenancy import Principal

_RETRY_AFTER_S = 1.0
_USUAL_S = 0.01
"""Time that a usual grammar takes, which its key is charged when it starts."""
_TOO_MANY = (
    "Too many grammars of your {owner} wait to be compiled. Send them more slowly, or the same ones again: those are "
    "remembered."
)


class GrammarValidator:
    """Compiles every grammar once, without blocking other requests.

    Results are cached by the text of the constraint; an organisation that fills the cache drives out its own results.
    Each organisation may use only some of the processes at one time and has its own queue, so costly grammars delay
    only the organisation that sends them. In the queue its teams and keys take turns, and share the places.

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

    async def validate(self, principal: Principal, constraint: Constraint, relaxed: list[str] | None = None) -> Grammar:
        """Returns the grammar for a request.

        Args:
            principal: Sender of the request.
            constraint: Constraint on its answer.
            relaxed: Is extended by the keywords that the grammar does not enforce, with their places.

        Raises:
            InvalidRequest: The constraint is faulty, too large or impossible to enforce; the message names the remedy.
            Saturated: The organisation, the team or the key has too many waiting grammars.
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
            async with self._compile_slot(principal):
                verdict = self._known.get(question) or await self._workers.compile(question)
            self._known.put(question, verdict, principal.tenants[-1], _size_bytes(question, verdict))
        if verdict.grammar is None:
            raise InvalidRequest(f"{param} cannot be used. {verdict.fault}", param=param)
        if relaxed is not None:
            relaxed += [f"{param}: {keyword}" for keyword in verdict.relaxed]
        return verdict.grammar

    @asynccontextmanager
    async def _compile_slot(self, principal: Principal) -> AsyncIterator[None]:
        """Holds a compile slot of the organisation for the length of the context."""
        organisation = principal.tenants[-1]
        turns = self._organisations.setdefault(organisation, _ValidationTurns(self._config.per_organisation))
        turns.enter(principal, self._config.waiting_per_organisation)
        try:
            flow = await turns.slots.acquire(principal, _USUAL_S)
            began_s = time.monotonic()
            try:
                yield
            finally:
                # Whoever comes while a costly grammar of another key is compiled is the next.
                turns.slots.release(flow, time.monotonic() - began_s)
        finally:
            turns.leave(principal)
            if not turns.held:
                self._organisations.pop(organisation, None)


class _ValidationTurns:
    """Validations of one organisation that run or wait.

    Attributes:
        slots: One for each that may run at a time.
        held: Number of them by owner; see `Principal.owners`.
    """

    def __init__(self, most: int) -> None:
        self.slots = FairSemaphore(most)
        self.held: Counter[str] = Counter()
        self._most = most

    def enter(self, principal: Principal, most_waiting: int) -> None:
        """Counts a validation; raises Saturated if it may not wait."""
        organisation, *others = principal.owners
        if self.slots.locked:
            free = self._most + most_waiting - self.held[organisation]
            if free <= 0:
                raise Saturated(_TOO_MANY.format(owner="organisation"), retry_after_s=_RETRY_AFTER_S)
            # Places are shared by a dynamic threshold, as in flight, so one key leaves some to the others.
            for owner in others:
                free = SHARE_OF_FREE * free - self.held.get(owner, 0)
                if free <= 0:
                    name = "key" if owner == others[-1] else "team"
                    raise Saturated(_TOO_MANY.format(owner=name), retry_after_s=_RETRY_AFTER_S)
        self.held.update(principal.owners)

    def leave(self, principal: Principal) -> None:
        """Counts a validation less."""
        self.held -= Counter(principal.owners)  # keeps only what is above zero


def _size_bytes(question: bytes, verdict: GrammarResult) -> int:
    return (
        len(question)
        + len(verdict.fault)
        + sum(map(len, verdict.relaxed))
        + (len(verdict.grammar.text) if verdict.grammar else 0)
    )

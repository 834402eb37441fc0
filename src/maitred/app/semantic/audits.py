"""Audits: they find out whether the answer of a similar question was right, by computing the answer as well.

What look-ups of a scope have found is recorded in the order in which they came, also of those that need no comparison.
So what is lost when a gateway stops does not depend on what would have been found, and rates stay those of all
look-ups. For the same reason an audit is never given up because there is no room: it waits, and the later ones of its
scope behind it.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from maitred.app.request.shadow_traffic import SHADOW, ComputeCopy, texts_of
from maitred.core.clock import Clock
from maitred.core.context import RequestContext
from maitred.core.errors import MaitredError
from maitred.core.ids import new_object_id
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason
from maitred.routing.rollout.agreement import f1, split_words
from maitred.text.question_guards import difference
from maitred.text.wording import Wording

_log = logging.getLogger(__name__)

_MOST_WAITING = 1_000
"""Look-ups that wait to be recorded. Each of them may hold a request and an answer."""
_MOST_OF_SCOPE = 250
"""Those of them of one scope: about a sixth of the audits that a rate of twice the budget needs to trip it."""
_MOST_FAILURES = 3
"""Failures of a replica after which an answer counts as wrong, because nobody can say that it was right."""
_RETRY_S = 1.0
_HOUR_S = 3600.0


class AuditedAnswer(NamedTuple):
    """Answer of a similar question, and how the own answer can be had.

    Attributes:
        cached: The answer.
        own: The own answer, when the request has computed it; its result is None if the request did not.
        copy: Computes the own answer beside the requests of clients.
    """

    cached: Sequence[TextDelta]
    own: asyncio.Future[Sequence[TextDelta] | None]
    copy: ComputeCopy


class AuditQueue:
    """Queue of look-ups that are recorded; those of one scope one after the other.

    Args:
        clock: The clock.
        tokens_per_hour: Most tokens that audits may compute.
        agreement: See `are_same`.

    Attributes:
        count: Look-ups that wait.
        tokens: Model -> tokens that audits have computed.
    """

    def __init__(self, clock: Clock, tokens_per_hour: int, agreement: float) -> None:
        self._clock = clock
        self._waiting: dict[str, deque[tuple[Callable[[bool], None], AuditedAnswer | None]]] = {}
        """Scope -> its look-ups that wait, if there are any."""
        self._tasks: asyncio.TaskGroup | None = None
        self.count = 0
        self.tokens: Counter[str] = Counter()
        self._left = float(tokens_per_hour)
        self._refilled_s = clock.monotonic_s()
        self.reconfigure(tokens_per_hour, agreement)

    def reconfigure(self, tokens_per_hour: int, agreement: float) -> None:
        """Sets how many tokens audits may compute, and which answers are the same."""
        self._tokens_per_hour = tokens_per_hour
        self._agreement = agreement

    def has_capacity(self, scope: str) -> bool:
        """Returns whether another look-up of a scope can wait to be recorded.

        A scope may take as much as it leaves to others, so those whose audits find no spare room leave some to all.
        """
        waiting = len(self._waiting.get(scope, ()))
        return waiting < min(_MOST_OF_SCOPE, _MOST_WAITING - self.count)

    def has_tokens(self) -> bool:
        """Returns whether audits may compute tokens now."""
        now_s = self._clock.monotonic_s()
        refill = self._tokens_per_hour * (now_s - self._refilled_s) / _HOUR_S
        self._left = min(self._left + refill, float(self._tokens_per_hour))
        self._refilled_s = now_s
        return self._left > 0

    def add(self, scope: str, record: Callable[[bool], None], answer: AuditedAnswer | None = None) -> None:
        """Adds a look-up behind the others of its scope.

        Args:
            scope: The scope.
            record: Records it; gets whether the answer of the similar question was right.
            answer: That answer; None: nothing is compared, and the look-up counts as right.
        """
        waiting = self._waiting.get(scope)
        if waiting is None and answer is None:
            record(True)
            return
        self.count += 1
        if waiting is not None:
            waiting.append((record, answer))
            return
        self._waiting[scope] = deque([(record, answer)])
        if self._tasks is not None:
            self._tasks.create_task(self._record(scope), name=f"audits of {scope}")

    async def run(self) -> None:
        """Records the look-ups until the task is cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                for scope in self._waiting:
                    self._tasks.create_task(self._record(scope), name=f"audits of {scope}")
                await asyncio.Event().wait()
            finally:
                self._tasks = None  # a look-up that ends later is lost, and its request goes on

    async def _record(self, scope: str) -> None:
        """Records the look-ups of a scope until none waits."""
        waiting = self._waiting[scope]
        while waiting:
            record, answer = waiting[0]
            is_right = answer is None or await self._is_right(answer)
            waiting.popleft()
            self.count -= 1
            record(is_right)
        del self._waiting[scope]

    async def compute(self, copy: ComputeCopy) -> list[TextDelta] | None:
        """Computes the answer to a copy of a request in spare room, at the operators' cost; None: there is none now.

        Raises:
            MaitredError: The replica failed.
            TimeoutError: It took too long.
        """
        context = RequestContext(new_object_id("audit"), self._clock.monotonic_s(), "audit", SHADOW)
        try:
            return await copy(context)
        except MaitredError:
            if context.dispatched_s is None:
                return None
            raise
        finally:
            if context.dispatched_s is not None:  # else its usage is a plan
                self.tokens[context.model] += context.usage.total_tokens
                self._left -= context.usage.total_tokens

    async def _is_right(self, answer: AuditedAnswer) -> bool:
        own = await answer.own
        failures = 0
        while own is None:
            try:
                own = await self.compute(answer.copy)
            except Exception as failure:
                if not isinstance(failure, MaitredError | TimeoutError):
                    _log.exception("A copy of a request for an audit broke.")
                failures += 1
                if failures == _MOST_FAILURES:
                    return False
            if own is None:
                await asyncio.sleep(_RETRY_S)
        return are_same(answer.cached, own, self._agreement)


def are_same(first: Sequence[TextDelta], second: Sequence[TextDelta], agreement: float) -> bool:
    """Returns whether two answers of one choice say the same; in doubt they do not.

    Args:
        first: Deltas of one answer.
        second: Deltas of the other one.
        agreement: Share of equal words (F1) from which on texts are the same. Texts that differ in numbers, dates,
            names, quoted parts or negations never are; calls of tools must be equal.
    """
    if _finish(first) is not _finish(second):
        return False
    one, other = "".join(texts_of(first)), "".join(texts_of(second))
    words, other_words = split_words(one), split_words(other)
    if words == other_words:
        return True
    if any(part.extra is not None and part.extra.get("tool_calls") for part in (*first, *second)):
        return False
    return difference(Wording.of(one), Wording.of(other)) is None and f1(words, other_words) >= agreement


def _finish(deltas: Sequence[TextDelta]) -> FinishReason | None:
    return next((part.finish for part in reversed(deltas) if part.finish is not None), None)

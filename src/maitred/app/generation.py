"""One answer in the making: waits for its turn, runs, and turns what comes back into text.

Reading it for the first time is what makes it wait: until then the request has its place in the queue and nothing
else, so whoever reads can tell the caller where it stands.
"""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from typing import Self

from maitred.admission.grant import Grant
from maitred.app.choice import Choice
from maitred.app.merge import merged
from maitred.core.answer import Outcome, Part, Tally
from maitred.core.clock import Clock
from maitred.core.errors import DeadlineExceeded, ReplicaLost
from maitred.core.ports import TokenStream
from maitred.core.request import Delta, FinishReason, Request
from maitred.dispatch.seat import Seat


class Generation:
    """Implements `maitred.core.answer.Answer`.

    It writes what it sees into the tally, tells the seat and so the fair queue of every token, and settles before the
    end is shown.

    Args:
        seat: Its place in the queue, and then at a replica.
        running: Holds what is opened here; whoever made it closes it.
        requests: Makes what the replica gets, given the time, one for each prompt.
        choices: All of all prompts, in order.
        tally: What is known of the request.
        clock: For the times in it.
        grant: What it may use.
        partial: Whether what is there at the deadline is an answer.
    """

    def __init__(
        self,
        seat: Seat,
        running: AsyncExitStack,
        requests: Callable[[float], Sequence[Request]],
        choices: Sequence[Choice],
        tally: Tally,
        clock: Clock,
        grant: Grant,
        *,
        partial: bool,
    ) -> None:
        self._seat = seat
        self._running = running
        self._requests = requests
        self._choices = choices
        self._unfinished = len(choices)
        self._tally = tally
        self._clock = clock
        self._grant = grant
        self._partial = partial
        self._streams: Sequence[TokenStream] = ()
        self._batches: AsyncIterator[tuple[int, list[Delta]]] | None = None
        self._per_stream = 1

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Part]:
        if not self._unfinished:
            raise StopAsyncIteration
        batches = self._batches or await self._begin()
        try:
            source, deltas = await anext(batches)
        except StopAsyncIteration:
            raise ReplicaLost from None
        now_s = self._clock.monotonic_s()
        touched: dict[int, Choice] = {}
        for delta in deltas:
            index = source * self._per_stream + delta.index
            choice = touched[index] = self._choices[index]
            if choice.finish is None:
                self._take(source, choice, delta)
        self._time(touched.values(), now_s)
        if not self._unfinished:
            # Nobody may see the end of an answer that could still be lost to the ledger.
            await self._grant.settle(self._tally.usage, Outcome.FINISHED)
        return [part for index, choice in touched.items() if (part := choice.part(index)) is not None]

    async def _begin(self) -> AsyncIterator[tuple[int, list[Delta]]]:
        """Waits for its turn, and submits."""
        post = await self._seat.granted()
        tally = self._tally
        tally.place, tally.released_s = None, self._clock.monotonic_s()
        tally.waited_ms = dict(self._seat.waited_ms)
        self._grant.replica = post.name
        streams = []
        for request in self._requests(tally.released_s):
            streams.append(await self._running.enter_async_context(post.replica.generate(request)))
            self._seat.submitted()
        self._streams = streams
        self._per_stream = len(self._choices) // len(self._streams)
        self._batches = await self._running.enter_async_context(merged(self._streams))
        return self._batches

    def _take(self, source: int, choice: Choice, delta: Delta) -> None:
        if delta.finish is FinishReason.CANCELLED:
            raise ReplicaLost("The replica gave up the answer before it was complete. Send the request again.")
        if delta.finish is FinishReason.DEADLINE and not self._partial:
            raise DeadlineExceeded
        if not delta.begun:
            if delta.index == 0:
                self._tally.prompt_tokens -= choice.prompt_tokens  # nobody pays for what was not computed
        elif delta.index == 0 and not choice.tokens:
            # The further choices of a prompt find it in the cache because of the first: no merit of an earlier request.
            self._tally.cached_tokens += delta.cached_tokens
            self._seat.took(prompt_tokens=choice.prompt_tokens, cached_tokens=delta.cached_tokens)
        before = choice.tokens
        choice.take(delta)
        self._tally.completion_tokens += choice.tokens - before
        if delta.tokens:
            self._seat.took(output_tokens=len(delta.tokens))
        if delta.waited_ms is not None:
            for cause, waited_ms in delta.waited_ms.items():
                # Choices wait beside each other, so the longest wait is what the caller noticed.
                in_all_ms = self._seat.waited_ms.get(cause, 0.0) + waited_ms
                self._tally.waited_ms[cause] = max(self._tally.waited_ms.get(cause, 0.0), in_all_ms)
        if choice.finish is not None:
            self._unfinished -= 1
            if delta.finish is None:
                # A stop string came up, of which the replica knows nothing.
                self._streams[source].cancel(delta.index)

    def _time(self, choices: Collection[Choice], now_s: float) -> None:
        if self._tally.first_token_s is None and any(choice.tokens for choice in choices):
            self._tally.first_token_s = now_s
            self._seat.first_token()
        for choice in choices:
            if choice.last_token_s is not None:
                self._tally.gaps_s.append(now_s - choice.last_token_s)
            choice.last_token_s = now_s

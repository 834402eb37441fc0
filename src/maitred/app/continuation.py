"""What there is of an answer, so that another replica can go on with it exactly where its own was lost.

Sampling depends on the seed, the choice and the position of a token, never on where it runs. So an answer that is
resubmitted with the output that it has, *as output*, comes to the same end as if nothing had happened: penalties,
`min_tokens`, `max_tokens` and positions count from its real beginning (see `core.request.Request.resumes`).

What was on its way when a replica was lost is not missed: it was never noted here, so it is generated again. What was
noted has gone to the client, and is not generated again. Where an answer must follow a grammar, the state of the
grammar follows from the output too, so nothing more than this needs to be kept for it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from msgspec.structs import replace

from maitred.app.hedging import PeekableStream
from maitred.app.merge import merged
from maitred.core.replica import Replica, TokenStream
from maitred.core.request import EngineRequest, FinishReason, TokenDelta


class TokenContinuation:
    """The output of every choice that has not ended.

    Args:
        requests: As a replica would get them first, one for each prompt.
        now_s: To when their deadlines count.
    """

    def __init__(self, requests: Sequence[EngineRequest], now_s: float) -> None:
        self._requests = requests
        self._made_s = now_s
        self._open: list[dict[int, list[int]]] = [request.begun for request in requests]

    @property
    def prompts(self) -> list[int]:
        """The numbers of those that have not been answered in full."""
        return [prompt for prompt, choices in enumerate(self._open) if choices]

    @property
    def answer_by_s(self) -> float | None:
        """When the answer must be there."""
        deadline_in_s = self._requests[0].deadline_in_s
        return None if deadline_in_s is None else self._made_s + deadline_in_s

    def heard(self, prompt: int, delta: TokenDelta) -> None:
        """More of a choice, on its way to the client."""
        self._open[prompt][delta.index] += delta.tokens

    def ended(self, prompt: int, index: int) -> None:
        """A choice has ended, whether its replica knows it or not."""
        del self._open[prompt][index]

    def left(self, now_s: float) -> dict[int, EngineRequest]:
        """What is to be submitted now for each prompt that has not been answered in full."""
        return {prompt: self._rest(prompt, now_s - self._made_s) for prompt in self.prompts}

    def cut_off(self) -> tuple[int, list[TokenDelta]]:
        """The end of all choices of one prompt, because the time is over."""
        prompt = self.prompts[0]
        begun = self._begun(prompt)
        return prompt, [TokenDelta(index, [], FinishReason.DEADLINE, begun=begun) for index in self._open[prompt]]

    def _begun(self, prompt: int) -> bool:
        """Whether anything came of it."""
        choices = self._open[prompt]
        return len(choices) < self._requests[prompt].sampling.n or any(choices.values())

    def _rest(self, prompt: int, passed_s: float) -> EngineRequest:
        request, choices = self._requests[prompt], self._open[prompt]
        deadline_in_s = request.deadline_in_s
        return replace(
            request,
            resumes={index: [*output] for index, output in choices.items()} if self._begun(prompt) else None,
            deadline_in_s=None if deadline_in_s is None else deadline_in_s - passed_s,
        )


class ReplicaAttempt:
    """One replica at work on what is left; made by `attempt`.

    Attributes:
        streams: By the number of the prompt.
    """

    def __init__(self, streams: dict[int, TokenStream], batches: AsyncIterator[tuple[int, list[TokenDelta]]]) -> None:
        self.streams = streams
        self._batches = PeekableStream(batches)

    def listen(self, hear: Callable[[int, Sequence[TokenDelta]], bool]) -> None:
        """See `core.ports.TokenStream.listen`; with the number of the prompt. Of several, nothing is heard."""
        if len(self.streams) == 1:
            ((prompt, stream),) = self.streams.items()
            stream.listen(partial(hear, prompt))

    async def begun(self) -> None:
        """Waits for the first news, and leaves it there."""
        await self._batches.begun()

    def news(self) -> Awaitable[tuple[int, list[TokenDelta]]]:
        """The number of a prompt, and what came of its answer.

        Raises:
            ReplicaLost: The replica died.
            ReplicaUnavailable: It refuses the request, and another one may take it.
            StopAsyncIteration: All has ended there.
        """
        return anext(self._batches)


@asynccontextmanager
async def attempt(
    replica: Replica, requests: dict[int, EngineRequest], submitted: Callable[[], None]
) -> AsyncIterator[ReplicaAttempt]:
    """Submits requests; leaving cancels what has not ended.

    Args:
        replica: To whom.
        requests: By the number of the prompt.
        submitted: Called after each.

    Raises:
        ReplicaUnavailable: The replica is not ready.
    """
    async with AsyncExitStack() as running:
        streams: dict[int, TokenStream] = {}
        for prompt, request in requests.items():
            streams[prompt] = await running.enter_async_context(replica.generate(request))
            submitted()
        batches = await running.enter_async_context(merged(streams))
        yield ReplicaAttempt(streams, batches)

"""Trials on a replica, as the gateway sees it: several sequences at once, or one prompt alone.

A trial uses only `core.replica.Replica`, without HTTP: it measures the step with its sampling and its way through the
socket, which is the best case for a client.
"""

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from maitred.core.clock import Clock
from maitred.core.replica import ModelCard, Replica
from maitred.core.request import EngineRequest, SamplingParams
from maitred.tune.growth import DecodeSample
from maitred.tune.prefill import Prefill

SETTLE_TOKENS = 3
"""Tokens of every sequence before measuring: the first steps after a prefill differ from later ones."""
FEWEST_STEPS = 6
"""Least steps of a sample: a slow machine gets more time, so that a percentile is meaningful."""


class TrialRunner:
    """Runner of trials, one at a time.

    Args:
        replica: Replica to measure. It must have no other users meanwhile.
        clock: Clock for the times of tokens.
        prompt_tokens: Length of the prompts.
        sleep: Function that waits while a sample is taken.
    """

    def __init__(
        self,
        replica: Replica,
        clock: Clock,
        *,
        prompt_tokens: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._sleep = sleep
        self._replica = replica
        self._clock = clock
        self._card: ModelCard = replica.card()
        self._prompt_tokens = prompt_tokens
        self._numbers = 0

    async def decode(self, sequences: int, *, samples: int, sample_s: float, into: list[DecodeSample]) -> None:
        """Samples the decoding of several sequences at once, after all of them have begun.

        The prompts are the same as in earlier trials, so the prefix cache has most of them already.

        Args:
            sequences: Number of sequences.
            samples: Number of samples, one after the other; fewer if an answer reaches the end of the window.
            sample_s: Length of each sample; longer if that is less than `FEWEST_STEPS` steps.
            into: List that each sample is added to when it ends, so that samples are kept when the time is up.
        """
        async with self._running(sequences) as readers:
            await asyncio.gather(*(reader.reaches(SETTLE_TOKENS) for reader in readers))
            for _ in range(samples):
                start_s = self._clock.monotonic_s()
                counts = [len(reader.times_s) for reader in readers]
                await self._sleep(sample_s)
                await readers[0].reaches(counts[0] + FEWEST_STEPS)
                if any(reader.over for reader in readers):
                    break
                into.append(_sample(readers, counts, self._clock.monotonic_s() - start_s))

    async def prefill(self, tokens: int, *, repeats: int) -> Prefill:
        """Measures a new prompt of a length, alone; returns the median of several."""
        seconds = []
        for _ in range(repeats):
            self._numbers += 1
            request = self._request(f"prefill-{self._numbers}", tokens, 1)
            start_s = self._clock.monotonic_s()
            async with self._replica.generate(request) as stream:
                async for _ in stream:
                    seconds.append(self._clock.monotonic_s() - start_s)
                    break
        return Prefill(tokens, statistics.median(seconds))

    @asynccontextmanager
    async def _running(self, sequences: int) -> AsyncIterator[list["_Reader"]]:
        """Runs several answers, each with a reader; leaving the context ends them."""
        self._numbers += 1
        longest = min(self._card.context_tokens, self._card.kv_capacity_tokens // sequences) - self._prompt_tokens
        readers = [_Reader(self._clock) for _ in range(sequences)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        reader.read(self._replica, self._request(f"decode-{number}", self._prompt_tokens, longest))
                    )
                    for number, reader in enumerate(readers)
                ]
                try:
                    yield readers
                finally:
                    for task in tasks:
                        task.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the replica was lost, and all readers raise the same error

    def _request(self, prompt: str, tokens: int, longest: int) -> EngineRequest:
        """Makes a request whose prompt depends only on its name, and which ends only by its length."""
        draw = random.Random(prompt)
        return EngineRequest(
            id=f"{prompt}-{self._numbers}",
            prompt=[draw.randrange(self._card.vocab_size) for _ in range(tokens)],
            sampling=SamplingParams(max_tokens=max(1, longest), seed=0, temperature=0.0, ignore_eos=True),
            cache_scope="tune",
        )


class _Reader:
    """Reader of one answer, which records when its tokens came."""

    def __init__(self, clock: Clock) -> None:
        self.times_s: list[float] = []
        """One per delivery."""
        self.tokens: list[int] = []
        """How many came with each."""
        self.over = False
        self._clock = clock
        self._news = asyncio.Event()

    async def read(self, replica: Replica, request: EngineRequest) -> None:
        try:
            async with replica.generate(request) as stream:
                async for batch in stream:
                    self.times_s.append(self._clock.monotonic_s())
                    self.tokens.append(sum(len(delta.tokens) for delta in batch))
                    self._news.set()
        finally:
            self.over = True
            self._news.set()

    async def reaches(self, deliveries: int) -> None:
        """Waits until a number of deliveries have come, or the answer is over."""
        while len(self.times_s) < deliveries and not self.over:
            self._news.clear()
            await self._news.wait()


def _sample(readers: Sequence[_Reader], counts: Sequence[int], seconds: float) -> DecodeSample:
    """Returns the sample of all readers since `counts` deliveries."""
    gaps_s = sorted(
        later - earlier
        for reader, count in zip(readers, counts, strict=True)
        for earlier, later in zip(reader.times_s[count - 1 :], reader.times_s[count:], strict=False)
    )
    tokens = sum(sum(reader.tokens[count:]) for reader, count in zip(readers, counts, strict=True))
    return DecodeSample(
        sequences=len(readers),
        tokens_per_s=tokens / seconds,
        itl_p50_s=gaps_s[len(gaps_s) // 2],
        itl_p95_s=gaps_s[int(len(gaps_s) * 0.95)],
    )

"""Measures a replica from where the gateway stands: so many sequences at once, or one prompt alone.

Nothing here knows of HTTP, and nothing of the engine but `core.ports.Replica`: what is measured is the step with its
sampling and its way through the socket, as a reader of the answers would see it at best.
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
"""Of every sequence, before anything counts: the first steps after a prefill are unlike the later ones."""
FEWEST_STEPS = 6
"""Of a sample: a slow machine is given longer, so that a percentile means something."""


class TrialRunner:
    """Runs trials, one at a time.

    Args:
        replica: What is measured. Nobody else uses it meanwhile.
        clock: Times the tokens.
        prompt_tokens: Length of the prompts.
        sleep: Waits while a sample is taken.
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
        """Samples decodes of so many sequences at once, once all of them have begun.

        Their prompts are those of the trials before, so that the prefix cache has most of them already.

        Args:
            sequences: How many.
            samples: Stretches to measure, one after the other; fewer if an answer reaches the end of the window.
            sample_s: Length of each; longer where that is less than `FEWEST_STEPS` steps.
            into: Gets each as soon as it is over, so that what there is survives the end of the time.
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
        """A prompt of that length, alone and never seen before; the median of several."""
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
        """Runs so many answers, each with a reader; leaving the block ends them."""
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
            raise failures.exceptions[0] from None  # the replica was lost, to all of them at once

    def _request(self, prompt: str, tokens: int, longest: int) -> EngineRequest:
        """A request whose prompt follows from its name alone, and which only ever ends by its length."""
        draw = random.Random(prompt)
        return EngineRequest(
            id=f"{prompt}-{self._numbers}",
            prompt=[draw.randrange(self._card.vocab_size) for _ in range(tokens)],
            sampling=SamplingParams(max_tokens=max(1, longest), seed=0, temperature=0.0, ignore_eos=True),
            cache_scope="tune",
        )


class _Reader:
    """Reads one answer, and notes when its tokens came."""

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
        """Waits until so many deliveries have come, or the answer is over."""
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

"""Engine for embeddings: texts in, one vector for each out, one batch per step.

It has the same interface as `maitred.engine.engine.Engine`, so the same server, protocol, client and dispatcher serve
it. A request is a prompt whose answer is one delta without tokens. There is no KV cache. Its load report counts waiting
texts as if they held blocks, so a gateway sends about two batches ahead and keeps the rest in its fair queue.

A new batch is formed for every step (continuous batching) from the head of the queue, until the next text would exceed
the limit. Batches are packed, so long and short texts can share one.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from maitred.core.clock import Clock
from maitred.core.prefix import BlockUpdate
from maitred.core.replica import LoadReport, pairs_of
from maitred.core.request import EngineRequest, FinishReason, SequenceStats, TokenDelta
from maitred.engine import request_log
from maitred.engine.scheduler.step_times import StepMeter, StepWork
from maitred.fairness.fair_queue import FairQueue, QueueEntry, QueueOrderConfig, make_queue
from maitred.wire.frames import Rejection, TokenOutput, UpdateSimilar

BLOCK_TOKENS = 16
"""Tokens of a block in the load report, by which waiting texts are counted."""


class EncoderModel(Protocol):
    """Function that computes the vectors of texts."""

    def __call__(self, texts: Sequence[Sequence[int]]) -> Sequence[bytes]:
        """Computes one vector for each text, in the form of `TokenDelta.embedding`."""
        ...


@dataclass(frozen=True, slots=True)
class _Text:
    """Text that waits for its batch."""

    owner: Hashable
    request: EngineRequest
    arrived_s: float

    @property
    def tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK_TOKENS)

    def is_expired(self, now_s: float) -> bool:
        deadline_in_s = self.request.deadline_in_s
        return deadline_in_s is not None and now_s - self.arrived_s >= deadline_in_s


class EncoderEngine:
    """Engine that computes the vectors of texts in batches.

    Args:
        encode: Computes the vectors of a batch.
        clock: Clock of the measurements and deadlines.
        line: Order of the fair queue.
        vocab_size: Size of the vocabulary; other token ids are rejected.
        context_tokens: Maximum tokens of a text.
        max_sequences: Waiting texts from which on the load report shows no free sequence; no text is rejected for it.
        step_tokens: Maximum tokens of a batch, except for a single text that is longer.
    """

    def __init__(
        self,
        encode: EncoderModel,
        clock: Clock,
        *,
        line: QueueOrderConfig,
        vocab_size: int,
        context_tokens: int,
        max_sequences: int,
        step_tokens: int,
    ) -> None:
        self._encode = encode
        self._clock = clock
        self._line: FairQueue[_Text] = make_queue(line)
        self._entries: dict[Hashable, dict[str, QueueEntry[_Text]]] = defaultdict(dict)
        """Owner -> request id -> queue entry."""
        self._meter = StepMeter()
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._max_sequences = max_sequences
        self._step_tokens = step_tokens
        self.total_blocks = -(-max(2 * step_tokens, context_tokens) // BLOCK_TOKENS)
        self._blocks = self._tokens = 0
        self._steps = self._prompt_tokens = self._finished = self._cancelled = 0
        self._step_s = 0.0

    def max_idle_s(self) -> float | None:
        """Returns 0 while any text waits; else None: the engine may sleep until the next request."""
        return 0.0 if len(self._line) else None

    @property
    def occupied(self) -> bool:
        """Whether any request has not ended."""
        return len(self._line) > 0

    def submit(self, owner: Hashable, request: EngineRequest) -> None:
        """Enqueues a text of an owner.

        Raises:
            ValueError: The text can never be computed here; the message says why, and the text was not enqueued.
        """
        if request.id in self._entries[owner]:
            raise ValueError(f"A request with the id {request.id} is already running.")
        if request.sampling.max_tokens:
            raise ValueError("This engine computes embeddings and generates nothing.")
        if not 1 <= len(request.prompt) <= self._context_tokens:
            raise ValueError(f"A text must have at least one token and at most {self._context_tokens}.")
        if not all(0 <= token < self._vocab_size for token in request.prompt):
            raise ValueError(f"Token ids must be at least 0 and below the vocabulary's size, {self._vocab_size}.")
        now_s = self._clock.monotonic_s()
        text = _Text(owner, request, now_s)
        entry = QueueEntry(text, request.flow, arrived_s=now_s, service=float(text.tokens))
        self._line.add(entry, now_s)
        self._entries[owner][request.id] = entry
        self._blocks += text.blocks
        self._tokens += text.tokens

    def cancel(self, owner: Hashable, request_id: str, index: int | None) -> None:
        """Cancels a waiting request; an unknown or finished request is ignored."""
        entry = self._entries[owner].get(request_id)
        if entry is not None:
            self._line.remove(entry)
            self._forget(entry.value)
            self._cancelled += 1

    def pause(self, owner: Hashable, request_id: str, *, paused: bool) -> None:
        """Does nothing: an answer is one delta, so it cannot be paused."""

    def set_asleep(self, *, asleep: bool) -> None:
        """Does nothing: an encoder is small, so it never sleeps."""

    def unpin(self, scope: str, name: str) -> None:
        """Does nothing: there is no cache with pinned prefixes."""

    def update_similar(self, update: UpdateSimilar) -> None:
        """Does nothing: there is no index of questions."""

    def rejections(self) -> list[tuple[Hashable, Rejection]]:
        """Returns no rejections: every enqueued text can be computed."""
        return []

    def cancel_owner(self, owner: Hashable) -> None:
        """Cancels all requests of an owner that has disconnected."""
        for request_id in list(self._entries[owner]):
            self.cancel(owner, request_id, None)
        del self._entries[owner]

    def step(self) -> dict[Hashable, list[TokenOutput]]:
        """Computes one batch and returns the vectors by owner."""
        start_s = self._clock.monotonic_s()
        outputs: dict[Hashable, list[TokenOutput]] = defaultdict(list)
        batch = self._batch(start_s, outputs)
        if not batch:
            return outputs
        with request_log.log_failed_step(text.request for text in batch):
            vectors = self._encode([text.request.prompt for text in batch])
        took_s = self._clock.monotonic_s() - start_s
        for text, vector in zip(batch, vectors, strict=True):
            waited_s = start_s - text.arrived_s
            waited_ms = {"slots": round(1000 * waited_s, 1)} if waited_s >= 0.0001 else None
            stats = SequenceStats(waited_s, took_s, prefill_steps=1, prefill_batch=len(batch))
            delta = TokenDelta(0, [], FinishReason.STOP, waited_ms=waited_ms, embedding=vector, stats=stats)
            outputs[text.owner].append(TokenOutput(text.request.id, delta))
            request_log.log_encoding(text.request, waited_s, len(batch))
            self._line.done(text.request.flow)
        self._count(batch, self._clock.monotonic_s() - start_s)
        return outputs

    def block_update(self, *, whole: bool = False) -> BlockUpdate | None:
        """Returns None: there is no prefix cache."""
        return None

    def load(self) -> LoadReport:
        """Returns the load report of the engine."""
        waiting = len(self._line)
        return LoadReport(
            waiting=waiting,
            free_blocks=max(0, self.total_blocks - self._blocks),
            total_blocks=self.total_blocks,
            steps=self._steps,
            step_s=self._step_s,
            prompt_tokens=self._prompt_tokens,
            finished=self._finished,
            cancelled=self._cancelled,
            free_sequences=max(0, self._max_sequences - waiting),
            waiting_prompt_tokens=self._tokens,
            step_tokens=self._step_tokens,
            times=self._meter.times,
            batched=self._finished,
            prefill_tokens=self._prompt_tokens,
        )

    def _batch(self, now_s: float, outputs: dict[Hashable, list[TokenOutput]]) -> list[_Text]:
        """Dequeues the texts of the next batch; expired texts get an end instead."""
        batch: list[_Text] = []
        tokens = 0
        while (entry := self._line.head(now_s)) is not None:
            text = entry.value
            if text.is_expired(now_s):
                self._line.remove(entry)
                self._forget(text)
                outputs[text.owner].append(
                    TokenOutput(text.request.id, TokenDelta(0, [], FinishReason.DEADLINE, begun=False))
                )
                continue
            if batch and tokens + text.tokens > self._step_tokens:
                break
            self._line.take(entry, now_s)
            self._line.charge(text.request.flow, float(text.tokens))
            self._forget(text)
            batch.append(text)
            tokens += text.tokens
        return batch

    def _forget(self, text: _Text) -> None:
        del self._entries[text.owner][text.request.id]
        self._blocks -= text.blocks
        self._tokens -= text.tokens

    def _count(self, batch: Sequence[_Text], took_s: float) -> None:
        tokens = sum(text.tokens for text in batch)
        self._steps += 1
        self._step_s += took_s
        self._finished += len(batch)
        self._prompt_tokens += tokens
        if took_s > 0:
            pairs = sum(pairs_of(0, text.tokens) for text in batch)
            self._meter.record(StepWork(chunks=len(batch), prefill_tokens=tokens, pairs=pairs), took_s)

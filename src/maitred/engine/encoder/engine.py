"""Engine for embeddings: texts in, one vector for each out, one batch per step.

It has the same interface as `maitred.engine.engine.Engine`, so the same server, protocol, client and dispatcher serve
it. A request is a prompt whose answer is one delta without tokens. There is no KV cache. Its load report counts waiting
texts as if they held blocks, so a gateway sends about two batches ahead and keeps the rest in its fair queue.

A new batch is formed for every step (continuous batching) from the head of the queue, until the next text would exceed
the limit. Batches are packed, so long and short texts can share one.

A text may bring a search for similar cached questions. It is computed in the same batch as all others, and its answer
has the result of the search in place of the vector. A training of a verifier is a request without a text. It runs in
units, one in each step for which no text waits, so a text waits for one unit at most.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from maitred.core.clock import Clock
from maitred.core.prefix import BlockUpdate
from maitred.core.replica import LoadReport, pairs_of
from maitred.core.request import (
    EngineRequest,
    FinishReason,
    SequenceStats,
    SimilarQuestions,
    SimilarSearch,
    TokenDelta,
    VerifierTraining,
)
from maitred.engine import request_log
from maitred.engine.encoder.training_queue import TrainingQueue
from maitred.engine.scheduler.step_times import StepMeter, StepWork
from maitred.engine.similar.cached_questions import CachedQuestions
from maitred.fairness.fair_queue import FairQueue, QueueEntry, QueueOrderConfig, make_queue
from maitred.wire.frames import Rejection, TokenOutput, UpdateSimilar

BLOCK_TOKENS = 16
"""Tokens of a block in the load report, by which waiting texts are counted."""


def capacity_blocks(step_tokens: int, context_tokens: int) -> int:
    """Returns the blocks of the load report: so many hold two batches, or the longest text."""
    return -(-max(2 * step_tokens, context_tokens) // BLOCK_TOKENS)


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
    def search(self) -> SimilarSearch | None:
        similar = self.request.similar
        return similar if isinstance(similar, SimilarSearch) else None

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
        questions: Cached questions; None: requests with a search or a training are rejected.
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
        questions: CachedQuestions | None = None,
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
        self._questions = questions
        self._trainings = TrainingQueue()
        self.total_blocks = capacity_blocks(step_tokens, context_tokens)
        self._blocks = self._tokens = 0
        self._steps = self._prompt_tokens = self._finished = self._cancelled = 0
        self._step_s = 0.0

    def max_idle_s(self) -> float | None:
        """Returns 0 while there is work; else None: the engine may sleep until the next request."""
        return 0.0 if self.occupied else None

    @property
    def occupied(self) -> bool:
        """Whether any request has not ended."""
        return len(self._line) > 0 or len(self._trainings) > 0

    def submit(self, owner: Hashable, request: EngineRequest) -> None:
        """Enqueues a text or a training of an owner.

        Raises:
            ValueError: It can never be computed here; the message says why, and it was not enqueued.
        """
        if request.id in self._entries[owner] or (owner, request.id) in self._trainings:
            raise ValueError(f"A request with the id {request.id} is already running.")
        if request.sampling.max_tokens:
            raise ValueError("This engine computes embeddings and generates nothing.")
        if request.similar is not None and self._questions is None:
            raise ValueError("This engine keeps no questions. Set encoder.similar_questions where it is started.")
        now_s = self._clock.monotonic_s()
        if self._questions is not None and isinstance(request.similar, VerifierTraining):
            self._trainings.add(owner, request, self._questions.train(request.similar.labels), now_s)
            return
        if not 1 <= len(request.prompt) <= self._context_tokens:
            raise ValueError(f"A text must have at least one token and at most {self._context_tokens}.")
        if not all(0 <= token < self._vocab_size for token in request.prompt):
            raise ValueError(f"Token ids must be at least 0 and below the vocabulary's size, {self._vocab_size}.")
        text = _Text(owner, request, now_s)
        entry = QueueEntry(text, request.flow, arrived_s=now_s, service=float(text.tokens))
        self._line.add(entry, now_s)
        self._entries[owner][request.id] = entry
        self._blocks += text.blocks
        self._tokens += text.tokens

    def cancel(self, owner: Hashable, request_id: str, index: int | None) -> None:
        """Cancels a waiting request or a training; an unknown or finished request is ignored."""
        if self._trainings.cancel(owner, request_id):
            self._cancelled += 1
            return
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
        """Changes the cached questions or the verifiers, if there are any."""
        if self._questions is not None:
            self._questions.update(update)

    def rejections(self) -> list[tuple[Hashable, Rejection]]:
        """Returns no rejections: every enqueued text can be computed."""
        return []

    def cancel_owner(self, owner: Hashable) -> None:
        """Cancels all requests of an owner that has disconnected."""
        for request_id in list(self._entries[owner]):
            self.cancel(owner, request_id, None)
        del self._entries[owner]
        self._trainings.cancel_owner(owner)

    def step(self) -> dict[Hashable, list[TokenOutput]]:
        """Computes one batch, or else one unit of a training, and returns the answers by owner."""
        start_s = self._clock.monotonic_s()
        outputs: dict[Hashable, list[TokenOutput]] = defaultdict(list)
        batch = self._batch(start_s, outputs)
        if not batch:
            if len(self._trainings) and (ended := self._trainings.run_unit(start_s)) is not None:
                outputs[ended[0]].append(ended[1])
            return outputs
        with request_log.log_failed_step(text.request for text in batch):
            answers = self._answer(batch)
        took_s = self._clock.monotonic_s() - start_s
        for text, answer in zip(batch, answers, strict=True):
            waited_s = start_s - text.arrived_s
            waited_ms = {"slots": round(1000 * waited_s, 1)} if waited_s >= 0.0001 else None
            stats = SequenceStats(waited_s, took_s, prefill_steps=1, prefill_batch=len(batch))
            delta = TokenDelta(
                0,
                [],
                FinishReason.STOP,
                waited_ms=waited_ms,
                embedding=answer if isinstance(answer, bytes) else None,
                stats=stats,
                similar=answer if isinstance(answer, SimilarQuestions) else None,
            )
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

    def _answer(self, batch: Sequence[_Text]) -> Sequence[bytes | SimilarQuestions]:
        """Computes the vector of each text, or the result of its search."""
        if self._questions is None or all(text.search is None for text in batch):
            return self._encode([text.request.prompt for text in batch])
        return self._questions.answer([(text.request.prompt, text.search) for text in batch])

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

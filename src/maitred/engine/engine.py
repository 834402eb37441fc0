"""Engine without its socket: it takes requests, computes steps and returns new tokens.

`Engine` connects the scheduler, which plans the steps, with a runner, which computes them. It also records which owner
each token belongs to. An *owner* is the connection that submitted a request. Request ids are unique per owner, so a
gateway can never affect the requests of another gateway.
"""

from collections import defaultdict
from collections.abc import Hashable
from itertools import chain
from typing import Protocol

from maitred.core.clock import Clock
from maitred.core.prefix import BlockUpdate
from maitred.core.replica import LoadReport
from maitred.core.request import EngineRequest, FinishReason, SequenceStats, TokenDelta, TokenLogprobs, WaitCause
from maitred.engine import request_log
from maitred.engine.grammar.constraints import Constraints
from maitred.engine.grammar.pending import PendingGrammars
from maitred.engine.scheduler.plan import StepPlan
from maitred.engine.scheduler.scheduler import Scheduler
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.step_times import StepWork
from maitred.engine.sequence_stats import SequenceStatsRecorder
from maitred.engine.sleep import SleepController
from maitred.engine.speculate.speculator import Speculator
from maitred.wire.frames import Rejection, TokenOutput, UpdateSimilar

_COMPILING_S = 0.002
"""Polling interval for compiled grammars while the engine is otherwise idle."""


class PlanRunner(Protocol):
    """Runner that computes step plans.

    A Protocol, because the engine must not import torch, and its tests need no model.
    """

    def execute(self, plan: StepPlan) -> tuple[list[list[int]], list[list[TokenLogprobs] | None]]:
        """Computes one step plan.

        Returns:
            For each chunk that samples, in order: the tokens that follow it (at least one, unless its request wants
            none), and their log-probabilities if they were requested. They may include tokens that the grammar forced,
            which were not sampled. Log-probabilities of prompt tokens are noted in the chunks.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that lost its blocks: it was finished, cancelled or preempted."""
        ...


class Engine:
    """Engine that computes requests in steps.

    Args:
        scheduler: Decides what a step computes.
        runner: Computes it.
        clock: Times the steps.
        vocab_size: Token ids at or above it are refused.
        max_choices: Largest `n` accepted.
        constraints: Grammar states of the sequences; None: requests with a grammar are refused.
        speculator: Adds draft tokens to the steps; None: there are no draft tokens.
        sleep_controller: Controls whether the engine sleeps; None: it never sleeps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: PlanRunner,
        clock: Clock,
        *,
        vocab_size: int,
        max_choices: int,
        constraints: Constraints | None = None,
        speculator: Speculator | None = None,
        sleep_controller: SleepController | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._vocab_size = vocab_size
        self._max_choices = max_choices
        self._constraints = constraints
        self._unready = PendingGrammars()
        self._rejections: list[tuple[Hashable, Rejection]] = []
        self._speculator = speculator
        self._sleep_controller = sleep_controller
        self._stats_recorder = SequenceStatsRecorder()
        self._requests: dict[Hashable, dict[str, dict[int, Sequence]]] = defaultdict(dict)
        """Owner -> request id -> choice index -> sequence, until the sequence ends."""
        self._owners: dict[int, Hashable] = {}
        """Sequence key -> owner, until the sequence ends."""
        self._measuring: tuple[StepWork, float] | None = None
        """Work of the last unrecorded step, and its start time without the time for writing drafts."""
        self._steps = 0
        self._step_s = 0.0
        self._batched = self._prefill_tokens = self._decode_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether any sequence is running or waiting."""
        return self._scheduler.busy

    def max_idle_s(self) -> float | None:
        """Returns the seconds until the next step is due; 0 while there is work, None until a request comes."""
        self._admit_compiled()
        if self._rejections:
            return 0.0
        if self._sleep_controller is not None:
            rest_s = self._sleep_controller.max_idle_s(occupied=self.occupied)
            if rest_s is not None or self._sleep_controller.asleep:
                return rest_s
        patience_s = self._scheduler.max_idle_s(self._clock.monotonic_s())
        if not self._unready:
            return patience_s
        return _COMPILING_S if patience_s is None else min(patience_s, _COMPILING_S)

    @property
    def occupied(self) -> bool:
        """Whether any request has not ended, including paused requests, which need no computation."""
        return bool(self._owners)

    def submit(self, owner: Hashable, request: EngineRequest) -> None:
        """Accepts a request of an owner.

        Raises:
            ValueError: The request can never run here; the message says why, and the engine keeps nothing of it.
        """
        if request.id in self._requests[owner]:
            raise ValueError(f"A request with the id {request.id} is already running.")
        sampling = request.sampling
        if sampling.grammar is not None and self._constraints is None:
            raise ValueError("The answers of this engine cannot be held to a grammar.")
        if sampling.n > self._max_choices:
            raise ValueError(f"n must be at most {self._max_choices}.")
        named = chain(
            *(request.prompt, sampling.stop_token_ids, sampling.logit_bias, sampling.allowed_token_ids),
            *sampling.bad_words_token_ids,
            *(request.resumes or {}).values(),
        )
        if not all(0 <= token < self._vocab_size for token in named):
            raise ValueError(f"Token ids must be at least 0 and below the vocabulary's size, {self._vocab_size}.")
        now_s = self._clock.monotonic_s()
        sequences = self._scheduler.add(request, now_s)
        self._requests[owner][request.id] = {sequence.index: sequence for sequence in sequences}
        for sequence in sequences:
            self._owners[sequence.key] = owner
        if self._constraints is not None and sampling.grammar is not None:
            compiler = self._constraints.compiler
            compiler.hold(sampling.grammar)
            if not compiler.ready(sampling.grammar) or compiler.fault(sampling.grammar) is not None:
                for sequence in sequences:
                    self._scheduler.pause(sequence)
                self._unready.add(owner, request.id, sequences, now_s)

    def cancel(self, owner: Hashable, request_id: str, index: int | None) -> None:
        """Cancels one choice of a request, or all choices (`index` None), at once.

        Unknown or finished requests are ignored.

        A gateway cancels a single choice when its answer is complete, for example at a stop string. It cancels a whole
        request when no client reads it any more; the generated tokens then count as wasted.
        """
        choices = self._requests[owner].get(request_id, {})
        for choice in [index] if index is not None else list(choices):
            sequence = choices.get(choice)
            if sequence is not None:
                request_log.log_cancellation(sequence)
                self._scheduler.cancel(sequence, wasted=index is None)
                self._close(owner, sequence)
        self._set_asleep()

    def pause(self, owner: Hashable, request_id: str, *, paused: bool) -> None:
        """Pauses a request, or resumes it. Unknown or finished requests are ignored."""
        unready = self._unready.get(owner, request_id)
        if unready is not None:
            unready.paused = paused
            return
        for sequence in self._requests[owner].get(request_id, {}).values():
            if paused:
                self._scheduler.pause(sequence)
                self._forget(sequence)
            else:
                self._scheduler.resume(sequence, self._clock.monotonic_s())
        self._set_asleep()

    def cancel_owner(self, owner: Hashable) -> None:
        """Cancels all requests of an owner that has disconnected."""
        for request_id in list(self._requests[owner]):
            self.cancel(owner, request_id, None)
        del self._requests[owner]

    def set_asleep(self, *, asleep: bool) -> None:
        """Releases the model's memory as soon as no request runs, or restores it."""
        if self._sleep_controller is not None:
            self._sleep_controller.order(asleep=asleep)

    def unpin(self, scope: str, name: str) -> None:
        """Unpins a prefix before its time is over. Unknown or expired pins are ignored."""
        self._scheduler.pins.release(scope, name)

    def step(self) -> dict[Hashable, list[TokenOutput]]:
        """Computes one step, ends sequences past their deadlines, and returns new tokens by owner.

        While the engine sleeps, the result is empty.
        """
        self._admit_compiled()
        if self._sleep_controller is not None and not self._sleep_controller.step(occupied=self.occupied):
            return {}
        start_s = self._clock.monotonic_s()
        self._record(start_s)
        plan = self._scheduler.plan(start_s)
        outputs: dict[Hashable, list[TokenOutput]] = defaultdict(list)
        for sequence in plan.expired:
            first = sequence.output_tokens == 0
            stats = self._stats_recorder.stats(sequence, start_s, ended=True)
            self._emit(outputs, sequence, _delta(sequence, [], FinishReason.DEADLINE, None, first=first, stats=stats))
        for sequence in plan.preempted:
            request_log.log_preemption(sequence)
            self._forget(sequence)
        if not plan:
            return outputs
        writing_s = 0.0
        if self._speculator is not None:
            writing_s = self._speculator.extend(plan, self._scheduler.draft_budget, self._scheduler.times)
        self._stats_recorder.on_plan(plan, start_s)
        with request_log.log_failed_step(chunk.sequence.request for chunk in plan.chunks):
            tokens, logprobs = self._runner.execute(plan)
        computed_s = self._clock.monotonic_s()
        work = StepWork.of(plan)
        advances = self._scheduler.commit(plan, tokens)
        for chunk in plan.prefills:
            if chunk.prompt_logprobs is not None:
                sequence = chunk.sequence
                self._emit(outputs, sequence, TokenDelta(sequence.index, [], prompt_logprobs=chunk.prompt_logprobs))
        # Prefill chunks are last in the plan, and their tokens are emitted first. So a first token does not wait until
        # all other tokens are emitted.
        for advance, scores in reversed(list(zip(advances, logprobs, strict=True))):
            sequence, added = advance.sequence, advance.tokens
            if (fault := self._fault(sequence)) is not None:
                self._break_off(sequence, fault, ended=advance.finish is not None)
                continue
            if scores is not None and len(scores) > len(added):
                scores = scores[: len(added)]
            first = sequence.output_tokens == len(added)
            stats = self._stats_recorder.stats(sequence, computed_s, ended=advance.finish is not None)
            self._emit(outputs, sequence, _delta(sequence, added, advance.finish, scores, first=first, stats=stats))
        end_s = self._clock.monotonic_s()
        self._steps += 1
        self._step_s += end_s - start_s
        self._batched += work.decodes + work.chunks
        self._prefill_tokens += work.prefill_tokens
        self._decode_tokens += work.decodes + work.drafts
        self._measuring = work, start_s + writing_s
        self._set_asleep()
        return outputs

    def _set_asleep(self) -> None:
        """Records the last step if there is no work now, so that idle time does not count as step time."""
        now_s = self._clock.monotonic_s()
        if self._measuring is not None and self._scheduler.max_idle_s(now_s) != 0:
            self._record(now_s)

    def _record(self, now_s: float) -> None:
        """Records the duration of the last step, including the time for sending and receiving."""
        if self._measuring is not None:
            work, start_s = self._measuring
            self._measuring = None
            if now_s > start_s:
                if self._speculator is not None:
                    self._speculator.on_step_time(work, now_s - start_s, self._scheduler.times)
                self._scheduler.on_step_time(work, now_s - start_s)

    def _emit(self, outputs: dict[Hashable, list[TokenOutput]], sequence: Sequence, delta: TokenDelta) -> None:
        owner = self._owners[sequence.key]
        outputs[owner].append(TokenOutput(sequence.request.id, delta))
        if delta.finish is not None:
            request_log.log_end(sequence, delta)
            self._close(owner, sequence)

    def update_similar(self, update: UpdateSimilar) -> None:
        """Does nothing: there is no index of questions."""

    def rejections(self) -> list[tuple[Hashable, Rejection]]:
        """Returns the requests that were rejected since the last call, each with its owner."""
        rejections, self._rejections = self._rejections, []
        return rejections

    def _admit_compiled(self) -> None:
        """Enqueues requests whose grammars have been compiled, and rejects those whose grammars cannot be."""
        if not self._unready or self._constraints is None:
            return
        now_s = self._clock.monotonic_s()
        for unready in self._unready.take_ready(self._constraints.compiler.ready):
            fault = self._constraints.compiler.fault(unready.grammar)
            if fault is not None:
                self._reject(unready.owner, unready.sequences[0].request, fault)
                continue
            for sequence in unready.sequences:
                sequence.waited_s[WaitCause.GRAMMAR.value] = now_s - unready.since_s
                if not unready.paused:
                    self._scheduler.resume(sequence, now_s)

    def _fault(self, sequence: Sequence) -> str | None:
        """Returns why a sequence's new tokens are invalid; None: they are valid."""
        return None if self._constraints is None else self._constraints.faults.get(sequence.key)

    def _break_off(self, sequence: Sequence, fault: str, *, ended: bool) -> None:
        """Rejects the request of a sequence that cannot continue."""
        owner = self._owners.get(sequence.key)
        if owner is None:
            return  # its request was already rejected in this step
        if ended:
            self._close(owner, sequence)
        self._reject(owner, sequence.request, fault)

    def _reject(self, owner: Hashable, request: EngineRequest, reason: str) -> None:
        request_log.log_grammar_failure(request)
        self._rejections.append((owner, Rejection(request.id, reason)))
        self.cancel(owner, request.id, None)

    def load(self) -> LoadReport:
        """Returns the engine's current load report."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        return LoadReport(
            running=scheduler.running,
            waiting=scheduler.waiting + self._unready.sequences,
            free_blocks=scheduler.pool.idle,
            total_blocks=scheduler.pool.total,
            steps=self._steps,
            step_s=self._step_s,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=counters.output_tokens,
            preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            finished=counters.finished,
            cancelled=counters.cancelled,
            wasted_tokens=counters.wasted_tokens,
            free_sequences=scheduler.free_sequences,
            guests=scheduler.overcommitted,
            guest_places=scheduler.overcommit_slots,
            promised_blocks=scheduler.promised_blocks,
            waiting_prompt_tokens=scheduler.waiting_prompt_tokens,
            paused=scheduler.paused - self._unready.sequences,
            step_tokens=scheduler.step_tokens,
            times=scheduler.times,
            forced_tokens=0 if self._constraints is None else self._constraints.forced_tokens,
            drafted_tokens=counters.drafted_tokens,
            accepted_tokens=counters.accepted_tokens,
            pinned_blocks=scheduler.pins.blocks,
            pins_given_up=scheduler.pins.given_up,
            asleep=self._sleep_controller is not None and self._sleep_controller.asleep,
            wakes_in_s=0.0 if self._sleep_controller is None else self._sleep_controller.wakes_in_s,
            swapped_blocks=0 if scheduler.pool.swap is None else scheduler.pool.swap.swapped,
            restored_blocks=0 if scheduler.pool.swap is None else scheduler.pool.swap.restored,
            evicted_blocks=scheduler.pool.evictions,
            batched=self._batched,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            cached_blocks=scheduler.pool.cached,
        )

    def block_update(self, *, whole: bool = False) -> BlockUpdate | None:
        """Returns the changes of the prefix cache since the last call, or its whole current content.

        The changes since the last call are also part of the next update. A receiver that has the whole content can
        apply them twice without harm.
        """
        pool, changes = self._scheduler.pool, self._scheduler.pool.changes
        stored_and_removed = (b"".join(pool.keys()), b"") if whole else changes.take()
        if stored_and_removed is None:
            return None
        stored, removed = stored_and_removed
        return BlockUpdate(
            sequence=changes.sequence,
            block_tokens=self._scheduler.block_tokens,
            total_blocks=pool.total,
            stored=stored,
            removed=removed,
            whole=whole,
        )

    def _forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that lost its blocks, in the runner and the speculator."""
        self._runner.forget(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence)

    def _close(self, owner: Hashable, sequence: Sequence) -> None:
        self._forget(sequence)
        self._stats_recorder.forget(sequence)
        self._unready.discard(owner, sequence)
        del self._owners[sequence.key]
        grammar = sequence.sampling.grammar
        if self._constraints is not None and grammar is not None:
            self._constraints.compiler.add_tokens(grammar, sequence.output_tokens)
        choices = self._requests[owner][sequence.request.id]
        del choices[sequence.index]
        if not choices:
            del self._requests[owner][sequence.request.id]
            if self._constraints is not None and grammar is not None:
                self._constraints.compiler.release(grammar, sequence.request.flow.path[0].id)


def _delta(
    sequence: Sequence,
    tokens: list[int],
    finish: FinishReason | None,
    logprobs: list[TokenLogprobs] | None,
    *,
    first: bool,
    stats: SequenceStats | None,
) -> TokenDelta:
    if not first:
        return TokenDelta(sequence.index, tokens, finish, logprobs, stats=stats)
    waited_ms = {cause: round(1000 * seconds, 1) for cause, seconds in sequence.waited_s.items() if seconds >= 0.0001}
    return TokenDelta(
        index=sequence.index,
        tokens=tokens,
        finish=finish,
        logprobs=logprobs,
        cached_tokens=sequence.cached_tokens or 0,
        waited_ms=waited_ms or None,
        begun=sequence.cached_tokens is not None,
        stats=stats,
    )

"""The engine without its socket: requests in, new tokens out, one step at a time.

`Engine` joins the scheduler, which decides, and a runner, which computes, and keeps track of whose tokens are whose.
An *owner* is whoever submitted a request (a connection); request ids are unique per owner, so two gateways can never
touch each other's work.
"""

from collections import defaultdict
from collections.abc import Hashable
from itertools import chain
from typing import Protocol

from maitred.core.clock import Clock
from maitred.core.ports import LoadReport
from maitred.core.request import Delta, Request, TokenLogprobs
from maitred.engine.scheduler.plan import StepPlan
from maitred.engine.scheduler.scheduler import Scheduler
from maitred.engine.scheduler.sequence import Sequence
from maitred.wire.frames import Output


class Runner(Protocol):
    """Computes plans."""

    def execute(self, plan: StepPlan) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Computes the plan; a token (and log-probabilities, if asked for) for each chunk that samples, in order."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence lost its blocks: finished, cancelled or preempted."""
        ...


class Engine:
    """Runs requests in steps.

    Args:
        scheduler: Decides what a step computes.
        runner: Computes it.
        clock: Times the steps.
        vocab_size: Token ids at or above it are refused.
        max_choices: Largest `n` accepted.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, clock: Clock, *, vocab_size: int, max_choices: int
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._vocab_size = vocab_size
        self._max_choices = max_choices
        self._requests: dict[Hashable, dict[str, dict[int, Sequence]]] = defaultdict(dict)
        """Owner -> request id -> choice index -> the sequence, while it lives."""
        self._owners: dict[int, Hashable] = {}
        """Sequence key -> owner, while it lives."""
        self._steps = 0
        self._step_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.busy

    @property
    def occupied(self) -> bool:
        """Whether any request has not ended; one whose reader has fallen behind may leave nothing to do."""
        return bool(self._owners)

    def submit(self, owner: Hashable, request: Request) -> None:
        """Takes a request in.

        Raises:
            ValueError: It can never run here; the message says why, and nothing was taken.
        """
        if request.id in self._requests[owner]:
            raise ValueError(f"A request with the id {request.id} is already running.")
        sampling = request.sampling
        if sampling.n > self._max_choices:
            raise ValueError(f"n must be at most {self._max_choices}.")
        named = chain(request.prompt, sampling.stop_token_ids, sampling.logit_bias)
        if not all(0 <= token < self._vocab_size for token in named):
            raise ValueError(f"Token ids must be at least 0 and below the vocabulary's size, {self._vocab_size}.")
        sequences = self._scheduler.add(request)
        self._requests[owner][request.id] = {sequence.index: sequence for sequence in sequences}
        for sequence in sequences:
            self._owners[sequence.key] = owner

    def cancel(self, owner: Hashable, request_id: str, index: int | None) -> None:
        """Ends one choice of a request, or all (`index` None), at once. What is unknown or done is ignored."""
        choices = self._requests[owner].get(request_id, {})
        for choice in [index] if index is not None else list(choices):
            sequence = choices.get(choice)
            if sequence is not None:
                self._scheduler.cancel(sequence)
                self._close(owner, sequence)

    def pause(self, owner: Hashable, request_id: str, *, paused: bool) -> None:
        """Computes no more of a request, or goes on with it. What is unknown or done is ignored."""
        for sequence in self._requests[owner].get(request_id, {}).values():
            if paused:
                self._scheduler.pause(sequence)
                self._runner.forget(sequence)
            else:
                self._scheduler.resume(sequence)

    def disown(self, owner: Hashable) -> None:
        """The owner is gone: ends all its requests."""
        for request_id in list(self._requests[owner]):
            self.cancel(owner, request_id, None)
        del self._requests[owner]

    def step(self) -> dict[Hashable, list[Output]]:
        """Computes one step; the new tokens by owner."""
        start_s = self._clock.monotonic_s()
        plan = self._scheduler.plan()
        for sequence in plan.preempted:
            self._runner.forget(sequence)
        tokens, logprobs = self._runner.execute(plan)
        outputs: dict[Hashable, list[Output]] = defaultdict(list)
        for advance, logprob in zip(self._scheduler.commit(plan, tokens), logprobs, strict=True):
            sequence = advance.sequence
            delta = Delta(
                index=sequence.index,
                tokens=[advance.token],
                finish=advance.finish,
                logprobs=None if logprob is None else [logprob],
                cached_tokens=(sequence.cached_tokens or 0) if sequence.output_tokens == 1 else 0,
            )
            owner = self._owners[sequence.key]
            outputs[owner].append(Output(sequence.request.id, delta))
            if advance.finish is not None:
                self._close(owner, sequence)
        self._steps += 1
        self._step_s += self._clock.monotonic_s() - start_s
        return outputs

    def load(self) -> LoadReport:
        """Where things stand."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        return LoadReport(
            running=scheduler.running,
            waiting=scheduler.waiting,
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
            free_sequences=scheduler.free_sequences,
            promised_blocks=scheduler.promised_blocks,
            waiting_prompt_tokens=scheduler.waiting_prompt_tokens,
            paused=scheduler.paused,
            step_tokens=scheduler.step_tokens,
        )

    def _close(self, owner: Hashable, sequence: Sequence) -> None:
        self._runner.forget(sequence)
        del self._owners[sequence.key]
        choices = self._requests[owner][sequence.request.id]
        del choices[sequence.index]
        if not choices:
            del self._requests[owner][sequence.request.id]

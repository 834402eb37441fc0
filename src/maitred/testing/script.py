"""Script of an engine: plain data, in the same form in Python and in a JSON file."""

import struct
from enum import StrEnum

import msgspec

from maitred.core.replica import ModelCard
from maitred.core.request import EngineRequest, FinishReason, PromptLogprobs, TokenDelta, TokenLogprobs


class AnswerFault(StrEnum):
    """Fault in the middle of an answer."""

    REJECT = "reject"
    """The engine refuses the request (at once, whatever `fault_after` says)."""
    STALL = "stall"
    """The request gets no more tokens; everything else continues."""
    DROP = "drop"
    """The connection ends between two frames."""
    HALF_FRAME = "half_frame"
    """The connection ends within a frame."""
    GARBAGE = "garbage"
    """A frame that does not decode; the connection stays open."""
    SEQUENCE_GAP = "sequence_gap"
    """One step is not sent."""
    DIE = "die"
    """The process ends as by SIGKILL; an engine in the test's process closes all its sockets instead."""


class ScriptedAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer to one request, the same for each of its choices."""

    tokens: list[int] | None = None
    """Tokens of the answer, which ends with `stop` after these, or with `length` at the request's `max_tokens`. None
    repeats the prompt until `max_tokens`."""
    tokens_per_step: int = 1
    wait_steps: int = 0
    """Steps before the first token."""
    cached_tokens: int = 0
    """Reported with the first delta."""
    fault: AnswerFault | None = None
    fault_after: int = 0
    """Tokens of the answer that are sent before the fault."""
    rejection: str = "The scripted engine rejects this request."
    retryable: bool = False
    """Whether the rejection says that another replica may take the request."""


ECHO = ScriptedAnswer()
"""Repeats the prompt until `max_tokens`."""


class EngineScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Script of an engine: answers in order; the last one repeats, unless `again` repeats them all."""

    answers: list[ScriptedAnswer] = msgspec.field(default_factory=lambda: [ECHO])
    again: bool = False
    """Whether the first answer follows the last one."""
    step_s: float = 0.0
    """Pause between two steps."""
    load_s: float = 0.0
    """Pause before the engine listens, as if it loaded a model."""

    def answer(self, number: int) -> ScriptedAnswer:
        """Returns the answer to the request with this number, counted from 0."""
        return self.answers[number % len(self.answers) if self.again else min(number, len(self.answers) - 1)]


SCRIPTED_CARD = ModelCard(
    name="scripted",
    context_tokens=4096,
    vocab_size=32_000,
    eos_token_ids=(2,),
    max_sequences=128,
    kv_capacity_tokens=65_536,
    max_choices=8,
    dtype="none",
    device="none",
)


class ChoiceRun:
    """Progress of one choice of one request."""

    def __init__(self, request: EngineRequest, index: int, answer: ScriptedAnswer) -> None:
        self.request = request
        self.index = index
        self.answer = answer
        self._sent = len(request.previous_outputs[index])
        self._scored = index != min(request.previous_outputs)
        """Whether nothing is to be said of the prompt, which the first choice scores."""
        self._waited = 0

    @property
    def fault(self) -> AnswerFault | None:
        """Returns the fault that is due before the next token."""
        return self.answer.fault if self._sent >= self.answer.fault_after else None

    def step(self) -> TokenDelta | None:
        """Returns the next delta; None while the answer waits."""
        if self._waited < self.answer.wait_steps:
            self._waited += 1
            return None
        sampling = self.request.sampling
        script = self.answer.tokens
        end = sampling.max_tokens if script is None else min(len(script), sampling.max_tokens)
        upto = min(end, self._sent + self.answer.tokens_per_step)
        if self.answer.fault is not None:
            upto = min(upto, max(self.answer.fault_after, self._sent + 1))
        positions = range(self._sent, upto)
        prompt = self.request.prompt
        tokens = [prompt[i % len(prompt)] for i in positions] if script is None else [script[i] for i in positions]
        finish = None
        if upto >= end:
            cut = script is None or len(script) > sampling.max_tokens
            finish = FinishReason.LENGTH if cut else FinishReason.STOP
        cached_tokens = self.answer.cached_tokens if self._sent == 0 else 0
        self._sent = upto
        logprobs = None
        if sampling.top_logprobs is not None:
            logprobs = [_logprobs(token, sampling.top_logprobs) for token in tokens]
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and not self._scored and len(prompt) > 1:
            prompt_logprobs = _prompt_logprobs(prompt, sampling.prompt_logprobs)
        self._scored = True
        return TokenDelta(
            self.index, tokens, finish, logprobs, cached_tokens=cached_tokens, prompt_logprobs=prompt_logprobs
        )


def _logprobs(token: int, top: int) -> TokenLogprobs:
    """Makes log probabilities: -0.5 for the chosen token first, and less for each neighbour."""
    return TokenLogprobs(-0.5, [(token + rank, -0.5 - rank) for rank in range(top)])


def _prompt_logprobs(prompt: list[int], top: int) -> PromptLogprobs:
    """Makes log-probabilities of a prompt: like those of an answer, with each token the most probable one."""
    scores = [_logprobs(token, top) for token in prompt[1:]]
    others = [pair for score in scores for pair in score.top]
    return PromptLogprobs(
        start=1,
        top=top,
        logprobs=struct.pack(f"<{len(scores)}f", *(score.logprob for score in scores)),
        ranks=struct.pack(f"<{len(scores)}i", *(1 for _ in scores)),
        top_tokens=struct.pack(f"<{len(others)}i", *(token for token, _ in others)),
        top_logprobs=struct.pack(f"<{len(others)}f", *(logprob for _, logprob in others)),
    )

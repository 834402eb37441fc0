"""What a request is, once it has been read, checked and tokenised; and what comes back for it.

A `Request` is the same thing to every stage from admission to the engine. It holds tokens, not text: the API worker
tokenises on the way in and detokenises on the way out, so the engine and the scheduler never see a string.
"""

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """The model ended its turn, or a stop string or stop token came up."""
    LENGTH = "length"
    """`max_tokens` or the context window was reached."""
    CANCELLED = "cancelled"
    """The caller left; nobody reads this answer any more."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How the next token is chosen.

    Sampling is counter-based: the random number for a token depends on `seed`, the choice's index and the token's
    position alone, so the same request gives the same answer whatever else is in the batch.
    """

    max_tokens: int
    """Most output tokens per choice (at least 1)."""
    seed: int
    """64-bit; drawn by the gateway when the caller names none."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one; 0 drops none."""
    repetition_penalty: float = 1.0
    """Divide (or multiply, when negative) the logits of tokens in prompt or output; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for every time it is in the output."""
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    """Token id -> added to its logit."""
    top_logprobs: int | None = None
    """None: no log-probabilities. k: of the chosen token and of the k most probable ones."""
    min_tokens: int = 0
    """End-of-turn and stop tokens cannot be chosen before this many output tokens."""
    ignore_eos: bool = False
    """Go on after the model ends its turn (for measurements)."""
    stop_token_ids: tuple[int, ...] = ()
    """Further token ids that end the answer, beside the model's own."""
    n: int = 1
    """Choices to generate from the one prompt."""


class Request(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One admitted request, as the scheduler and the engine see it."""

    id: str
    prompt: list[int]
    """Token ids, at least one."""
    sampling: SamplingParams
    cache_scope: str = ""
    """Prefix-cache blocks are shared only within a scope. Derived by the gateway, never taken from the client."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position."""

    logprob: float
    """Of the chosen token, from the model's own distribution (before temperature and filters)."""
    top: list[tuple[int, float]]
    """The most probable (token id, log-probability) pairs, best first."""


class Delta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one engine step added to one choice of one request.

    A choice is a series of deltas; exactly the last has `finish`. The deltas of a request are in order of time, those
    of its choices interleaved.
    """

    index: int
    """Which of the request's `n` choices."""
    tokens: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One per token, if asked for."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache; on a choice's first delta."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request, as they are billed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

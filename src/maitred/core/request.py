"""Engine requests, tokenised and checked, and the deltas of their answers.

Every stage from admission to the engine uses the same `EngineRequest`. It holds tokens instead of text: the API worker
tokenises the request and detokenises the answer, so the engine and the scheduler never see a string.
"""

from enum import StrEnum
from typing import Any

import msgspec

from maitred.core.flow import ONE_FLOW, Flow
from maitred.core.grammar import Grammar


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """The model ended its turn, or the output reached a stop string or a stop token."""
    LENGTH = "length"
    """The output reached `max_tokens` or the end of the context window."""
    CANCELLED = "cancelled"
    """The caller closed the connection, so the answer has no reader."""
    TOOL_CALLS = "tool_calls"
    """The model asks the caller to run tools and then to continue."""
    CONTENT_FILTER = "content_filter"
    """The provider of the model blocked the rest of the answer."""
    PAUSE = "pause_turn"
    """The provider interrupted a long turn; it goes on when the conversation is sent back."""
    DEADLINE = "deadline"
    """The caller's deadline has passed. The output so far is a partial answer."""


class WaitCause(StrEnum):
    """Why a request was not being computed."""

    TENANT_SHARE = "tenant_share"
    """Other tenants had a right to service first."""
    SLOTS = "slots"
    """The batch had no free slot for another sequence."""
    KV_FULL = "kv_full"
    """The KV cache had no room, at the start or after a preemption."""
    PREFILL_BUDGET = "prefill_budget"
    """The steps were full: the prompts of other requests were computed first."""
    COLD_START = "cold_start"
    """No replica was ready for the request."""
    BATCHING_WINDOW = "batching_window"
    """The request was delayed briefly so that others could join its batch."""
    GRAMMAR = "grammar"
    """The grammar of the answer was being compiled."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Sampling parameters that choose the next token.

    Sampling is counter-based: the random number for a token depends on `seed`, the choice's index and the token's
    position alone, so the same request gives the same answer whatever else is in the batch.
    """

    max_tokens: int
    """Maximum number of output tokens per choice; 0: the prompt is only computed, for its log-probabilities."""
    seed: int
    """Seed of 64 bits; the gateway draws it if the caller gives none."""
    temperature: float = 1.0
    """Temperature of the sampling; 0 means greedy."""
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
    """Token id -> value that is added to its logit."""
    top_logprobs: int | None = None
    """Number of top log-probabilities; None: no log-probabilities. k: log-probabilities of the chosen token and of the
    k most probable tokens."""
    min_tokens: int = 0
    """End-of-turn and stop tokens cannot be chosen before this many output tokens."""
    ignore_eos: bool = False
    """Continue after the model ends its turn (for measurements)."""
    stop_token_ids: tuple[int, ...] = ()
    """Further token ids that end the answer, beside the model's own."""
    n: int = 1
    """Number of choices to generate from the prompt."""
    grammar: Grammar | None = None
    """Grammar that every choice must match; None: no grammar."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only token ids that can be chosen; empty: all."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output cannot have: the last token of one cannot follow the others."""
    prompt_logprobs: int | None = None
    """Number of top log-probabilities of each prompt token; None: no log-probabilities of the prompt. They are computed
    once for all choices, and sent with the first one that runs."""

    @property
    def restricts_tokens(self) -> bool:
        """Whether some tokens can never be chosen, or not behind others."""
        return bool(self.allowed_token_ids or self.bad_words_token_ids)


class PinRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to keep the KV blocks of a prompt in the cache after its answer."""

    name: str
    """Name of the pin in its cache scope; a new pin with this name replaces it."""
    ttl_s: float
    """Lifetime in seconds from the end of the prefill."""


class SimilarSearch(msgspec.Struct, frozen=True, array_like=True, tag="search"):
    """Search for cached questions that are similar to the text of a request to an encoder."""

    question: str
    """The text, whose words are compared."""
    partition: bytes
    """Digest of all that must be equal: questions of different partitions never meet."""
    scope: str
    """Name of the verifier that judges the pairs."""
    count: int
    """Most results."""
    least_cosine: float
    """Cosine that each result has at least."""


class LabelledPair(msgspec.Struct, frozen=True, array_like=True):
    """Two questions of which it is known whether their answers are the same."""

    asked: str
    cached: str
    same: bool
    surroundings: tuple[float, float, float]
    """Surroundings of the pair, as in `SimilarQuestion`."""
    regions: list[str] | None = None
    """Regions where the questions may be read, empty for a region without a name; None: everywhere."""


class VerifierTraining(msgspec.Struct, frozen=True, array_like=True, tag="training"):
    """Training of a verifier by an encoder, from labelled pairs of questions; it runs while no text waits."""

    labels: list[LabelledPair]


class SimilarQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Cached question that a search has found."""

    key: bytes
    """Key of its answer."""
    question: str
    cosine: float
    score: float | None
    """Log-odds that both questions have the same answer; None: the scope has no verifier."""
    surroundings: tuple[float, float, float]
    """Place of the pair among the cached questions: how densely they lie around each of the two, and how far the pair
    is behind the nearest one."""


class SimilarQuestions(msgspec.Struct, frozen=True, array_like=True):
    """Result of a search for similar questions, the nearest first."""

    found: list[SimilarQuestion]
    verifier: str = ""
    """Version of the verifier that has judged them; empty: the scope has none."""


class EngineRequest(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One admitted request, as the scheduler and the engine see it."""

    id: str
    prompt: list[int]
    """Token ids of the prompt, at least one."""
    sampling: SamplingParams
    cache_scope: str = ""
    """Prefix-cache blocks are shared only within a scope. Derived by the gateway, never taken from the client."""
    flow: Flow = ONE_FLOW
    """Flow whose share of the batch is used, with the priority class."""
    deadline_in_s: float | None = None
    """Deadline in seconds after the submission; None: no deadline."""
    itl_objective_s: float | None = None
    """Objective for the seconds between two tokens; None: the engine's own objective."""
    expected_tokens: int | None = None
    """Predicted output tokens of each choice, at most `max_tokens`; None: unknown."""
    partial: bool = True
    """Whether a partial answer at the deadline is useful; otherwise its tokens count as wasted."""
    resumes: dict[int, list[int]] | None = None
    """Partial output of another replica to resume: each unfinished choice -> its output tokens. Only these choices run,
    and only new tokens are sent; sampling, limits and bills count the resumed tokens as output. None: all choices start
    from the beginning."""
    pin: PinRequest | None = None
    """Pin that keeps the whole KV blocks of the prompt in the cache."""
    known_as: str = ""
    """Request id of the client, for the log; a client may use the same id again."""
    trace_id: str = ""
    """Trace id of the request; empty: the request is not traced."""
    similar: SimilarSearch | VerifierTraining | None = None
    """Task of an encoder beside computing the vector of the prompt; None: nothing. A training needs no prompt."""

    @property
    def previous_outputs(self) -> dict[int, list[int]]:
        """Returns the choices that run, each with its existing output tokens."""
        if self.resumes is not None:
            return self.resumes
        return {0: []} if self.sampling.n == 1 else {index: [] for index in range(self.sampling.n)}


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position."""

    logprob: float
    """Log-probability of the chosen token in the model's distribution, before temperature and filters."""
    top: list[tuple[int, float]]
    """The most probable (token id, log-probability) pairs, best first."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of consecutive prompt tokens, as arrays of little-endian numbers of four bytes.

    A step has hundreds of prompt tokens, each with up to `top` others, so they are not sent as single numbers. The
    first token of a prompt has no log-probability, because nothing stands before it.
    """

    start: int
    """Position in the prompt of the first of these tokens, at least 1."""
    top: int
    """Number of the most probable tokens at each position."""
    logprobs: bytes
    """fp32 ``[positions]``: log-probability of the prompt's token in the model's distribution."""
    ranks: bytes
    """int32 ``[positions]``: 1 for the most probable token."""
    top_tokens: bytes
    """int32 ``[positions, top]``: ids of the most probable tokens, best first."""
    top_logprobs: bytes
    """fp32 ``[positions, top]``"""

    @property
    def count(self) -> int:
        """The number of positions."""
        return len(self.logprobs) // 4


class SequenceStats(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of one choice in its engine; times are seconds of the engine's clock."""

    waited_s: float = 0.0
    """Seconds from the arrival at the engine to the start of the prefill."""
    prefill_s: float = 0.0
    """Seconds from the start of the prefill to the first token."""
    prefill_steps: int = 0
    """Number of steps of the prefill."""
    prefill_batch: int = 0
    """Number of sequences in the step of the first token."""
    decode_s: float = 0.0
    """Seconds from the first token to the last; the next two fields cover the same time."""
    decode_steps: int = 0
    """Number of engine steps, with or without this choice."""
    decode_batch: float = 0.0
    """Average number of sequences in these steps."""
    preemptions: int = 0
    """Times that it had to give its place to others, before its first token or after..."""
    displaced_s: float = 0.0
    """...how long it was away..."""
    recomputed_tokens: int = 0
    """...and what had to be computed again for it."""


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Tokens that one engine step added to one choice of one request.

    A choice is a series of deltas; exactly the last has `finish`. The deltas of a request are in time order, and its
    choices are interleaved.
    """

    index: int
    """Index of the choice among the request's `n` choices."""
    tokens: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities, one per token, if requested."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; set on the first delta of a choice."""
    waited_ms: dict[str, float] | None = None
    """Waiting time in the engine in milliseconds by cause (see `WaitCause`); on the first delta only."""
    begun: bool = True
    """Whether the prefill started; False on the only delta of a choice that cost nothing."""
    embedding: bytes | None = None
    """Embedding from an encoder instead of tokens: concatenated little-endian fp32 numbers."""
    stats: SequenceStats | None = None
    """Statistics of the choice: up to the first token on its first delta, complete on its last delta."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the next prompt tokens, if requested, in deltas of their own before the first token."""
    similar: SimilarQuestions | None = None
    """Result of the search that an encoder was asked for."""
    verifier: bytes | None = None
    """Weights of the verifier that an encoder was asked to train; empty: its labels are too few, or all the same."""


MOST_TOKENS = 1 << 31
"""Upper bound of the token count that an external server may report for a prompt or an answer. Every real context is
over a hundred times shorter: a larger count is an error, and it would block the limits for ages."""


class Usage(msgspec.Struct, frozen=True):
    """Usage of one request in tokens, as it is billed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    estimated: bool = False
    """Whether the token counts are estimates."""
    reasoning_tokens: int = 0
    """Reasoning tokens before the answer, a part of the completion tokens."""
    cache_write_tokens: int = 0
    """Prompt tokens that the server wrote into its prefix cache, a part of the prompt tokens."""
    cache_write_1h_tokens: int = 0
    """Written prompt tokens that the server keeps for an hour, which some providers price higher."""
    details: dict[str, Any] | None = None
    """Whatever else an external server counted, under its own names; None: nothing."""
    units_nusd: int = 0
    """Cost in nano-dollars of what is not counted in tokens: images, characters, seconds of sound."""
    units: str = ""
    """Description of those units, for readers of the ledger: ``2 images at 0.04 USD``."""

    @property
    def total_tokens(self) -> int:
        """Returns the prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens

    def split(self, parts: int) -> tuple["Usage", "Usage"]:
        """Returns an equal share for each part but one, in whole tokens, and the rest, which is for that one.

        Prompt tokens of each price are divided by themselves, so that a share is priced as the whole is.
        """
        fresh_tokens = self.prompt_tokens - self.cached_tokens - self.cache_write_tokens
        write_tokens = self.cache_write_tokens - self.cache_write_1h_tokens
        if fresh_tokens < 0 or write_tokens < 0:
            return Usage(0, 0), self  # a server has counted some tokens twice
        cached_tokens, write_1h_tokens = self.cached_tokens // parts, self.cache_write_1h_tokens // parts
        write_tokens = write_tokens // parts + write_1h_tokens
        share = Usage(
            fresh_tokens // parts + cached_tokens + write_tokens,
            self.completion_tokens // parts,
            cached_tokens,
            self.estimated,
            reasoning_tokens=self.reasoning_tokens // parts,
            cache_write_tokens=write_tokens,
            cache_write_1h_tokens=write_1h_tokens,
        )
        others = parts - 1
        rest = msgspec.structs.replace(
            self,
            prompt_tokens=self.prompt_tokens - others * share.prompt_tokens,
            completion_tokens=self.completion_tokens - others * share.completion_tokens,
            cached_tokens=self.cached_tokens - others * share.cached_tokens,
            reasoning_tokens=self.reasoning_tokens - others * share.reasoning_tokens,
            cache_write_tokens=self.cache_write_tokens - others * share.cache_write_tokens,
            cache_write_1h_tokens=self.cache_write_1h_tokens - others * share.cache_write_1h_tokens,
        )
        return share, rest

    def __add__(self, other: "Usage") -> "Usage":
        """Returns the usage of both together; details stay those of the first one that has some."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.estimated or other.estimated,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
            cache_write_1h_tokens=self.cache_write_1h_tokens + other.cache_write_1h_tokens,
            details=self.details or other.details,
            units_nusd=self.units_nusd + other.units_nusd,
            units=self.units or other.units,
        )


class ModelFingerprint(msgspec.Struct, frozen=True, array_like=True):
    """Short hashes of a model's parts; empty for a part that is absent or unknown."""

    shape: str = ""
    """Hash of the ``config.json`` settings that affect the computation."""
    tokenizer: str = ""
    weights: str = ""
    content: str = ""
    """Hash of every byte of the weights, or of the times of their files where reading them all takes too long. Equal
    files can have different ones, so only answers that are kept depend on it."""

    def differs_in(self, other: "ModelFingerprint") -> list[str]:
        """Returns the names of the parts that are known for both and differ."""
        return [
            name
            for name, mine, theirs in (
                ("config.json", self.shape, other.shape),
                ("tokenizer.json", self.tokenizer, other.tokenizer),
                ("weights", self.weights, other.weights),
            )
            if mine and theirs and mine != theirs
        ]

    def completed_by(self, other: "ModelFingerprint") -> "ModelFingerprint":
        """Returns the fingerprint with its unknown parts filled in from the other one."""
        return ModelFingerprint(
            self.shape or other.shape,
            self.tokenizer or other.tokenizer,
            self.weights or other.weights,
            self.content or other.content,
        )

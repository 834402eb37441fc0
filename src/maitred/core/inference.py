"""Inference request and the deltas of its answer, independent of any API format.

Each API converts its own request to an `InferenceRequest` and converts `TextDelta` objects to its own chunks. The
layers in between do not know which API was called.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from maitred.core.errors import MaitredError
from maitred.core.grammar import Constraint
from maitred.core.request import FinishReason, SamplingParams
from maitred.core.tools import ToolRules


class Conversation(msgspec.Struct, frozen=True):
    """Conversation that the model's chat template must still render."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    """Whether the rendered prompt ends with the start of the assistant's turn."""
    tools: list[dict[str, Any]] = []
    """Tool declarations for the model, in the format of OpenAI's API."""
    template_arguments: dict[str, Any] = {}
    """Additional arguments of the chat template."""
    continue_final_message: bool = False
    """Whether the rendered prompt ends within the last message, which the model continues."""
    chat_template: str | None = None
    """Chat template of the request; None: that of the model."""


Prompt = str | list[int] | Conversation
"""Prompt as text, as token ids, or as a conversation."""
TruncationSide = Literal["left", "right"]
"""Side of a prompt on which tokens are dropped."""
TOKEN_ID_PREFIX = "token_id:"
"""Begin of the name of a token that is shown by its id."""


class AnswerPrefix(msgspec.Struct, frozen=True):
    """Beginning of an answer that its caller already has, and that another model continues."""

    text: str
    tokens: int
    """Output tokens of the text."""
    estimated: bool
    """Whether the tokens are estimated."""
    thought: str = ""
    """Reasoning before the text; without a text, the answer broke off within it."""


NativeApi = Literal["messages", "responses"]
"""API in which servers get a request as its client wrote it: Anthropic's Messages, or OpenAI's Responses."""


class NativeRequest(msgspec.Struct, frozen=True):
    """A request as its client wrote it, for servers that speak the client's API: nothing of it is lost on a detour."""

    api: NativeApi
    """The API of the client."""
    fields: Mapping[str, Any]
    """The body of the request."""
    headers: Mapping[str, str] = {}
    """Headers of the request that say something to such a server."""
    beyond_chat: MaitredError | None = None
    """The error for models that are asked by other APIs, which cannot say all of the request; None: they can."""


class CacheControl(msgspec.Struct, frozen=True):
    """Wishes of a caller about answers from a cache; the defaults leave it to the operator."""

    no_cache: bool = False
    """Whether the answer must be computed for this request."""
    no_store: bool = False
    """Whether the answer must not be kept."""
    only_if_cached: bool = False
    """Whether the request is refused if its answer is not kept."""
    ttl_s: float | None = None
    """Longest time in seconds for which the answer is kept; None: the operator's."""
    max_age_s: float | None = None
    """Largest age in seconds of an answer from a cache; None: any age."""
    namespace: str = ""
    """Name of a part of the cache that no request with another name shares."""


DEFAULT_CACHE_CONTROL = CacheControl()
"""Cache control of a request that says nothing."""


class InferenceRequest(msgspec.Struct, frozen=True):
    """One request that is parsed and checked but not tokenised."""

    model: str
    prompts: Sequence[Prompt]
    """Prompts of the request, at least one. Choice `i` of prompt `p` has index `p * sampling.n + i` in the answer."""
    sampling: SamplingParams
    """Sampling parameters; the next two fields hold the caller's `max_tokens` and `seed`."""
    max_tokens: int | None = None
    """Output tokens of each choice; None: as many as the context window leaves."""
    seed: int | None = None
    """Seed of the sampling; None: draw one for each prompt."""
    unset_fields: frozenset[str] = frozenset()
    """Fields of `sampling` that the caller left out; the model's own defaults may fill them."""
    stops: tuple[str, ...] = ()
    """Strings that end a choice; they are not part of the answer."""
    stops_in_reasoning: bool = False
    """Whether a stop string within the reasoning of a choice ends it, too."""
    include_stop_str_in_output: bool = False
    """Whether the stop string, or the text of the stop token, that ends a choice is part of it."""
    skip_special_tokens: bool = True
    """Whether special tokens give no text."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only token ids that choices can have; empty: all."""
    bad_words: tuple[str, ...] = ()
    """Words that no choice can have."""
    return_token_ids: bool = False
    """Whether the caller receives the token ids of prompts and choices."""
    return_tokens_as_token_ids: bool = False
    """Whether log-probabilities name their tokens by ids."""
    truncate_prompt_tokens: int | None = None
    """Most tokens of a prompt, to which a longer one is cut; -1: as many as the window has beside the answer; None:
    nothing is cut."""
    truncation_side: TruncationSide = "left"
    echo: bool = False
    """Whether every choice begins with its prompt."""
    priority: int | None = None
    """Priority from 1 to 10 that the caller asks for; None: not stated."""
    ttft_in_s: float | None = None
    """Seconds from the request's arrival to the latest first token; None: not stated."""
    itl_objective_s: float | None = None
    """Objective for the time between two tokens, in seconds; None: not stated."""
    deadline_in_s: float | None = None
    """Seconds from the request's arrival to the end of the answer; None: not stated."""
    partial: bool = False
    """Whether a partial answer at the deadline is accepted; otherwise the request fails."""
    retries: int = 0
    """How often the caller has sent this request before, according to the caller."""
    most_retries: int | None = None
    """Most retries at other servers after a failure; None: as many as the configuration allows."""
    escalate: bool | None = None
    """Whether a larger model may answer after a failed check, at the caller's cost; None: not stated."""
    scored: bool = False
    """Whether maitred needs log-probabilities that the caller did not ask for."""
    degradable: bool = True
    """Whether the caller prefers a shorter answer or a smaller model to a refusal."""
    cache: CacheControl = DEFAULT_CACHE_CONTROL
    """What the caller says about answers from a cache."""
    session: str | None = None
    """The caller's name for the session of the request; None: no session."""
    user: str | None = None
    """The caller's name for its end user; None: not stated."""
    local_only: bool = False
    """Whether no part of the request may be sent to an external provider."""
    regions: frozenset[str] | None = None
    """Allowed regions; None: every region that the caller's tenants allow."""
    max_usd: float | None = None
    """Maximum cost in US dollars; None: only the limits apply."""
    whole: bool = False
    """Whether the caller receives the answer only when it is complete."""
    prefix: AnswerPrefix | None = None
    """Beginning of the answer, after which the model goes on; None: a new answer."""
    max_tokens_param: str = "max_tokens"
    """What this API calls the limit, and..."""
    prompt_param: str = "prompt"
    """...the prompt, for messages about them."""
    needs: tuple[str, ...] = ()
    """Fields such as ``tools`` or ``response_format`` that only some replicas support."""
    left_out: tuple[str, ...] = ()
    """Fields that no model gets, because the API of the request has them and the others do not; only a replica that
    speaks that API does."""
    hints: tuple[str, ...] = ()
    """Fields that our own engines leave out, because the answer is the same without them."""
    tools: Callable[[], ToolRules | None] | None = None
    """Parses the tools, or raises `InvalidRequest` if they are unsupported; None: no tools."""
    to_openai: Callable[[], Mapping[str, Any]] | None = None
    """The whole request in OpenAI's format, without omitted fields, for replicas with that API. None: the API of the
    request has no such format."""
    native: NativeRequest | None = None
    """The request for replicas that speak the API of the client, if this is not chat completions; None: there is no
    such API or no such replica."""
    constraint: Callable[[], Constraint | None] | None = None
    """Parses the constraint on the answer for our own engine. None: no constraint; external servers apply their own
    rules to the request. The call raises `InvalidRequest` if the constraint is malformed."""


class TokenLogprob(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A token as text with its log-probability."""

    text: str
    """Text of the token, or its id, as ``token_id:17``."""
    raw: bytes
    """Exact bytes of the token, because `text` cannot hold half a character."""
    logprob: float | None
    """None: the server gave none, as for the first token of an echoed prompt."""
    members: dict[str, Any] | None = None
    """Other members that an external server has for the token."""


class TokenScore(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The chosen token at one position, and the most probable ones there, best first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]
    offset: int
    """Number of characters of the choice's text before this token."""


class PromptLogprob(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Log-probability of one token at a position of the prompt, as vLLM's API has it."""

    logprob: float
    rank: int
    """1 for the most probable token at the position."""
    decoded_token: str
    """Text of the token."""


PromptEntries = list[dict[int, PromptLogprob] | None]
"""At each position of a prompt, its own token and the most probable ones, by their ids; None at the first position."""


class PromptScores(msgspec.Struct):
    """Log-probabilities of the tokens of a prompt, which all its choices share.

    The first token has none, because nothing stands before it.
    """

    echoed: list[TokenScore] | None = None
    """Scores of the prompt's tokens as those of the beginning of the answer, if the answer begins with the prompt."""
    logprobs: PromptEntries | None = None
    """Log-probabilities as vLLM's API has them, if they were requested."""


class ChunkMetadata(msgspec.Struct, frozen=True):
    """Members around a delta that an external server sent and the gateway does not decide, in the server's words."""

    chunk: dict[str, Any] = {}
    """Members of the whole chunk, such as ``system_fingerprint`` and ``citations``."""
    choice: dict[str, Any] = {}
    """Members of the choice, such as ``content_filter_results``."""


class TextDelta(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Text added to one choice since its last delta; exactly the last delta of a choice has `finish`."""

    index: int
    text: str
    finish: FinishReason | None = None
    """Finish reason; with `FinishReason.DEADLINE` the answer is partial."""
    scores: list[TokenScore] | None = None
    """Scores of the tokens, if requested. Text can lag behind: it waits for whole characters and possible stop
    strings."""
    extra: dict[str, Any] | None = None
    """Further members of a message's delta as OpenAI's API has them: ``tool_calls``, ``refusal``, and any other that
    the server sent. Those of reasoning and refusals are texts, and pieces of calls have the number of the call."""
    stop: str | int | None = None
    """The stop string, or the stop token by its id, that ended the choice, on its last delta only."""
    continued: bool = False
    """Whether another server continues the answer here, from its text instead of its tokens."""
    metadata: ChunkMetadata | None = None
    """Metadata of this delta and the later ones of its choice; None: that of the delta before."""
    token_ids: list[int] | None = None
    """Token ids since the last delta, if requested. Text can lag behind them."""
    block: dict[str, Any] | None = None
    """Event of the client's own API that says what chat completions have no place for. Of the Messages API: the start,
    an addition or the end of a content block, whose `index` does not count. Of the Responses API: any event, without
    the text that the delta has; later texts without an event have the same place."""
    prompt_scores: PromptScores | None = None
    """Log-probabilities of the prompt, on the first delta of a choice, if requested."""

    @property
    def plain(self) -> bool:
        """Whether the delta contains only new text, like most deltas."""
        bare = self.finish is None and self.scores is None and self.extra is None and self.metadata is None
        bare = bare and self.block is None and self.token_ids is None and self.prompt_scores is None
        return bare and not self.continued and bool(self.text)

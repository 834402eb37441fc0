"""Request for inference and the deltas of its answer, free of any API's shape.

An API turns its own request into an `InferenceRequest` and maps `TextDelta` objects back to its own chunks. Whatever
stands in between never learns which API was called.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from maitred.core.grammar import Constraint
from maitred.core.request import FinishReason, SamplingParams
from maitred.core.tools import ToolRules


class Conversation(msgspec.Struct, frozen=True):
    """A prompt that the model's chat template has yet to render."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    """End with the opening of the assistant's turn."""
    tools: list[dict[str, Any]] = []
    """What the model is told of tools, in the words of OpenAI's API."""
    template_arguments: dict[str, Any] = {}
    """What the template is told beside all that."""


Prompt = str | list[int] | Conversation
"""Text, token ids, or a conversation."""


class InferenceRequest(msgspec.Struct, frozen=True):
    """One request, read and checked, not yet tokenised."""

    model: str
    prompts: Sequence[Prompt]
    """At least one. Choice `i` of prompt `p` has index `p * sampling.n + i` in the answer."""
    sampling: SamplingParams
    """With `max_tokens` and `seed` still to be settled: the next two fields say what the caller wants."""
    max_tokens: int | None = None
    """None: as many as the context window leaves."""
    seed: int | None = None
    """None: draw one for each prompt."""
    unset_fields: frozenset[str] = frozenset()
    """Fields of `sampling` that the caller does not name, so that the model may have defaults of its own."""
    stops: tuple[str, ...] = ()
    """Strings that end a choice; they are not part of the answer."""
    echo: bool = False
    """Begin every choice with its prompt."""
    priority: int | None = None
    """From 1 to 10, as the caller asks for it; None: it does not say."""
    ttft_in_s: float | None = None
    """Seconds from the request's arrival within which its first token must come; None: it does not say."""
    itl_objective_s: float | None = None
    """The time between two tokens that its reader should not see exceeded; None: it does not say."""
    deadline_in_s: float | None = None
    """Seconds from the request's arrival within which the whole answer must be there; None: it does not say."""
    partial: bool = False
    """Whether what is there at the deadline is welcome; otherwise an answer that is not whole by then has failed."""
    retries: int = 0
    """How often the caller has sent the same request before, as far as it says so."""
    escalate: bool | None = None
    """Whether an answer that fails a check may be asked of a larger model too, at the caller's expense; None: it does
    not say."""
    scored: bool = False
    """Whether log-probabilities are looked at here, though the caller has not asked for them."""
    degradable: bool = True
    """Whether the caller would rather have a shorter answer, or that of a smaller model, than be refused."""
    session: str | None = None
    """What the caller calls the session that it belongs to; None: none."""
    user: str | None = None
    """What it calls the user on whose behalf it asks; None: nothing."""
    local_only: bool = False
    """Whether nothing of it may leave for a provider."""
    regions: frozenset[str] | None = None
    """Where it may be computed; None: anywhere that its caller's tenants allow."""
    max_usd: float | None = None
    """What it may cost; None: what its limits allow."""
    whole: bool = False
    """Whether its caller sees nothing of the answer before all of it is there."""
    max_tokens_param: str = "max_tokens"
    """What this API calls the limit, and..."""
    prompt_param: str = "prompt"
    """...the prompt, for messages about them."""
    needs: tuple[str, ...] = ()
    """Fields that ask for more than text, such as ``tools`` or ``response_format``; only some replicas know them."""
    tools: Callable[[], ToolRules | None] | None = None
    """Reads the tools that it brings, and raises `InvalidRequest` if they cannot be had; None: its API has none."""
    to_openai: Callable[[], Mapping[str, Any]] | None = None
    """The whole request in the words of OpenAI's API, without what the caller left out: for replicas that are asked
    in these. None: its API cannot say it so."""
    constraint: Callable[[], Constraint | None] | None = None
    """What a model of our own has to hold its answer to, None: to nothing; others have their own rules for what was
    sent. Raises `InvalidRequest` if it is not said as it has to be."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and its log-probability, in text."""

    text: str
    raw: bytes
    """The token's exact bytes; `text` cannot show half a character."""
    logprob: float


class TokenScore(msgspec.Struct, frozen=True):
    """The chosen token at one position, and the most probable ones there, best first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]
    offset: int
    """Characters of the choice's text before this token."""


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """Text added to one choice since its last delta; exactly the last delta of a choice has `finish`."""

    index: int
    text: str
    finish: FinishReason | None = None
    """With `FinishReason.DEADLINE` the answer is a part of one."""
    scores: list[TokenScore] | None = None
    """One per token, if asked for. Text can lag behind: it waits for whole characters and possible stop strings."""
    extra: dict[str, Any] | None = None
    """Further members of a message's delta as OpenAI's API has them: ``tool_calls``, ``refusal``..."""
    stop: str | None = None
    """The stop string that ended the choice; on its last part, if one did."""
    continued: bool = False
    """Whether another server begins here to go on with what one has left off: it has read the text, not the tokens."""

    @property
    def plain(self) -> bool:
        """Whether it is new text and nothing else, as most of an answer is."""
        bare = self.finish is None and self.scores is None and self.extra is None and not self.continued
        return bare and bool(self.text)

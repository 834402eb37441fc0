"""Request as admission sees it."""

import msgspec

from maitred.core.context import RequestContext
from maitred.core.request import Usage
from maitred.core.tenancy import Principal


class AdmissionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that wants to run: everything read, tokenised and checked against the model's window.

    Attributes:
        principal: Who asks.
        request_id: What the client is told; not unique.
        route: Path of the API that was called.
        model: Name of the model, as resolved.
        prompt_tokens: Of all prompts together.
        longest_prompt: Tokens of the longest one; None: there is only one.
        max_tokens: For each choice, as the caller named it; None: not at all.
        min_tokens: For each choice; with less the request is pointless.
        window_left: Most tokens for one choice that the model's window leaves, behind the shortest prompt.
        choices: Answers to all prompts together.
        max_tokens_param: What the API calls `max_tokens`, and...
        prompt_param: ...the prompt, for messages about them.
        context: What the stages see of the request. Admission writes down where the caller stands, and reads what was
            used when nobody says it.
    """

    principal: Principal
    request_id: str
    route: str
    model: str
    prompt_tokens: int
    window_left: int
    longest_prompt: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    choices: int = 1
    max_tokens_param: str = "max_tokens"
    prompt_param: str = "prompt"
    context: RequestContext | None = None

    @property
    def work_has_begun(self) -> bool:
        """Whether a replica is known to have begun to answer."""
        return self.context is not None and self.context.first_token_s is not None

    def usage_so_far(self) -> Usage:
        """Returns the usage so far, as far as it has been written down."""
        context = self.context
        if context is None:
            return Usage(self.prompt_tokens, 0)
        return Usage(self.prompt_tokens, context.completion_tokens, context.cached_tokens)

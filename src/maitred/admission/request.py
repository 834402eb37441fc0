"""Request in the form that admission needs."""

import msgspec
from msgspec.structs import replace

from maitred.core.context import RequestContext
from maitred.core.request import Usage
from maitred.core.tenancy import Principal


class AdmissionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed and tokenised request that fits the model's context window.

    Attributes:
        principal: Authenticated caller.
        request_id: Request id that the client receives; not unique.
        route: Path of the API that was called.
        model: Name of the model, as resolved.
        prompt_tokens: Number of tokens of all prompts together.
        longest_prompt: Number of tokens of the longest prompt; None: there is only one prompt.
        max_tokens: The caller's maximum for each choice; None: not given.
        min_tokens: Minimum output tokens of each choice; a smaller grant is useless.
        window_left: Maximum tokens for one choice that the context window leaves after the shortest prompt.
        choices: Number of choices of all prompts together.
        max_tokens_param: What the API calls `max_tokens`, and...
        prompt_param: ...the prompt, for messages about them.
        cache: Cache that has the answer, so that nothing is computed; see `UsageEvent.cache`. Empty: none.
        cached_tokens: Output tokens of the longest choice of that answer, or as many as it may still get.
        bill: Digest of the answer whose bill all its callers share, with `cache` those for whom it is not computed;
            empty: nobody shares it.
        is_counted: Whether an earlier model of the request was asked, so that the rates of requests have counted it.
        saved_tokens: Tokens of further prompts that a cache has, so that only `prompt_tokens` are computed.
        units_nusd: What it costs beside its tokens, at most; see `Usage.units_nusd`.
        context: Request context. Admission writes the rate limit status into it, and reads the usage from it if no
            usage is passed.
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
    cache: str = ""
    cached_tokens: int = 0
    saved_tokens: int = 0
    bill: bytes = b""
    is_counted: bool = False
    units_nusd: int = 0
    context: RequestContext | None = None

    @property
    def work_has_begun(self) -> bool:
        """Whether a replica is known to have begun to answer."""
        return self.context is not None and self.context.first_token_s is not None

    def usage_so_far(self) -> Usage:
        """Returns the usage that is recorded so far."""
        context = self.context
        if context is None:
            return Usage(self.prompt_tokens, 0)
        return replace(context.usage, prompt_tokens=self.prompt_tokens)

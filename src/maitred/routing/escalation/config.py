"""Settings of `escalation`, for names that select a model."""

from typing import Annotated

from msgspec import Meta, Struct

REFUSAL_OPENINGS = (
    "i can't help",
    "i cannot help",
    "i can't assist",
    "i cannot assist",
    "i can't provide",
    "i cannot provide",
    "i can't fulfill",
    "i cannot fulfill",
    "i can't comply",
    "i cannot comply",
    "i can't answer",
    "i cannot answer",
    "i'm unable to",
    "i am unable to",
    "i'm not able to",
    "i am not able to",
    "i must decline",
    "i won't be able to",
    "as an ai language model, i can",
    "as an ai, i can",
)
"""Openings of short refusals in English, which may follow an apology.

The list is a rule of thumb: it is not derived from labelled refusals, and other languages need lists of their own.
"""


class EscalationConfig(Struct, frozen=True, kw_only=True):
    """Settings of escalation: which answers the next larger model is also asked for.

    By default no answer is checked.
    """

    schema: Annotated[
        bool, Meta(description="Those that do not follow the JSON schema, or are not the JSON, that was asked for.")
    ] = False
    refusal: Annotated[
        bool,
        Meta(description="Those that are a refusal, as their server says or their beginning does (see `openings`)."),
    ] = False
    logprob: Annotated[
        Annotated[float, Meta(le=0)] | None,
        Meta(
            description="Those whose tokens have a lower mean log-probability, such as -1.0, where the server tells "
            "it; it is asked for unless `capabilities` of the model are without `logprobs`. Null: not looked at.",
        ),
    ] = None
    most: Annotated[int, Meta(description="Larger models that one request is put to, at most.", ge=1, le=3)] = 2
    unasked: Annotated[
        bool,
        Meta(
            description="Whether also for callers who do not say, of whole answers; else, and of streams always, only "
            "with `x-maitred-escalate: true`."
        ),
    ] = True
    openings: Annotated[
        tuple[str, ...],
        Meta(
            description="How an answer of up to 600 characters begins that is a refusal, whatever the case of its "
            "letters; an apology before it does not matter."
        ),
    ] = REFUSAL_OPENINGS

    @property
    def is_enabled(self) -> bool:
        """Whether any check is enabled.

        If none is enabled, there is no escalation, whatever the callers send.
        """
        return self.schema or self.refusal or self.logprob is not None

"""The `admission` section: token prices, the default length of answers, and lease times."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.admission.grammars.config import GrammarsConfig

_Usd = Annotated[float, Meta(ge=0, le=1_000_000, extra={"unit": "USD"})]


CachedAnswers = Literal["none", "requests", "all"]


class PriceConfig(Struct, frozen=True, kw_only=True):
    """Prices of one model: of a million tokens, and of images and sound."""

    prompt: Annotated[_Usd, Meta(description="A million tokens of prompts.")] = 0.0
    cached: Annotated[
        _Usd | None,
        Meta(
            description="A million tokens of prompts that were found in the prefix cache; null: as much as others.",
        ),
    ] = None
    cache_write: Annotated[
        _Usd | None,
        Meta(
            description="A million tokens of prompts that a server wrote into its prefix cache, where it counts them; "
            "null: as much as others. Anthropic charges 1.25 times `prompt`.",
        ),
    ] = None
    cache_write_1h: Annotated[
        _Usd | None,
        Meta(
            description="Of these, a million that it keeps for an hour; null: as much as `cache_write`. Anthropic "
            "charges twice `prompt`.",
        ),
    ] = None
    output: Annotated[_Usd, Meta(description="A million tokens of answers.")] = 0.0
    hit: Annotated[
        _Usd,
        Meta(
            description="A million tokens, of prompts and answers together, where the answer comes from a cache and is "
            "not computed."
        ),
    ] = 0.0
    images: Annotated[
        dict[str, _Usd],
        Meta(
            description="One image, by what was asked for: size (`1024x1024`), quality (`hd`), both (`1024x1024/hd`); "
            "`*` is for all others. Models that count tokens have token prices instead."
        ),
    ] = {}
    characters: Annotated[_Usd, Meta(description="A million characters that are spoken.")] = 0.0
    audio_minute: Annotated[_Usd, Meta(description="A minute of sound that is transcribed or translated.")] = 0.0


class AdmissionConfig(Struct, frozen=True, kw_only=True):
    """Settings of admission: prices of tokens, the default length of answers, and the life of leases."""

    default_output_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="`max_tokens` of requests that name none; null: as many as the model's window leaves. Set it "
            "where limits on tokens hold: they count what an answer may need, so an answer without a length counts as "
            "a whole window.",
            extra={"unit": "tokens"},
        ),
    ] = None
    least_output_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="When a budget has too little left for what a request asks, its `max_tokens` is lowered, but "
            "not below this: the request is refused instead.",
            extra={"unit": "tokens"},
        ),
    ] = 16
    lease_s: Annotated[
        float,
        Meta(
            ge=1,
            le=3600,
            description="What a request has reserved comes back so long after its gateway died, and what it ran in "
            "the background has failed.",
            extra={"unit": "seconds"},
        ),
    ] = 30.0
    cached_answers: Annotated[
        CachedAnswers,
        Meta(
            description="Which limits count a request whose answer comes from a cache. `requests`: those on requests, "
            "and budgets where it has a price (`hit`); `all`: those on tokens too, as if the answer were computed; "
            "`none`: not even budgets. Limits on the size of single requests always hold."
        ),
    ] = "requests"
    prices: Annotated[
        dict[str, PriceConfig],
        Meta(
            description="Prices by model; `*` is for models that are not named. Where tokens cost nothing, budgets "
            "count nothing."
        ),
    ] = {}
    grammars: GrammarsConfig = GrammarsConfig()

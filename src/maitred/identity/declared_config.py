"""The `tenants` section: organisations, their teams, their keys and the limits of each, kept in a file."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.core.secret import Secret

Count = Annotated[int, Meta(ge=1, le=1 << 52)] | None
Dollars = Annotated[float, Meta(ge=1e-9, le=9e6)] | None
"""Amount from one nano-dollar to nine million dollars. In nano-dollars it stays below 2^53, so it is exact in every
counter."""


class BurstConfig(Struct, frozen=True, kw_only=True):
    """Burst sizes of rates after a pause. If unset, the amount of one minute."""

    requests_per_minute: Annotated[Count, Meta(description="Requests that may come at once.")] = None
    tokens_per_minute: Annotated[
        Count, Meta(description="Tokens that may come at once, prompt and output together.")
    ] = None
    input_tokens_per_minute: Annotated[Count, Meta(description="Prompt tokens that may come at once.")] = None
    output_tokens_per_minute: Annotated[Count, Meta(description="Output tokens that may be asked for at once.")] = None


class SoftConfig(Struct, frozen=True, kw_only=True):
    """Budgets that only warn when they are passed."""

    usd_per_day: Annotated[Dollars, Meta(description="Dollars in a day, from midnight UTC.")] = None
    usd_per_week: Annotated[Dollars, Meta(description="Dollars in a week, from Monday, UTC.")] = None
    usd_per_month: Annotated[Dollars, Meta(description="Dollars in a calendar month, UTC.")] = None
    usd_total: Annotated[Dollars, Meta(description="Dollars from the beginning on.")] = None


class ModelLimitsConfig(Struct, frozen=True, kw_only=True):
    """Limits and budgets for requests. Each limit that applies must have room."""

    requests_per_minute: Annotated[Count, Meta(description="Requests in one minute.")] = None
    tokens_per_minute: Annotated[Count, Meta(description="Tokens in a minute, prompt and output together.")] = None
    input_tokens_per_minute: Annotated[Count, Meta(description="Prompt tokens in one minute.")] = None
    output_tokens_per_minute: Annotated[Count, Meta(description="Output tokens in one minute.")] = None
    concurrent_requests: Annotated[Count, Meta(description="Requests that run at one time.")] = None
    concurrent_tokens: Annotated[
        Count, Meta(description="Prompt tokens and reserved output of the requests that run at one time.")
    ] = None
    context_tokens: Annotated[Count, Meta(description="Prompt and output of one request.")] = None
    output_tokens: Annotated[Count, Meta(description="Output of one request, per choice.")] = None
    usd_per_day: Annotated[Dollars, Meta(description="Dollars in a day, from midnight UTC; no more is spent.")] = None
    usd_per_week: Annotated[Dollars, Meta(description="Dollars in a week, from Monday, UTC; no more is spent.")] = None
    usd_per_month: Annotated[Dollars, Meta(description="Dollars in a calendar month, UTC; no more is spent.")] = None
    usd_total: Annotated[Dollars, Meta(description="Dollars from the beginning on; no more is spent.")] = None
    burst: Annotated[BurstConfig, Meta(description="Of the limits per minute.")] = BurstConfig()
    soft: Annotated[SoftConfig, Meta(description="Each stands beside the hard one of its window.")] = SoftConfig()


class LimitsConfig(ModelLimitsConfig, frozen=True, kw_only=True):
    """Limits and budgets for all models together, and for single models in `models`."""

    models: Annotated[
        dict[str, ModelLimitsConfig], Meta(description="Name of a model: limits that count its requests only.")
    ] = {}


class KeyConfig(Struct, frozen=True, kw_only=True):
    """API key of a tenant. The key is created elsewhere and given by reference; only a hash is stored."""

    secret: Annotated[
        Secret | None, Meta(description="The whole key, `sk-mtd-…`. Null: the key is given by its `sha256`.")
    ] = None
    foreign: Annotated[
        bool,
        Meta(
            description="The key is one of another gateway: any text, which goes on working as it is. Only a key that "
            "was drawn at random is as safe as ours."
        ),
    ] = False
    sha256: Annotated[
        Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None,
        Meta(
            description="SHA-256 of a whole key of another gateway, in hexadecimal digits, in place of `secret`. "
            "LiteLLM keeps such digests of its virtual keys, so these go on working without being known."
        ),
    ] = None
    expires_at: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Time from which on it is refused, such as `2027-01-01T00:00:00Z`. Null: never."),
    ] = None
    scopes: Annotated[
        tuple[Literal["inference", "metrics", "admin"], ...], Meta(description="What it may be used for.")
    ] = ("inference",)
    cache_controls: Annotated[
        tuple[Literal["no-cache", "no-store", "ttl", "s-maxage", "namespace", "only-if-cached"], ...] | None,
        Meta(
            description="What its requests may say about answers from a cache; null: what the configuration allows, "
            "empty: nothing."
        ),
    ] = None
    limits: Annotated[LimitsConfig, Meta(description="What holds for this key.")] = LimitsConfig()


class TeamConfig(Struct, frozen=True, kw_only=True):
    """A team in an organisation."""

    name: Annotated[str, Meta(max_length=256, description="What people call it; empty: its id.")] = ""
    weight: Annotated[
        float,
        Meta(gt=0, le=1000, description="Share of service relative to its siblings when they compete."),
    ] = 1.0
    models: Annotated[
        tuple[str, ...] | None, Meta(description="Models that may be used; null: all that are open to what is above.")
    ] = None
    priority_ceiling: Annotated[
        Annotated[int, Meta(ge=1, le=10)] | None,
        Meta(description="Highest priority that its requests may ask for; null: as what is above."),
    ] = None
    regions: Annotated[
        tuple[str, ...], Meta(description="Where its requests may be served; empty: as what is above.")
    ] = ()
    tags: Annotated[
        tuple[str, ...], Meta(description="Privacy and other tags, such as `local-only`; added to those from above.")
    ] = ()
    disabled: Annotated[bool, Meta(description="Refuse its keys, and those of what is below.")] = False
    spent_usd: Annotated[
        float,
        Meta(
            ge=0,
            le=9_000_000,
            description="What its keys have spent before, at another gateway; that of an organisation includes its "
            "teams, and is their sum if it is 0. It becomes one line of the ledger, once, and counts in budgets, in "
            "their windows of that day. A later change has no effect.",
            extra={"unit": "US dollars"},
        ),
    ] = 0.0
    limits: Annotated[LimitsConfig, Meta(description="For all of its keys together.")] = LimitsConfig()
    keys: Annotated[dict[str, KeyConfig], Meta(description="One entry per key, under a name for people.")] = {}


class OrganisationConfig(TeamConfig, frozen=True, kw_only=True):
    """An organisation, under its id. Ids are unique and consist of lower-case letters, digits, `-` and `_`."""

    teams: Annotated[dict[str, TeamConfig], Meta(description="Its teams, each under an id of its own.")] = {}

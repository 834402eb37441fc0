"""The `routing` section, as far as it says which pools there are and which names lead to them."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Capability = Literal["tools", "json_schema", "vision", "logprobs", "embeddings"]


class PoolConfig(Struct, frozen=True, kw_only=True):
    """Replicas that are alike: the same model, in the same place, at the same price."""

    context_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Prompt and answer together. Null: no request is too long.", extra={"unit": "tokens"}),
    ] = None
    capabilities: Annotated[
        list[Capability] | None, Meta(description="What it can do. Null: all that is asked of it.")
    ] = None
    local: Annotated[
        bool, Meta(description="Whether what is sent there stays with you. Tenants and requests can demand it.")
    ] = True
    region: Annotated[
        str | None, Meta(description="Where it is, such as `eu`. Null: nowhere that a request could ask for.")
    ] = None
    prompt_usd_per_million: Annotated[
        float, Meta(ge=0, description="What a million prompt tokens cost you there.", extra={"unit": "dollars"})
    ] = 0.0
    output_usd_per_million: Annotated[
        float, Meta(ge=0, description="What a million output tokens cost you there.", extra={"unit": "dollars"})
    ] = 0.0


class TargetConfig(Struct, frozen=True, kw_only=True):
    """Where a name leads."""

    pool: Annotated[str, Meta(description="The pool.")]
    model: Annotated[
        str | None,
        Meta(
            description="The model's name there. A `*` in it stands for what the `*` of the name stood for. Null: the "
            "name as it is."
        ),
    ] = None


class FallbackConfig(Struct, frozen=True, kw_only=True):
    """Names that are tried, in this order, where a model cannot answer."""

    general: Annotated[list[str], Meta(description="After a failure before the first byte.")] = []
    context_length: Annotated[list[str], Meta(description="When prompt and answer do not fit.")] = []
    content_policy: Annotated[list[str], Meta(description="When a provider refuses the content.")] = []


class RoutesConfig(Struct, frozen=True, kw_only=True):
    """Which names lead where."""

    pools: Annotated[dict[str, PoolConfig], Meta(description="The pools by name.")] = {}
    models: Annotated[
        dict[str, list[TargetConfig]],
        Meta(
            description="A model's name, as requests have it -> where it leads, the first choice first. One `*` stands "
            "for anything, as in `openai/*`; of several such names the longest that fits counts."
        ),
    ] = {}
    aliases: Annotated[
        dict[str, str], Meta(description="Another name -> the name that it stands for, which may be an alias, too.")
    ] = {}
    fallbacks: Annotated[
        dict[str, FallbackConfig], Meta(description="A model's name (no alias, no `*`) -> what is tried after it.")
    ] = {}

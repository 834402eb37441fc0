"""Settings of `routing` that map names to models."""

from collections.abc import Callable, Set
from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.routing.auto.config import AutoModels
from maitred.routing.rollout.config import Rollouts

Capability = Literal["tools", "json_schema", "vision", "logprobs"]

Capabilities = Annotated[
    list[Capability] | None,
    Meta(
        description="What it can do; a request that needs more goes to its fallbacks. Null: all that is asked of it, "
        "until a server says otherwise."
    ),
]
Region = Annotated[str | None, Meta(description="Where it is, such as `eu`. Null: nowhere that could be asked for.")]


class PoolConfig(Struct, frozen=True, kw_only=True):
    """Settings of a pool of equal replicas: one entry of `models`, or our own engines."""

    capabilities: Capabilities = None
    local: bool = True
    region: Region = None
    current_regions: Callable[[], Set[str | None]] | None = None
    """Returns the regions where its replicas are now; None: all are in `region`."""

    def is_in(self, regions: Set[str]) -> bool:
        """Whether any of its replicas is in one of these regions."""
        if self.current_regions is None:
            return self.region in regions
        return not regions.isdisjoint(self.current_regions())


class TargetConfig(Struct, frozen=True, kw_only=True):
    """Settings of one target of a name."""

    pool: Annotated[str, Meta(description="An entry of `models`, or the name under which our own model is served.")]
    model: Annotated[
        str | None,
        Meta(
            description="What its servers call the model. A `*` in it stands for what the `*` of the name stood for. "
            "Null: as they are configured."
        ),
    ] = None


class FallbackConfig(Struct, frozen=True, kw_only=True):
    """Names that are tried in this order if a model cannot answer."""

    general: Annotated[
        list[str],
        Meta(
            description="When none of its replicas is there, they fail before the first part of the answer, the "
            "request would come too late, or asks for what the model cannot do."
        ),
    ] = []
    context_length: Annotated[list[str], Meta(description="When prompt and answer do not fit.")] = []
    content_policy: Annotated[list[str], Meta(description="When a provider refuses the content.")] = []


Aliases = Annotated[
    dict[str, str], Meta(description="Another name -> the name that it stands for, which may be an alias, too.")
]
NamedTargets = Annotated[
    dict[str, list[TargetConfig]],
    Meta(
        description="A model's name, as requests have it -> where it leads, the first choice first. One `*` stands "
        "for anything, as in `openai/*`; of several such names the longest that fits counts. Every entry of `models` "
        "has its own name without being named here. Prices and limits go by the names here, with their `*`."
    ),
]
Fallbacks = Annotated[
    dict[str, FallbackConfig], Meta(description="A model's name (no alias, no `*`) -> what is tried after it.")
]


class RoutesConfig(Struct, frozen=True, kw_only=True):
    """Complete routing table: pools, names, aliases, fallbacks, automatic choices and rollouts."""

    pools: dict[str, PoolConfig] = {}
    names: NamedTargets = {}
    aliases: Aliases = {}
    fallbacks: Fallbacks = {}
    auto: AutoModels = {}
    rollouts: Rollouts = {}

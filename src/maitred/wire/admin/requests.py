"""Requests of the admin API: bodies and queries, field by field.

In a body that changes an object, an omitted field keeps its value, and null removes the value of a field that may be
null.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from maitred.core.limits import LimitKind
from maitred.core.tenancy import CacheDirective, Scope
from maitred.wire.openai.requests import Message

Time = str | int | float
"""Time in ISO 8601, or in seconds since the Unix epoch."""

_Weight = Annotated[float, Meta(description="Share of service relative to its siblings when they compete.")]
_Models = Annotated[list[str] | None, Meta(description="Models that may be used; null: all that the parent may.")]
_Ceiling = Annotated[int | None, Meta(description="Highest priority, 1 to 10, of its requests; null: as the parent.")]
_Regions = Annotated[list[str], Meta(description="Where its requests may be served; empty: as the parent.")]
_Tags = Annotated[list[str], Meta(description="Privacy and other tags, such as `local-only`; added to the parent's.")]
_Disabled = Annotated[bool, Meta(description="Refuse its keys, and those of its teams.")]
_Expiry = Annotated[Time | None, Meta(description="ISO 8601 or seconds since the epoch; null: never.")]
_CacheControls = Annotated[
    list[CacheDirective] | None,
    Meta(description="What its requests may say about answers from a cache; null: what the configuration allows."),
]
_After = Annotated[str, Meta(description="`next` of the page before.")]
_Limit = Annotated[int, Meta(description="Entries of a page, 1 to 500.")]


class CreateTenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that creates an organisation, or a team if a parent is given."""

    id: Annotated[str, Meta(description="1 to 63 characters: lower-case letters, digits, `-` and `_`.")]
    parent: Annotated[str | None, Meta(description="The organisation of a team.")] = None
    name: str = ""
    weight: _Weight = 1.0
    models: _Models = None
    priority_ceiling: _Ceiling = None
    regions: _Regions = []
    tags: _Tags = []
    disabled: _Disabled = False


class UpdateTenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that changes a tenant."""

    name: str | UnsetType = UNSET
    weight: _Weight | UnsetType = UNSET
    models: _Models | UnsetType = UNSET
    priority_ceiling: _Ceiling | UnsetType = UNSET
    regions: _Regions | UnsetType = UNSET
    tags: _Tags | UnsetType = UNSET
    disabled: _Disabled | UnsetType = UNSET


class CreateKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that creates a key of a tenant."""

    tenant: str
    id: Annotated[str | None, Meta(description="The public id, if you want to choose it.")] = None
    name: str = ""
    scopes: tuple[Scope, ...] = (Scope.INFERENCE,)
    expires_at: _Expiry = None
    cache_controls: _CacheControls = None


class UpdateKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that changes a key."""

    name: str | UnsetType = UNSET
    scopes: list[Scope] | UnsetType = UNSET
    expires_at: _Expiry | UnsetType = UNSET
    cache_controls: _CacheControls | UnsetType = UNSET


class RotateKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that rotates the secret of a key."""

    overlap_s: Annotated[float, Meta(description="So long the old secret stays valid; at most 90 days.")] = 86_400.0


class CreateLimit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that creates a limit or a budget."""

    subject: Annotated[
        str,
        Meta(description="`tenant:<id>`, `key:<id>`, `*` for all together, `tenant:*` or `key:*` for each by itself."),
    ]
    kind: LimitKind
    value: Annotated[int | float, Meta(description="Requests, tokens, or for `usd_…` dollars.")]
    id: Annotated[str | None, Meta(description="If you want to choose it; else it follows from what is limited.")] = (
        None
    )
    model: Annotated[str | None, Meta(description="Counts requests to this model only; null: to all together.")] = None
    burst: Annotated[int | None, Meta(description="What may come at once after a pause; null: a minute's worth.")] = (
        None
    )
    hard: Annotated[bool, Meta(description="False for a budget that only says that it was passed.")] = True


class TenantsQuery(Struct, frozen=True, kw_only=True):
    """Query that selects the tenants to list."""

    parent: Annotated[str | None, Meta(description="Teams of this organisation only.")] = None
    after: _After = ""
    limit: _Limit = 100


class KeysQuery(Struct, frozen=True, kw_only=True):
    """Query that selects the keys to list."""

    tenant: Annotated[str | None, Meta(description="Keys of this tenant only.")] = None
    after: _After = ""
    limit: _Limit = 100


class LimitsQuery(Struct, frozen=True, kw_only=True):
    """Query that selects the limits to list."""

    subject: Annotated[str | None, Meta(description="Those of this subject only.")] = None
    after: _After = ""
    limit: _Limit = 100


class BudgetsQuery(Struct, frozen=True, kw_only=True):
    """Query that selects the budgets to list."""

    subject: Annotated[str | None, Meta(description="Those that hold for `tenant:<id>`, `key:<id>` or `*` only.")] = (
        None
    )
    after: _After = ""
    limit: Annotated[int, Meta(description="About so many entries of a page, 1 to 500; a subject's stay together.")] = (
        100
    )


_Start = Annotated[str, Meta(description="ISO 8601, seconds since the epoch, or so far back: `-7d`. Inclusive.")]
_End = Annotated[str, Meta(description="As `start`, or `now`. Exclusive.")]
_Organisation = Annotated[str | None, Meta(description="Usage of this organisation only, its teams included.")]
_Tenant = Annotated[str | None, Meta(description="Usage of keys that this very tenant owns.")]
_Key = Annotated[str | None, Meta(description="Usage of this key only.")]
_Model = Annotated[str | None, Meta(description="Usage of this model only.")]
_Side = Annotated[str | None, Meta(description="Usage of this side of a rollout only, such as `chat=canary`.")]
_Outcome = Annotated[str | None, Meta(description="`finished`, `failed` or `cancelled` requests only.")]
_Cache = Annotated[str | None, Meta(description="Only answers from a cache: `exact`, `coalesced` or `semantic`.")]


class UsageQuery(Struct, frozen=True, kw_only=True):
    """Query that selects and groups the usage to sum."""

    group_by: Annotated[
        str,
        Meta(
            description="Some of `tenant`, `organisation`, `key`, `model`, `rollout`, `outcome`, `cache`, `hour`, "
            "`day` and `month`, with commas between them; empty: one sum."
        ),
    ] = ""
    start: _Start = "-30d"
    end: _End = "now"
    organisation: _Organisation = None
    tenant: _Tenant = None
    key: _Key = None
    model: _Model = None
    rollout: _Side = None
    outcome: _Outcome = None
    cache: _Cache = None
    format: Annotated[str, Meta(description="`json`, or `csv` for all pages at once.")] = "json"
    after: _After = ""
    limit: _Limit = 100


class UsageEventsQuery(Struct, frozen=True, kw_only=True):
    """Query that selects the ledger entries to list."""

    start: _Start = "-30d"
    end: _End = "now"
    organisation: _Organisation = None
    tenant: _Tenant = None
    key: _Key = None
    model: _Model = None
    rollout: _Side = None
    outcome: _Outcome = None
    cache: _Cache = None
    request_id: Annotated[str | None, Meta(description="The line of this request only.")] = None
    feedback: Annotated[
        str | None, Meta(description="Only requests with feedback: `any`, or that is `good`, `neutral` or `bad`.")
    ] = None
    after: _After = ""
    limit: _Limit = 100


class RequestsQuery(Struct, frozen=True, kw_only=True):
    """Query that selects how many of the last requests to list."""

    limit: Annotated[
        int | None, Meta(description="The latest ones only, 1 to 500; null: all of which something is known.")
    ] = None


class NameReplica(Struct, frozen=True, kw_only=True):
    """Query that names one replica."""

    replica: Annotated[str, Meta(description="Its name, as `GET /admin/v1/replicas` writes it.")]
    model: Annotated[str | None, Meta(description="Of which model; needed where several have one of that name.")] = None


class ScaleModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that sets the number of replicas of a model."""

    model: Annotated[str, Meta(description="The name that requests use.")]
    serving: Annotated[int, Meta(ge=0, le=64, description="Replicas that serve; 0: requests wait until it is more.")]
    asleep: Annotated[int, Meta(ge=0, le=64, description="Replicas beyond those, which sleep and are woken first.")] = 0


_Rollout = Annotated[str, Meta(description="The name that requests use, as `GET /admin/v1/rollouts` writes it.")]


class NameRollout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that names one rollout."""

    name: _Rollout


class WeighRollout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that sets a new share of requests for the canary."""

    name: _Rollout
    weight: Annotated[float, Meta(ge=0, le=1, description="Share of the keys that the canary serves.")]
    shadow: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="Share of the stable version's requests that are copied to it; null: as before."),
    ] = None


class StartRollout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that starts a rollout.

    An omitted field keeps its previous value, or the value in `routing.rollouts`.
    """

    name: _Rollout
    stable: (
        Annotated[str, Meta(description="The model that serves so far; at first, the one of that name.")] | UnsetType
    ) = UNSET
    canary: Annotated[str, Meta(description="The model that is to take its place.")] | UnsetType = UNSET
    weight: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    shadow: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    shadow_limit: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    regions: (
        Annotated[list[str], Meta(description="Regions whose gateways take part; empty: everywhere.")] | UnsetType
    ) = UNSET
    sticky: Literal["key", "session", "request"] | UnsetType = UNSET
    automatic: Literal["none", "abort", "promote"] | UnsetType = UNSET
    trial: (
        Annotated[dict[str, int | float | None], Meta(description="Settings of `routing.rollouts.<name>.trial`.")]
        | UnsetType
    ) = UNSET


class PinPrefix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that pins a prefix in the KV caches of a model."""

    model: Annotated[str, Meta(description="Its name, as `/v1/models` writes it; one that maitred's own engines run.")]
    prompt: Annotated[str | list[int] | None, Meta(description="The text that prompts begin with, or its tokens.")] = (
        None
    )
    messages: Annotated[
        list[Message] | None, Meta(description="Or the messages that conversations begin with, such as the system's.")
    ] = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Of such conversations, as they send them.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="The same.")] = None
    tenant: Annotated[
        str | None, Meta(description="The organisation whose requests find it; null: that of the key that asks.")
    ] = None
    name: Annotated[
        Annotated[str, Meta(max_length=128)] | None,
        Meta(description="A pin of the same name takes its place; null: none does."),
    ] = None
    ttl_s: Annotated[float, Meta(gt=0, le=31_536_000, description="For how long it stays, in seconds.")] = 3600.0


class ReloadConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that reloads the configuration."""

    dry_run: Annotated[bool, Meta(description="Say what would change, and change nothing.")] = False


class NameModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that names one model."""

    model: Annotated[str, Meta(description="Its name, as the list writes it.")]


class UnloadModel(NameModel, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that unloads a model, and says whether requests may load it again."""

    hold: Annotated[
        bool,
        Meta(
            description="Keep it out of memory until it is loaded by hand; requests for it are refused meanwhile. "
            "Otherwise the next one loads it again."
        ),
    ] = False

"""Bodies and queries of LiteLLM's administration, as far as something here stands for their fields.

Facts: LiteLLM 1.106, `litellm/proxy/_types.py`. LiteLLM's clients send many fields empty, so an empty field counts as
one that was not sent. What else a body may have is in three classes: kept, noted (without effect, and named in a header
of the answer), and refused with a sentence.
"""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from maitred.core.errors import InvalidRequest
from maitred.core.tenancy import CacheDirective
from maitred.wire.admin.decode import decode_body
from maitred.wire.openai.faults import DECODE_ERRORS, describe_fault, format_value

_Amount = Annotated[float, Meta(ge=0, le=9_000_000)]
_Count = Annotated[int, Meta(ge=0, le=10**12)]
_Text = Annotated[str, Meta(max_length=200)]
_Models = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=1000)]
_ByModel = dict[Annotated[str, Meta(min_length=1, max_length=256)], _Count]


class ModelBudget(Struct, frozen=True, kw_only=True):
    """Budget of one model; LiteLLM has two spellings of its fields."""

    budget_limit: _Amount | None = None
    max_budget: _Amount | None = None
    time_period: str | None = None
    budget_duration: str | None = None


class LimitFields(Struct, frozen=True, kw_only=True):
    """Limits of a key, a team, a user or a budget; null takes a limit away."""

    max_budget: _Amount | UnsetType | None = UNSET
    soft_budget: _Amount | UnsetType | None = UNSET
    budget_duration: str | UnsetType | None = UNSET
    rpm_limit: _Count | UnsetType | None = UNSET
    tpm_limit: _Count | UnsetType | None = UNSET
    max_parallel_requests: _Count | UnsetType | None = UNSET
    model_max_budget: dict[str, _Amount | ModelBudget] | UnsetType | None = UNSET
    model_rpm_limit: _ByModel | UnsetType | None = UNSET
    model_tpm_limit: _ByModel | UnsetType | None = UNSET


class OwnerFields(LimitFields, frozen=True, kw_only=True):
    """Limits and models of a key, a team or a user."""

    models: _Models | UnsetType | None = UNSET
    blocked: bool | UnsetType | None = UNSET
    budget_id: _Text | UnsetType | None = UNSET


class GenerateKey(OwnerFields, frozen=True, kw_only=True):
    """Body of a call to `/key/generate`."""

    key: str | None = None
    key_alias: _Text | UnsetType | None = UNSET
    team_id: _Text | None = None
    user_id: _Text | None = None
    duration: str | UnsetType | None = UNSET
    allowed_cache_controls: list[CacheDirective] | UnsetType | None = UNSET
    key_type: str | None = None


class ChangeKey(GenerateKey, frozen=True, kw_only=True):
    """Body of a call to `/key/update`."""


class RegenerateKey(GenerateKey, frozen=True, kw_only=True):
    """Body of a call to `/key/regenerate`."""

    new_key: str | None = None
    grace_period: str | None = None


class DeleteKeys(Struct, frozen=True, kw_only=True):
    """Body of a call to `/key/delete`."""

    keys: list[str] = []
    key_aliases: list[str] = []


class NameKey(Struct, frozen=True, kw_only=True):
    """Body of a call to `/key/block` and `/key/unblock`."""

    key: str


class TeamFields(OwnerFields, frozen=True, kw_only=True):
    """Body of a call to `/team/new` and `/team/update`."""

    team_id: _Text | None = None
    team_alias: _Text | UnsetType | None = UNSET


class DeleteTeams(Struct, frozen=True, kw_only=True):
    """Body of a call to `/team/delete`."""

    team_ids: list[str]


class UserFields(OwnerFields, frozen=True, kw_only=True):
    """Body of a call to `/user/new` and `/user/update`."""

    user_id: _Text | None = None
    key_alias: _Text | UnsetType | None = UNSET
    duration: str | UnsetType | None = UNSET
    user_role: str | None = None
    auto_create_key: bool = True


class BudgetFields(LimitFields, frozen=True, kw_only=True):
    """Body of a call to `/budget/new` and `/budget/update`."""

    budget_id: _Text | None = None


class NameBudgets(Struct, frozen=True, kw_only=True):
    """Body of a call to `/budget/info`."""

    budgets: list[str]


class DeleteBudget(Struct, frozen=True, kw_only=True):
    """Body of a call to `/budget/delete`."""

    id: str


class KeyQuery(Struct, frozen=True, kw_only=True):
    """Query of a call to `/key/info`."""

    key: str | None = None


class ListKeysQuery(Struct, frozen=True, kw_only=True):
    """Query of a call to `/key/list`."""

    page: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    size: Annotated[int, Meta(ge=1, le=100)] = 10
    user_id: str | None = None
    team_id: str | None = None
    key_alias: str | None = None
    key_hash: str | None = None
    return_full_object: bool = False
    include_team_keys: bool = False
    """Has no effect: who may list keys sees all of them."""


class TeamQuery(Struct, frozen=True, kw_only=True):
    """Query of a call to `/team/info`."""

    team_id: str


class NoQuery(Struct, frozen=True, kw_only=True):
    """Query of calls that have no parameters."""


class UserQuery(Struct, frozen=True, kw_only=True):
    """Query of a call to `/user/info`."""

    user_id: str


class ModelQuery(Struct, frozen=True, kw_only=True):
    """Query of a call to `/model/info`."""

    litellm_model_id: str | None = None


class SpendQuery(Struct, frozen=True, kw_only=True):
    """Query of a call to `/spend/logs`."""

    api_key: str | None = None
    user_id: str | None = None
    team_id: str | None = None
    request_id: str | None = None
    start_date: str | None = None
    end_date: str | None = None
    summarize: bool = True


NOTED_FIELDS = frozenset(
    {
        *("metadata", "tags", "send_invite_email", "user_email", "user_alias", "sso_user_id", "key_name"),
        *("admins", "members", "members_with_roles", "team_member_permissions", "created_by", "updated_by"),
        *("soft_budget_cooldown", "alerting_metadata", "model_info", "litellm_changed_by", "litellm_params"),
    }
)
"""Fields that only describe something, or that would only allow more; the answer names them as left out."""
_OTHER_NAMES = "Other names of models are the same for all: set `routing.aliases` in the configuration."
_NO_RULE = "There is no such rule here, so it would not hold. Leave it out, and restrict `models` or limits instead."
_NO_ABOVE = "Nothing stands above a team here. Set the limits of the team itself."
_ROTATE = "Keys are not rotated by a clock here. Call POST /key/regenerate when it is time."
_MOVE = "Use `team_id` or `user_id` of an own team."
_COUNTED = "What was spent is what the ledger sums up; it cannot be set. Raise `max_budget` instead."
REFUSED_FIELDS = {
    **dict.fromkeys(("aliases", "model_aliases", "model_name_aliases"), _OTHER_NAMES),
    **dict.fromkeys(("organization_id", "organizations", "project_id"), _NO_ABOVE),
    **dict.fromkeys(("auto_rotate", "rotation_interval"), _ROTATE),
    **dict.fromkeys(("agent_id", "access_group_ids", "new_master_key"), _MOVE),
    **dict.fromkeys(("spend", "total_spend", "model_spend", "budget_reset_at"), _COUNTED),
    **dict.fromkeys(
        (
            *("permissions", "guardrails", "policies", "prompts", "object_permission", "allowed_routes"),
            *("allowed_passthrough_routes", "denied_passthrough_routes", "allowed_vector_store_indexes"),
            *("enforced_params", "config", "router_settings", "disable_global_guardrails", "allowed_model_region"),
            *("rpm_limit_type", "tpm_limit_type", "throttle_on_budget_exceeded", "mcp_rpm_limit", "default_model"),
            *("team_member_budget", "team_member_rpm_limit", "team_member_tpm_limit", "team_member_key_duration"),
            *("team_member_budget_duration", "allowed_models", "end_user_budget_id", "secret_manager_settings"),
        ),
        _NO_RULE,
    ),
    "budget_limits": "A key has one budget with one window: `max_budget` and `budget_duration`.",
    "budget_fallbacks": "Say in `routing.fallbacks` which model comes after another; budgets decide nothing there.",
    "temp_budget_increase": "Raise `max_budget`, and lower it again later.",
    "temp_budget_expiry": "Raise `max_budget`, and lower it again later.",
    "tpd_limit": "Tokens are limited per minute (`tpm_limit`), and money per day (`max_budget`, `budget_duration`).",
    "teams": "A user is an organisation of its own here. Make keys of a team: /key/generate with `team_id`.",
    "team_id": "A user is an organisation of its own here. Make keys of a team: /key/generate with `team_id`.",
    "password": "Nobody logs in with a password here.",
}
"""Fields that would change what holds, with what to do instead."""
_EMPTY: tuple[object, ...] = (None, False, "", [], {})

S = TypeVar("S", bound=Struct)


def decode_fields(body: bytes, kind: type[S]) -> tuple[S, list[str]]:
    """Decodes a body; returns it with the fields that were left out.

    Raises:
        InvalidRequest: A field cannot be kept, is unknown, or has a wrong value; the message says what to do.
    """
    try:
        sent: Any = msgspec.json.decode(body or b"{}")
    except DECODE_ERRORS as error:
        raise describe_fault(error) from error
    if not isinstance(sent, dict):
        raise InvalidRequest("The body must be a JSON object.")
    kept, noted = {}, []
    for name, value in sent.items():
        if name in kind.__struct_fields__:
            kept[name] = value
        elif value in _EMPTY:
            continue
        elif name in NOTED_FIELDS:
            noted.append(name)
        elif name in REFUSED_FIELDS:
            raise InvalidRequest(f"{name} cannot be kept here. {REFUSED_FIELDS[name]}", param=name)
        else:
            raise InvalidRequest(f"{format_value(name)[1:-1]} is not known here. Remove it.", param=name[:128])
    return decode_body(msgspec.json.encode(kept), kind), noted

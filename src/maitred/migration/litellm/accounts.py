"""LiteLLM's virtual keys, teams, users and budgets as tenants of ours.

Keys go on working: LiteLLM keeps their SHA-256, which is all that a foreign key needs. A team becomes an organisation,
and so does a user who has keys without a team; keys with neither belong to the organisation ``litellm``. Each key is a
team of its own there, because tenants have models, blocks and limits. So does the administration in LiteLLM's words.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from maitred.core.tenancy import is_id
from maitred.migration.litellm.stored_models import TABLES as ENCRYPTED_TABLES
from maitred.migration.source_keys import SourceKey, SourceKeys
from maitred.wire.litellm.ids import KEY_PREFIX, OWN_ORGANISATION, USER_PREFIX, is_team, tenant_id_of

TABLES = {
    "keys": "LiteLLM_VerificationToken",
    "teams": "LiteLLM_TeamTable",
    "users": "LiteLLM_UserTable",
    "budgets": "LiteLLM_BudgetTable",
    "organizations": "LiteLLM_OrganizationTable",
}
"""Sections of an export, with the tables that their rows are from."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RATES = {
    "rpm_limit": "requests_per_minute",
    "tpm_limit": "tokens_per_minute",
    "max_parallel_requests": "concurrent_requests",
}
_MODEL_RATES = {"model_rpm_limit": "requests_per_minute", "model_tpm_limit": "tokens_per_minute"}
_WINDOWS = {
    **dict.fromkeys(("1d", "24h", "daily"), "usd_per_day"),
    **dict.fromkeys(("7d", "1w", "weekly"), "usd_per_week"),
    **dict.fromkeys(("30d", "31d", "1mo", "monthly"), "usd_per_month"),
}
_ALL_MODELS = frozenset({"all-proxy-models", "all-team-models"})
_CONTROLS = ("no-cache", "no-store", "ttl", "s-maxage", "namespace", "only-if-cached")
_LEAST_USD = 1e-9
_LONGEST_ID = 48
_BY_CALENDAR = "The window is one of the calendar, in UTC; what was spent counts in the running one."
_NO_WINDOW = "There is no such window: what is left of it holds in all. Raise it when the next one begins."


class AccountsReader:
    """Reader of an export of LiteLLM's accounts.

    Args:
        document: The export: rows of tables by the names in `TABLES`, or by the tables' own.
        source: Name of the export in the report.
    """

    def __init__(self, document: dict[str, Any], source: str) -> None:
        self.keys = SourceKeys(document, f"{source}:")
        self._rows = {
            section: [*self.keys.root.child(section).items(), *self.keys.root.child(table).items()]
            for section, table in TABLES.items()
        }
        self._budgets = {str(row.child("budget_id").value): row for row in self._rows["budgets"]}
        self._users = {str(row.child("user_id").value): row for row in self._rows["users"]}
        self._ids: set[str] = {OWN_ORGANISATION}
        self._places: dict[str, dict[str, Any]] = {}
        """Team or user -> its tenant."""

    def read(self, tenants: dict[str, Any]) -> None:
        """Adds all tenants and keys, and says of all fields what became of them."""
        for row in self._rows["teams"]:
            self._add_team(tenants, row)
        for row in self._rows["keys"]:
            self._add_key(tenants, row)
        for _, each in self.keys.root.children():
            _ignore_empty(each)
        for name in (name for pair in ENCRYPTED_TABLES.items() for name in pair):
            for row in self.keys.root.child(name).items():
                row.refuse("It is encrypted. Import again with `--salt-key-env LITELLM_SALT_KEY`, or add it by hand.")
        for row in self._rows["organizations"]:
            row.refuse("Teams are organisations here. Set the limits of this one for each team, or below `tenants`.")
        for section in ("users", "budgets"):
            for row in self._rows[section]:
                for _, field in row.children():
                    _ignore_empty(field)
                row.child("user_id").map_to("tenants")
                row.child("budget_id").map_to("tenants")
                row.ignore("No key needs it, or it only describes the row.")

    def _add_team(self, tenants: dict[str, Any], row: SourceKey) -> None:
        team_id, alias = (str(row.child(name).value or "") for name in ("team_id", "team_alias"))
        keeps_id = is_id(team_id) and is_team(team_id)
        tenant_id = self._new_id(team_id if keeps_id else alias or team_id or "team")
        place = f"tenants.{tenant_id}"
        tenant: dict[str, Any] = {"name": (alias or team_id)[:256]}
        self._read_tenant(row, tenant, place)
        row.child("team_id").map_to(place)
        row.child("team_alias").map_to(f"{place}.name")
        _settle_rest(row)
        tenants[tenant_id] = tenant
        self._places[f"team {team_id}"] = tenant

    def _add_key(self, tenants: dict[str, Any], row: SourceKey) -> None:
        """Adds one key to the tenant that it belongs to."""
        team = str(row.child("team_id").value or "")
        token = str(row.child("token").value or "")
        if team == "litellm-dashboard":
            row.ignore("It is of a login to LiteLLM's own pages.")
            return
        digest = hashlib.sha256(token.encode()).hexdigest() if token.startswith("sk-") else token
        if not _DIGEST.fullmatch(digest):
            row.refuse("Its `token` is neither a key nor the SHA-256 of one. Make a new key: `maitred keys create`.")
            return
        name = str(row.child("key_alias").value or row.child("key_name").value or digest[:16])[:256]
        key: dict[str, Any] = {"sha256": digest}
        organisation, place = self._organisation_of(tenants, row, team)
        own = self._new_id(f"{KEY_PREFIX}{row.child('key_alias').value or digest[:8]}")
        tenant: dict[str, Any] = {"name": name}
        organisation.setdefault("teams", {})[own] = tenant
        self._read_tenant(row, tenant, f"{place}.teams.{own}")
        place = f"{place}.teams.{own}.keys.{name}"
        expires = row.child("expires")
        if isinstance(expires.value, str) and expires.value:
            key["expires_at"] = _with_zone(expires.value)
            expires.map_to(f"{place}.expires_at")
        controls = row.child("allowed_cache_controls")
        if isinstance(controls.value, list) and controls.value:
            key["cache_controls"] = [each for each in _CONTROLS if each in controls.value]
            controls.map_to(f"{place}.cache_controls")
        tenant["keys"] = {name: key}
        row.child("token").map_to(f"{place}.sha256")
        for field in ("key_alias", "key_name", "team_id", "user_id", "budget_id"):
            row.child(field).map_to(place)
        _settle_rest(row)

    def _organisation_of(self, tenants: dict[str, Any], row: SourceKey, team: str) -> tuple[dict[str, Any], str]:
        """Returns the organisation of a key, and where it stands."""
        known = self._places.get(f"team {team}")
        if team and known is not None:
            return known, next(f"tenants.{name}" for name, each in tenants.items() if each is known)
        user_id = str(row.child("user_id").value or "")
        if not user_id:
            return tenants.setdefault(OWN_ORGANISATION, {"name": "LiteLLM"}), f"tenants.{OWN_ORGANISATION}"
        if f"user {user_id}" not in self._places:
            tenant_id = self._new_id(tenant_id_of(user_id, USER_PREFIX))
            self._places[f"user {user_id}"] = tenants[tenant_id] = {"name": user_id[:256]}
            if (user := self._users.get(user_id)) is not None:
                self._read_tenant(user, tenants[tenant_id], f"tenants.{tenant_id}")
                user.child("user_id").map_to(f"tenants.{tenant_id}")
                user.child("user_alias").ignore("The organisation has the id of the user as its name.")
                _settle_rest(user)
        tenant = self._places[f"user {user_id}"]
        return tenant, next(f"tenants.{name}" for name, each in tenants.items() if each is tenant)

    def _read_tenant(self, row: SourceKey, tenant: dict[str, Any], place: str) -> None:
        """Reads models, blocks and limits of a row."""
        models = row.child("models")
        if (own := _own_models(row)) is not None:
            tenant["models"] = own
            models.map_to(f"{place}.models")
        models.ignore("All models are open to it.")
        if row.child("blocked").value is True:
            tenant["disabled"] = True
            row.child("blocked").map_to(f"{place}.disabled")
        spend = row.child("spend")
        if isinstance(spend.value, int | float) and spend.value > 0:
            tenant["spent_usd"] = round(float(spend.value), 9)
            spend.map_to(f"{place}.spent_usd")
        limits = self._limits(row, place)
        if limits:
            tenant["limits"] = limits

    def _limits(self, row: SourceKey, place: str) -> dict[str, Any]:
        """Reads limits of a row, and of the budget that it names for what it does not limit itself."""
        limits: dict[str, Any] = {}
        budget = self._budgets.get(str(row.child("budget_id").value))
        for source in (row, budget) if budget is not None else (row,):
            for word, kind in _RATES.items():
                value = source.child(word).value
                if isinstance(value, int) and value > 0 and kind not in limits:
                    limits[kind] = value
                    source.child(word).map_to(f"{place}.limits.{kind}")
            if not any(kind.startswith("usd_") for kind in limits):
                _add_budget(source, limits, f"{place}.limits")
        for model, key in row.child("model_max_budget").children():
            amount = key.child("budget_limit").value if isinstance(key.value, dict) else key.value
            window = key.child("time_period").value if isinstance(key.value, dict) else None
            if isinstance(amount, int | float) and amount > 0:
                kind = _WINDOWS.get(str(window), "usd_total")
                limits.setdefault("models", {}).setdefault(model, {})[kind] = float(amount)
                key.approximate(f"{place}.limits.models.{model}.{kind}", _BY_CALENDAR)
        for word, kind in _MODEL_RATES.items():
            for model, key in row.child("metadata").child(word).children():
                if isinstance(key.value, int) and key.value > 0:
                    limits.setdefault("models", {}).setdefault(model, {})[kind] = key.value
                    key.map_to(f"{place}.limits.models.{model}.{kind}")
        return limits

    def _new_id(self, wanted: str) -> str:
        """Returns an id of a tenant that is still free."""
        base = re.sub(r"[^a-z0-9_-]+", "-", wanted.lower())[:_LONGEST_ID].strip("-_") or "tenant"
        tenant_id, number = base, 1
        while tenant_id in self._ids:
            number += 1
            tenant_id = f"{base}-{number}"
        self._ids.add(tenant_id)
        return tenant_id


def _own_models(row: SourceKey) -> list[str] | None:
    """Returns the models of a row; None: it may use all, or as many as what is above it."""
    names = [str(key.value) for key in row.child("models").items()]
    if not names or not _ALL_MODELS.isdisjoint(names):
        return None
    return [name for name in names if name and name != "no-default-models"]


def _add_budget(source: SourceKey, limits: dict[str, Any], place: str) -> None:
    """Reads a budget and its window."""
    amount, duration = source.child("max_budget"), source.child("budget_duration")
    if isinstance(amount.value, int | float) and not isinstance(amount.value, bool):
        window = _WINDOWS.get(str(duration.value))
        kind = window or "usd_total"
        limits[kind] = max(float(amount.value), _LEAST_USD)
        for field in (amount, duration, source.child("budget_reset_at")):
            if window or duration.value:
                field.approximate(f"{place}.{kind}", _BY_CALENDAR if window else _NO_WINDOW)
            else:
                field.map_to(f"{place}.{kind}")
    soft = source.child("soft_budget")
    if isinstance(soft.value, int | float) and soft.value > 0:
        kind = _WINDOWS.get(str(duration.value), "usd_total")
        limits.setdefault("soft", {})[kind] = float(soft.value)
        soft.approximate(f"{place}.soft.{kind}", _BY_CALENDAR)


def _settle_rest(row: SourceKey) -> None:
    """Says of the other fields of a row that they are empty, describe it, or have no counterpart."""
    for name, field in row.children():
        _ignore_empty(field)
        if name in ("spend", "total_spend", "model_spend"):
            field.ignore("Sums begin with what was spent in the running window: `spend`.")
        elif name.endswith("_at") or name in ("created_by", "updated_by", "last_active", "user_email", "key_type"):
            field.ignore("It describes the row.")
        elif name in ("members", "members_with_roles", "admins", "teams", "user_role", "password", "sso_user_id"):
            field.refuse("There are no users who log in. Who may make keys has a key of the scope admin.")
        elif name == "aliases":
            field.refuse("Other names of models are the same for all: `routing.aliases`.")
        else:
            field.refuse("Keys and tenants have no such setting. See docs/limits.md for those that they have.")


def _ignore_empty(field: SourceKey) -> None:
    if not field.value:
        field.ignore("It is empty.")


def _with_zone(text: str) -> str:
    """Returns a time with its zone; PostgreSQL's columns are in UTC and do not say so."""
    has_zone = text.endswith(("Z", "z")) or re.search(r"[+-]\d\d:?\d\d$", text) is not None
    return text if has_zone else f"{text}Z"


def sections_of(document: dict[str, Any]) -> Iterator[str]:
    """Yields the sections of an export that are known."""
    yield from (name for pair in TABLES.items() for name in pair if name in document)

"""LiteLLM's keys, teams, users and budgets on our directory.

A team or a user is an organisation, and each of its keys a team in it with one key, because models, blocks and limits
are of tenants here. A key without a team or user belongs to the organisation ``litellm``. A budget that others name is
an organisation without keys, whose limits are copied to them. Nothing of this is stored anywhere else.
"""

import hashlib
import re
from collections.abc import AsyncIterator, Mapping
from secrets import token_urlsafe
from typing import Any

from msgspec import UNSET

from maitred.api.admin.budgets import Budgets
from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.litellm.limits import all_limits, apply_limits, fields_of, new_limits, wanted_limits
from maitred.core.errors import InvalidRequest, ResourceNotFound
from maitred.core.tenancy import ApiKey, KeySecret, Scope, Tenant
from maitred.core.usage import to_usd
from maitred.identity.keys import PREFIX, foreign_id, parse
from maitred.store.usage import MAX_ROWS, UsageQueries
from maitred.wire.admin.times import to_iso
from maitred.wire.litellm.ids import (
    BUDGET_PREFIX,
    KEY_PREFIX,
    OWN_ORGANISATION,
    USER_PREFIX,
    budget_id_of,
    budget_tags,
    chosen_budget,
    is_team,
    other_tags,
    tenant_id_of,
    user_id_of,
)
from maitred.wire.litellm.requests import BudgetFields, GenerateKey, LimitFields, OwnerFields
from maitred.wire.openai.faults import format_value

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DURATION = re.compile(r"(\d{1,6})(s|m|h|d|w|mo)", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "mo": 30 * 86_400}
_ALL_MODELS = ("all-proxy-models", "all-team-models", "*")
_CHUNK = 500


class KeyRow:
    """One key with its tenant and its organisation.

    Attributes:
        key: The key.
        tenant: Its tenant.
        organisation: The organisation of that, which may be the same.
    """

    def __init__(self, key: ApiKey, tenant: Tenant, organisation: Tenant) -> None:
        self.key = key
        self.tenant = tenant
        self.organisation = organisation

    @property
    def owns_tenant(self) -> bool:
        """Whether the tenant is this key's alone."""
        return self.tenant.parent is not None and self.tenant.id.startswith(KEY_PREFIX)

    @property
    def subject(self) -> str:
        """Subject of its limits."""
        return f"tenant:{self.tenant.id}" if self.owns_tenant else f"key:{self.key.id}"

    @property
    def token(self) -> str:
        """SHA-256 of the key's text, or its public id where only the secret part was hashed."""
        return token_of(self.key)

    @property
    def user_id(self) -> str | None:
        """Id of the user whose key it is."""
        return user_id_of(self.organisation)

    @property
    def team_id(self) -> str | None:
        """Id of the team whose key it is."""
        return self.organisation.id if is_team(self.organisation.id) else None


class LitellmAccounts:
    """Reads and changes keys, teams, users and budgets as LiteLLM has them.

    Methods raise InvalidRequest, ResourceNotFound and Conflict as the store does, and StoreUnavailable.

    Args:
        admin: The parts that admin routes share.
        usage: Queries of the usage ledger.
        budgets: Returns the state of the budgets of one subject.
    """

    def __init__(self, admin: DirectoryAdmin, usage: UsageQueries, budgets: Budgets) -> None:
        self._admin = admin
        self._store = admin.store
        self._usage = usage
        self._budgets = budgets

    async def generate(self, request: GenerateKey) -> tuple[str, KeyRow]:
        """Makes a key; returns its text and the key."""
        text = request.key or f"sk-{token_urlsafe(32)}"
        key_id, secret = _foreign(text)
        organisation = await self._organisation_for(request)
        template = await self._template(request.budget_id)
        models = None if request.models is UNSET else _own_models(request.models)
        alias = _text(request.key_alias)
        tenant = Tenant(
            id=f"{KEY_PREFIX}{key_id}",
            parent=organisation.id,
            name=alias,
            models=models,
            disabled=request.blocked is True,
            tags=budget_tags(request.budget_id),
        )
        wanted = {**wanted_limits(template)[0], **wanted_limits(request)[0]}
        limits = new_limits(f"tenant:{tenant.id}", wanted)
        controls = request.allowed_cache_controls
        key = ApiKey(
            id=key_id,
            tenant=tenant.id,
            name=alias,
            scopes=_scopes(request.key_type),
            secrets=(secret,),
            expires_s=self._expiry(request.duration),
            cache_controls=tuple(controls) if controls else None,
        )
        await self._store.add_many([tenant], [key], limits)
        await self._admin.on_change()
        return text, KeyRow(key, tenant, organisation)

    async def find(self, named: str) -> KeyRow:
        """Returns the key with this text, SHA-256 or public id."""
        key_id, digest = named, ""
        if _DIGEST.fullmatch(named):
            key_id, digest = named[:16], named
        elif (parsed := parse(named)) is not None:
            key_id = parsed[0]
        elif named.startswith("sk-"):
            digest = hashlib.sha256(named.encode()).hexdigest()
            key_id = digest[:16]
        try:
            key = await self._store.key(key_id)
        except ResourceNotFound:
            key = None
        if key is None or key.revoked or (digest and all(each.sha256.hex() != digest for each in key.secrets)):
            raise ResourceNotFound("Key not found in database. GET /key/list lists them.", param="key")
        return await self._row(key)

    async def live_keys(self) -> AsyncIterator[KeyRow]:
        """Yields all keys that are not revoked, in the order of their ids."""
        tenants = {tenant.id: tenant async for tenant in self.tenants()}
        after = ""
        while keys := await self._store.keys(None, after, _CHUNK):
            for key in keys:
                if not key.revoked and key.tenant in tenants:
                    tenant = tenants[key.tenant]
                    yield KeyRow(key, tenant, tenants[tenant.parent or tenant.id])
            after = keys[-1].id

    async def tenants(self) -> AsyncIterator[Tenant]:
        """Yields all tenants in the order of their ids."""
        after = ""
        while tenants := await self._store.tenants(None, after, _CHUNK):
            for tenant in tenants:
                yield tenant
            after = tenants[-1].id

    async def update(self, row: KeyRow, request: GenerateKey) -> KeyRow:
        """Changes the fields of a key that a body names."""
        for name, own in (("team_id", row.team_id), ("user_id", row.user_id)):
            asked = getattr(request, name)
            if asked is not None and asked != own:
                raise InvalidRequest(f"{name} of a key does not change. Generate another key there.", param=name)
        changes: dict[str, object] = {}
        if request.key_alias is not UNSET:
            changes["name"] = _text(request.key_alias)
        if request.duration is not UNSET:
            changes["expires_s"] = self._expiry(request.duration)
        if request.allowed_cache_controls is not UNSET:
            changes["cache_controls"] = request.allowed_cache_controls or None
        if request.key_type is not None:
            changes["scopes"] = _scopes(request.key_type)
        await self._change_owner(row.tenant, row.subject, request, owns=row.owns_tenant, name=changes.get("name"))
        if changes:
            await self._store.update_key(row.key.id, **changes)
        await self._admin.on_change()
        return await self._row(await self._store.key(row.key.id))

    async def regenerate(self, row: KeyRow, new_text: str | None, grace_s: float) -> tuple[str, KeyRow]:
        """Gives a key a new text; the old one stays valid for the grace period. Returns the text and the key."""
        if not row.owns_tenant:
            raise InvalidRequest(
                "This key shares its tenant with others. Use POST /admin/v1/keys/{id}/rotate, or generate another one.",
                param="key",
            )
        text = new_text or f"sk-{token_urlsafe(32)}"
        key_id, secret = _foreign(text)
        old = row.key
        new = ApiKey(
            id=key_id,
            tenant=old.tenant,
            name=old.name,
            scopes=old.scopes,
            secrets=(secret,),
            expires_s=old.expires_s,
            cache_controls=old.cache_controls,
        )
        await self._store.create_key(new)
        if grace_s > 0:
            ends_s = self._admin.now_s() + grace_s
            if old.expires_s is None or old.expires_s > ends_s:
                await self._store.update_key(old.id, expires_s=ends_s)
        else:
            await self._store.revoke_key(old.id)
        await self._admin.on_change()
        return text, KeyRow(new, row.tenant, row.organisation)

    async def delete(self, row: KeyRow) -> None:
        """Ends a key for good, with the tenant that is its own."""
        await self._store.revoke_key(row.key.id)
        if row.owns_tenant:
            others = await self._store.keys(row.tenant.id, "", _CHUNK)
            now_s = self._admin.now_s()
            if all(key.revoked or (key.expires_s is not None and key.expires_s <= now_s) for key in others):
                await self._store.delete_tenant(row.tenant.id)
        await self._admin.on_change()

    async def create_owner(self, tenant_id: str, name: str, request: LimitFields, *, disabled: bool = False) -> Tenant:
        """Makes the organisation of a team, a user or a budget."""
        template = await self._template(request.budget_id) if isinstance(request, OwnerFields) else LimitFields()
        models: tuple[str, ...] | None = None
        tags: tuple[str, ...] = ()
        if isinstance(request, OwnerFields):
            models = None if request.models is UNSET else _own_models(request.models)
            disabled, tags = request.blocked is True, budget_tags(request.budget_id)
        tenant = Tenant(id=tenant_id, name=name, models=models, disabled=disabled, tags=tags)
        wanted = {**wanted_limits(template)[0], **wanted_limits(request)[0]}
        await self._store.add_many([tenant], [], new_limits(f"tenant:{tenant_id}", wanted))
        await self._admin.on_change()
        return tenant

    async def update_owner(self, tenant: Tenant, request: LimitFields, name: str | None) -> Tenant:
        """Changes the organisation of a team, a user or a budget; None: its name stays."""
        await self._change_owner(tenant, f"tenant:{tenant.id}", request, owns=True, name=name)
        if tenant.id.startswith(BUDGET_PREFIX):
            (tag,) = budget_tags(budget_id_of(tenant))
            async for each in self.tenants():
                if tag in each.tags:
                    await apply_limits(self._store, f"tenant:{each.id}", request)
        await self._admin.on_change()
        return await self._store.tenant(tenant.id)

    async def delete_owner(self, tenant: Tenant) -> None:
        """Deletes the organisation of a team or a budget with all of its keys."""
        teams = await self._store.tenants(tenant.id, "", _CHUNK)
        for each in (*teams, tenant):
            for key in await self._store.keys(each.id, "", _CHUNK):
                await self._store.revoke_key(key.id)
            await self._store.delete_tenant(each.id)
        await self._admin.on_change()

    async def owner(self, kind: str, named: str, prefix: str = "") -> Tenant:
        """Returns the organisation of a team, a user or a budget.

        Args:
            kind: ``team``, ``user`` or ``budget``, for the message.
            named: Its id.
            prefix: What the id of its organisation begins with.
        """
        tenant_id = tenant_id_of(named, prefix)
        try:
            tenant = await self._store.tenant(tenant_id)
        except ResourceNotFound:
            tenant = None
        is_kind = tenant is not None and tenant.parent is None and (prefix or is_team(tenant.id))
        if tenant is None or not is_kind:
            raise ResourceNotFound(f"There is no {kind} {format_value(named)}.", param=f"{kind}_id")
        return tenant

    async def limit_fields(self, subject: str, sums: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Returns the limits of a subject in LiteLLM's fields, with what was spent.

        Args:
            subject: A key or a tenant.
            sums: What each tenant has spent, in nano-dollars, if it is known already.
        """
        fields = fields_of(await all_limits(self._store, subject))
        states = [state for state in await self._budgets(subject) if state.limit.model is None]
        states.sort(key=lambda state: not state.limit.hard)
        resets = [to_iso(state.ends_s) for state in states if state.ends_s is not None]
        fields["budget_reset_at"] = resets[0] if resets else None
        if states:
            fields["spend"] = to_usd(states[0].charged)
        else:
            fields["spend"] = to_usd(await self._spent(subject) if sums is None else sums.get(subject, 0))
        return fields

    async def spent_by_tenant(self) -> dict[str, int]:
        """Returns what each tenant has spent, in nano-dollars, by its subject."""
        sums: dict[str, int] = {}
        after = ""
        while True:
            now_s = self._admin.now_s() + 1
            page = await self._usage.report(0, now_s, group_by=["tenant"], after=after, limit=MAX_ROWS)
            sums |= {f"tenant:{row.group['tenant']}": row.cost_nusd for row in page.rows}
            if not (after := page.next):
                return sums

    async def info(self, row: KeyRow, sums: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Returns a key as LiteLLM shows it, without its token."""
        expires_s = row.key.expires_s
        expired = expires_s is not None and expires_s <= self._admin.now_s()
        return {
            "key_name": None,
            "key_alias": row.key.name or None,
            "status": "revoked" if row.tenant.disabled else "expired" if expired else "active",
            **await self.limit_fields(row.subject, sums),
            "expires": None if expires_s is None else to_iso(expires_s),
            "models": list(row.tenant.models or ()) if row.owns_tenant else [],
            "blocked": row.tenant.disabled,
            "user_id": row.user_id,
            "team_id": row.team_id,
            "budget_id": chosen_budget(row.tenant),
            "allowed_cache_controls": list(row.key.cache_controls or ()),
            "metadata": {},
            "aliases": {},
            "config": {},
            "permissions": {},
        }

    async def owner_info(self, tenant: Tenant, sums: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Returns what teams, users and budgets have in common."""
        return {
            **await self.limit_fields(f"tenant:{tenant.id}", sums),
            "models": list(tenant.models or ()),
            "blocked": tenant.disabled,
            "budget_id": chosen_budget(tenant),
            "metadata": {},
        }

    def duration_s(self, name: str, text: str) -> float:
        """Returns a duration such as ``30d`` in seconds."""
        match = _DURATION.fullmatch(text)
        if match is None:
            raise InvalidRequest(
                f"{name} must be a number with s, m, h, d, w or mo, such as 30d; got {format_value(text)}.", param=name
            )
        return int(match[1]) * _UNITS_S[match[2]]

    async def _row(self, key: ApiKey) -> KeyRow:
        tenant = await self._store.tenant(key.tenant)
        return KeyRow(key, tenant, tenant if tenant.parent is None else await self._store.tenant(tenant.parent))

    async def _organisation_for(self, request: GenerateKey) -> Tenant:
        if request.team_id is not None:
            return await self.owner("team", request.team_id)
        tenant_id, name = OWN_ORGANISATION, "LiteLLM"
        if request.user_id is not None:
            tenant_id, name = tenant_id_of(request.user_id, USER_PREFIX), request.user_id
        try:
            return await self._store.tenant(tenant_id)
        except ResourceNotFound:
            return await self.create_owner(tenant_id, name, LimitFields())

    async def _template(self, budget_id: object) -> LimitFields:
        """Returns the limits of the budget that a body names."""
        if not isinstance(budget_id, str):
            return LimitFields()
        budget = await self.owner("budget", budget_id, BUDGET_PREFIX)
        fields = fields_of(await all_limits(self._store, f"tenant:{budget.id}"))
        known = {name: value for name, value in fields.items() if value not in (None, {})}
        return BudgetFields(**known)

    async def _change_owner(
        self, tenant: Tenant, subject: str, request: LimitFields, *, owns: bool, name: object
    ) -> None:
        """Changes limits, models and blocks of a tenant, or of a key that shares one."""
        changes: dict[str, object] = {}
        if isinstance(request, OwnerFields):
            if request.models is not UNSET:
                changes["models"] = _own_models(request.models)
            if request.blocked is not UNSET:
                changes["disabled"] = request.blocked is True
            if request.budget_id is not UNSET:
                changes["tags"] = (*other_tags(tenant), *budget_tags(request.budget_id))
                await apply_limits(self._store, subject, await self._template(request.budget_id))
        if not owns and any(changes.values()):
            raise InvalidRequest(
                "This key shares its tenant with others, so it has no models, blocks or budgets of its own. Delete it, "
                "or change its team.",
                param=next(iter(changes)),
            )
        await apply_limits(self._store, subject, request)
        if owns and name is not None:
            changes["name"] = name
        if owns and changes:
            await self._store.update_tenant(tenant.id, **changes)

    async def _spent(self, subject: str) -> int:
        """Returns what a key or a tenant with its teams has spent, in nano-dollars."""
        kind, _, name = subject.partition(":")
        now_s = self._admin.now_s() + 1
        if kind == "tenant":
            is_team_of = (await self._store.tenant(name)).parent is not None
            kind = "tenant" if is_team_of else "organisation"
        return (await self._usage.report(0, now_s, filters={kind: name})).rows[0].cost_nusd

    def _expiry(self, duration: object) -> float | None:
        if not isinstance(duration, str) or duration in ("-1", ""):
            return None
        return self._admin.now_s() + self.duration_s("duration", duration)


def token_of(key: ApiKey) -> str:
    """Returns the SHA-256 of a key's text, or its public id where only the secret part was hashed."""
    digests = [secret.sha256.hex() for secret in key.secrets]
    return next((digest for digest in digests if digest.startswith(key.id)), key.id)


def _foreign(text: str) -> tuple[str, KeySecret]:
    """Returns public id and secret of a key of LiteLLM's form."""
    if not text.startswith("sk-") or text.startswith(PREFIX) or not text.isascii() or not text.isprintable():
        raise InvalidRequest(
            f"key must begin with `sk-`, not with `{PREFIX}`, and be printable ASCII text. Leave it out for a random "
            "one.",
            param="key",
        )
    if not 8 <= len(text) <= 512:
        raise InvalidRequest("key must have 8 to 512 characters. Leave it out for a random one.", param="key")
    digest = hashlib.sha256(text.encode()).digest()
    return foreign_id(digest), KeySecret(digest)


def _scopes(key_type: str | None) -> tuple[Scope, ...]:
    match key_type:
        case None | "default" | "llm_api":
            return (Scope.INFERENCE,)
        case "management":
            return (Scope.ADMIN,)
        case "read_only":
            return (Scope.METRICS,)
    raise InvalidRequest("key_type must be default, llm_api, management or read_only.", param="key_type")


def _own_models(models: object) -> tuple[str, ...] | None:
    """Returns the models of a body; None: all."""
    if not isinstance(models, list) or not models or any(name in _ALL_MODELS for name in models):
        return None
    return tuple(name for name in models if name != "no-default-models")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""

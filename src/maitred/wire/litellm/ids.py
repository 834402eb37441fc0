"""Ids of tenants for LiteLLM's teams, users, budgets and keys.

LiteLLM's ids are any text. A team keeps its id where this is a valid one here; a user or a budget has a prefix before
it. Text that is no id is made one, and the name of its tenant keeps the text.
"""

import re

from maitred.core.tenancy import Tenant, is_id

OWN_ORGANISATION = "litellm"
"""Organisation of keys that have neither a team nor a user."""
USER_PREFIX = "user-"
BUDGET_PREFIX = "budget-"
KEY_PREFIX = "key-"
_BUDGET_TAG = "litellm:"
"""Beginning of the tag by which a tenant names its budget."""
_LONGEST = 50


def tenant_id_of(text: str, prefix: str = "") -> str:
    """Returns the id of the tenant that stands for a team, user or budget with this id."""
    if is_id(prefix + text):
        return prefix + text
    return prefix + (re.sub(r"[^a-z0-9_-]+", "-", text.lower())[:_LONGEST].strip("-_") or "unnamed")


def is_team(tenant_id: str) -> bool:
    """Whether an organisation stands for a team, and for nothing else of LiteLLM's."""
    return tenant_id != OWN_ORGANISATION and not tenant_id.startswith((USER_PREFIX, BUDGET_PREFIX))


def user_id_of(tenant: Tenant) -> str | None:
    """Returns the id of the user for whom an organisation stands; None: it stands for something else."""
    return _named_id(tenant, USER_PREFIX)


def budget_id_of(tenant: Tenant) -> str | None:
    """Returns the id of the budget for which an organisation stands; None: it stands for something else."""
    return _named_id(tenant, BUDGET_PREFIX)


def _named_id(tenant: Tenant, prefix: str) -> str | None:
    """Returns the text that an id was made of: the name has it, unless somebody has changed the name."""
    if not tenant.id.startswith(prefix):
        return None
    return tenant.name if tenant_id_of(tenant.name, prefix) == tenant.id else tenant.id.removeprefix(prefix)


def budget_tags(budget_id: object) -> tuple[str, ...]:
    """Returns the tag of a tenant that names this budget, or none."""
    return (_BUDGET_TAG + tenant_id_of(budget_id, BUDGET_PREFIX),) if isinstance(budget_id, str) else ()


def other_tags(tenant: Tenant) -> tuple[str, ...]:
    """Returns the tags of a tenant that name no budget."""
    return tuple(tag for tag in tenant.tags if not tag.startswith(_BUDGET_TAG))


def chosen_budget(tenant: Tenant) -> str | None:
    """Returns the budget that a tenant names, as far as a tag can hold its id."""
    tag = next((tag for tag in tenant.tags if tag.startswith(_BUDGET_TAG)), None)
    return None if tag is None else tag.removeprefix(_BUDGET_TAG + BUDGET_PREFIX)

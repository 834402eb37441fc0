"""Ids of tenants for LiteLLM's teams, users, budgets and keys.

LiteLLM's ids are any text. A team keeps its id where this is a valid one here; a user or a budget has a prefix before
it. Text that is no id is made one, and the name of its tenant keeps the text.
"""

import re

from maitred.core.tenancy import is_id

OWN_ORGANISATION = "litellm"
"""Organisation of keys that have neither a team nor a user."""
USER_PREFIX = "user-"
BUDGET_PREFIX = "budget-"
KEY_PREFIX = "key-"
_LONGEST = 50


def tenant_id_of(text: str, prefix: str = "") -> str:
    """Returns the id of the tenant that stands for a team, user or budget with this id."""
    if is_id(prefix + text):
        return prefix + text
    return prefix + (re.sub(r"[^a-z0-9_-]+", "-", text.lower())[:_LONGEST].strip("-_") or "unnamed")


def is_team(tenant_id: str) -> bool:
    """Whether an organisation stands for a team, and for nothing else of LiteLLM's."""
    return tenant_id != OWN_ORGANISATION and not tenant_id.startswith((USER_PREFIX, BUDGET_PREFIX))

"""Models that LiteLLM keeps in its database, as entries of a list of models.

Their parameters are encrypted, so they are read only with the operator's salt key. What comes out stays in memory: the
converter makes references of all secrets, as of those of the file.
"""

import re
from typing import Any

from msgspec import Struct

from maitred.core.errors import ConfigInvalid
from maitred.migration.litellm.encryption import WrongSaltKey, decrypt

MODELS, CREDENTIALS = "models", "credentials"
TABLES = {MODELS: "LiteLLM_ProxyModelTable", CREDENTIALS: "LiteLLM_CredentialsTable"}
"""Sections of an export with encrypted rows, with the tables that they are from."""
_SEALED = re.compile(r"v\d:gcm:.*|[A-Za-z0-9_-]{54,}={0,2}", re.DOTALL)
"""Texts that are encrypted: the shortest secret box has 40 bytes."""


class StoredModels(Struct, frozen=True):
    """Models of a database.

    Attributes:
        entries: Entries for `model_list`, decrypted.
        source: Name of the database in the report.
        blocked: Names of models that are blocked there, which are left out.
    """

    entries: list[dict[str, Any]]
    source: str
    blocked: list[str]


def take_stored_models(document: dict[str, Any], source: str, salt_key: str | None) -> StoredModels | None:
    """Takes the models out of an export; without a salt key they stay, for the report to say so.

    Raises:
        ConfigInvalid: They are encrypted with another key.
    """
    if salt_key is None:
        return None
    rows = {section: [*document.pop(section, ()), *document.pop(table, ())] for section, table in TABLES.items()}
    credentials = {
        str(row.get("credential_name")): _decrypt_all(row.get("credential_values") or {}, salt_key)
        for row in rows[CREDENTIALS]
    }
    entries, blocked = [], []
    for row in rows[MODELS]:
        name = str(row.get("model_name"))
        if row.get("blocked") is True:
            blocked.append(name)
            continue
        params = _decrypt_all(row.get("litellm_params") or {}, salt_key)
        shared = credentials.get(str(params.get("litellm_credential_name")))
        if shared is not None:
            del params["litellm_credential_name"]
            params = {**shared, **params}
        entry: dict[str, Any] = {"model_name": name, "litellm_params": params}
        info = {key: value for key, value in (row.get("model_info") or {}).items() if value is not None}
        entries.append(entry | ({"model_info": info} if info else {}))
    return StoredModels(entries, source, blocked)


def _decrypt_all(value: Any, salt_key: str) -> Any:  # noqa: ANN401 - JSON
    """Returns a value with all encrypted texts in it decrypted."""
    if isinstance(value, dict):
        return {name: _decrypt_all(each, salt_key) for name, each in value.items()}
    if isinstance(value, list):
        return [_decrypt_all(each, salt_key) for each in value]
    if not isinstance(value, str) or not _SEALED.fullmatch(value):
        return value
    try:
        return decrypt(value, salt_key)
    except WrongSaltKey:
        raise ConfigInvalid(
            "A model in LiteLLM's database is encrypted with another key. Give the one that LiteLLM runs with: "
            "LITELLM_SALT_KEY, or its master key where that was never set."
        ) from None

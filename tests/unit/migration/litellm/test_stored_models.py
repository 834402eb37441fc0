"""Models in LiteLLM's database are decrypted with the operator's salt key, and no secret of them is written.

The encrypted values were made by LiteLLM 1.106 itself (`encrypt_value_helper`, `_encrypt_aes_gcm`), those with HKDF by
the package `cryptography`.
"""

import base64
from typing import Any

import pytest

from maitred.core.errors import ConfigInvalid
from maitred.migration.litellm.converter import read_litellm, with_accounts
from maitred.migration.litellm.encryption import WrongSaltKey, decrypt
from maitred.migration.litellm.stored_models import take_stored_models
from maitred.migration.report import KeyFate

SALT = "sk-salt-1"
LONG = "sk-proj-Ä" + "x" * 100
BOXES = {
    "": "0QDgv_L4PPnv9Ht_Qgi_WV9Qhxx4m_yhtBU9AjpFxpIB53SihutjWw==",
    LONG: "iOrLTg2KmzapzCpVbVrFDd_YnaOimduAIAreQXWPo77dQCdZwAAZtnJ4MtuZob2J8PkrnajQBYuWeQncbjI52Bbo-bjVDyupYdE2XQaYlV"
    "ze65W8O5KQpilDHKm1vhdSMOcF8GEA5TjrcUDuuV1cJmv2h78AtQn9V6X_4LVNOqXedcjujzV6mUN9p162WxfVWRKkDdsl",
    "gpt-4o": "9shZsN2wC07q7Kkbv6l1y-ndTL6q1YObXeEQLdfuRxLx9-ZieB5CVUH--rJEEA==",
}
GCM = {
    "": "v2:gcm:23Ce314PGGB6fp1fy8yaD0nRyGvtRwnIrGglig==",
    "gpt-4o": "v2:gcm:hhLK3CsMmEF-vILmmQ5TpHJSXMO9ahBXa7txSqD3p4EU7g==",
}


def derived(text: str) -> str:
    """Encrypts as newer versions of LiteLLM do."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"litellm-at-rest-v3").derive(SALT.encode())
    nonce = bytes(range(12))
    return "v3:gcm:" + base64.urlsafe_b64encode(nonce + AESGCM(key).encrypt(nonce, text.encode(), None)).decode()


SEALED = [*BOXES.items(), *GCM.items(), *((text, derived(text)) for text in ("", LONG))]


@pytest.mark.parametrize(("text", "sealed"), SEALED)
def test_each_form_is_opened_with_the_salt_key_alone(text: str, sealed: str):
    assert decrypt(sealed, SALT) == text
    with pytest.raises(WrongSaltKey):
        decrypt(sealed, "sk-salt-2")
    with pytest.raises(WrongSaltKey):
        decrypt(sealed[:-8] + "AAAAAAA=", SALT)


@pytest.mark.parametrize("text", ["", "gpt-4o", "v2:gcm:", "v3:gcm:AAAA", "ä", "A" * 60])
def test_what_is_not_encrypted_is_told_apart(text: str):
    with pytest.raises(WrongSaltKey):
        decrypt(text, SALT)


def export() -> dict[str, Any]:
    stored = {"model": derived("openai/gpt-4o"), "api_key": BOXES[LONG], "rpm": 5, "custom_llm_provider": "openai"}
    shared = {"model": derived("anthropic/claude-sonnet-4-5"), "litellm_credential_name": derived("shared")}
    return {
        "keys": [],
        "models": [
            {"model_id": "1", "model_name": "chat", "litellm_params": stored, "model_info": {"id": "1"}},
            {"model_id": "2", "model_name": "claude", "litellm_params": shared},
            {"model_id": "3", "model_name": "gone", "litellm_params": {}, "blocked": True},
        ],
        "credentials": [{"credential_name": "shared", "credential_values": {"api_key": derived("sk-ant-1")}}],
    }


def test_stored_models_come_along_and_their_credentials_are_references():
    document = export()
    stored = take_stored_models(document, "database", SALT)
    migration = with_accounts(read_litellm({"model_list": []}, {}, stored=stored), document, "database")
    models = migration.config["models"]
    assert models["chat"]["upstreams"][0]["model"] == "gpt-4o"
    assert (models["chat"]["upstreams"][0]["api_key"], models["claude"]["upstreams"][0]["api_key"]) == (
        {"env": "CHAT_API_KEY"},
        {"env": "CLAUDE_API_KEY"},
    )
    assert {variable.name for variable in migration.report.variables} == {"CHAT_API_KEY", "CLAUDE_API_KEY"}
    written = migration.yaml() + migration.report.text()
    assert LONG not in written
    assert "sk-ant-1" not in written
    assert "gone is blocked" in written
    assert [entry.path for entry in migration.report.entries if not entry.is_known] == []


def test_without_the_key_they_are_reported():
    document = export()
    assert take_stored_models(document, "database", None) is None
    report = with_accounts(read_litellm({"model_list": []}, {}), document, "database").report
    refused = [entry for entry in report.entries if "--salt-key-env" in entry.note]
    assert {entry.fate for entry in refused} == {KeyFate.UNSUPPORTED}
    assert {entry.path.partition("[")[0] for entry in refused} == {"database:models", "database:credentials"}


def test_another_key_is_refused_in_a_sentence():
    with pytest.raises(ConfigInvalid, match="LITELLM_SALT_KEY"):
        take_stored_models(export(), "database", "sk-other")

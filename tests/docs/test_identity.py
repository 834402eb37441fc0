"""What docs/identity.md says to write into the configuration is sound, and names settings that exist."""

import re
from pathlib import Path

import pytest
from msgspec import inspect

from maitred.config.loader import load
from maitred.config.tree import Config
from maitred.config.walker import leaf_keys
from maitred.identity.keys import make_key

PAGE = (Path(__file__).parents[2] / "docs" / "identity.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("number", range(3))
def test_examples_are_sound(number: int, tmp_path: Path) -> None:
    path = tmp_path / "maitred.yaml"
    path.write_text(EXAMPLES[number], encoding="utf-8")
    config = load(path, {"ACME_CI_KEY": make_key().plaintext, "LITELLM_MASTER_KEY": "sk-1234"}).config
    assert config.identity.oidc or config.tenants
    assert len(EXAMPLES) == 3


def test_settings_that_are_named_exist() -> None:
    info = inspect.type_info(Config)
    assert isinstance(info, inspect.StructType)
    known = {name for key in leaf_keys(info) for name in (key.rpartition(".")[2], *key.split("."))}
    known |= {"limits_per_tenant", "limits_per_key"}
    named = re.findall(r"`((?:identity\.)?[a-z]+(?:_[a-z]+)+)`", PAGE)
    assert len(named) > 5
    for name in named:
        assert name.rpartition(".")[2] in known, name

"""The settings reference is what the structs say."""

from pathlib import Path

from msgspec import inspect

from maitred.config.render import configuration_reference
from maitred.config.tree import Config
from maitred.config.walker import leaf_keys

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_committed_page_is_what_the_structs_render() -> None:
    assert PAGE.read_text(encoding="utf-8") == configuration_reference(), (
        "docs/configuration.md is out of date: run `make docs`."
    )


def test_every_setting_has_a_description_and_a_variable() -> None:
    info = inspect.type_info(Config)
    assert isinstance(info, inspect.StructType)
    page = configuration_reference()
    for key in leaf_keys(info):
        heading = f"\n{'###' if '.' in key else '##'} `{key}`\n\n"
        assert heading in page
        text = page.partition(heading)[2].partition("\n")[0]
        assert len(text) > 20, f"{key} has no description"
        named = "[]" not in key  # no variable names an entry of a list
        assert (f"`MAITRED__{key.upper().replace('.', '__')}`" in page) == named

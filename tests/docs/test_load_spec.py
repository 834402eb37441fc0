"""The pages of the load tester's settings are what the structs say, and the YAML in them is sound."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, get_args, get_origin

import pytest
from msgspec import Struct
from msgspec.structs import fields

from maitred.cli.load.docs import plan_page, spec_page
from maitred.cli.load.flags import SPEC_FLAGS, SpecFlag, describe
from maitred.config.document import read_document
from maitred.load.chaos.plan import ChaosPlan
from maitred.load.chaos.rules import check
from maitred.load.spec import LoadSpec

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = DOCS.parent / "examples"


@pytest.mark.parametrize(("name", "page"), [("load-settings.md", spec_page), ("load-plans.md", plan_page)])
def test_the_committed_pages_are_what_the_structs_render(name: str, page: Callable[[], str]) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == page(), f"docs/{name} is out of date: run `make docs`."


def settings(kind: type[Struct], parent: str = "") -> Iterator[str]:
    """Dotted names of all settings, with NAME and [] where the writer chooses."""
    for field in fields(kind):
        held, suffix = field.type, ""
        while get_origin(held) is Annotated:
            held = get_args(held)[0]
        if get_origin(held) in (dict, list):
            suffix = ".NAME" if get_origin(held) is dict else "[]"
            held = get_args(held)[-1]
        if isinstance(held, type) and issubclass(held, Struct):
            yield from settings(held, f"{parent}{field.name}{suffix}.")
        else:
            yield f"{parent}{field.name}"


@pytest.mark.parametrize(("kind", "page"), [(LoadSpec, spec_page), (ChaosPlan, plan_page)])
def test_every_setting_has_a_description(kind: type[Struct], page: Callable[[], str]) -> None:
    keys = [key for key in settings(kind) if not key.startswith("load.")]
    assert len(keys) > 20
    for key in keys:
        assert f"### `{key}`\n\n" in page()
        assert len(page().partition(f"### `{key}`\n\n")[2].partition("\n")[0]) > 10, f"{key} has no description"


BLOCKS = [
    (path, block)
    for path in [DOCS / "load-settings.md", DOCS / "load.md", *EXAMPLES.glob("**/*.yaml")]
    for block in (
        re.findall(r"```yaml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        if path.suffix == ".md"
        else [path.read_text(encoding="utf-8")]
    )
]


@pytest.mark.parametrize(("path", "text"), BLOCKS, ids=lambda value: value.name if isinstance(value, Path) else "")
def test_yaml_in_pages_and_examples_is_sound(
    path: Path, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.key").write_text("k")
    Path("document.yaml").write_text(text)
    if "installation:" in text:
        check(read_document(ChaosPlan, Path("document.yaml"), {}, subject=path.name))
    else:
        read_document(LoadSpec, Path("document.yaml"), {"OPENAI_API_KEY": "k"}, subject=path.name)


@pytest.mark.parametrize("flag", SPEC_FLAGS, ids=lambda flag: flag.name)
def test_every_option_has_a_text(flag: SpecFlag) -> None:
    assert len(flag.text or describe(flag.key)) > 10

"""docs/reload.md names what needs a restart, in the words of the code."""

import re
from pathlib import Path

from maitred.config.comparison import LIVE, RESTART

PAGE = (Path(__file__).parents[2] / "docs" / "reload.md").read_text(encoding="utf-8")


def test_the_table_is_that_of_the_code() -> None:
    assert dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", PAGE, re.M)) == RESTART


def test_what_is_applied_within_a_section_that_is_not_is_named() -> None:
    within = [name for name in LIVE if name.partition(".")[0] in RESTART]
    assert [name for name in within if f"`{name}`" not in PAGE] == []

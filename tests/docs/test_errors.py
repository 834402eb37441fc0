"""Every error code is in docs/errors.md, with its status."""

import re
from pathlib import Path

from maitred.core.errors import MaitredError

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")


def tree(kind):
    return [kind, *(deeper for sub in kind.__subclasses__() for deeper in tree(sub))]


def test_every_code_is_explained_with_its_status():
    rows = re.findall(r"^\| (`[^|]+) \| (\d+) \|", PAGE, re.MULTILINE)
    documented = {(code, int(status)) for codes, status in rows for code in re.findall(r"`(\w+)`", codes)}
    families = set(re.findall(r"`(\w+)`", next(line for line in PAGE.splitlines() if "families" in line)))
    real = {(kind.code, kind.http_status) for kind in tree(MaitredError) if kind.__module__ == "maitred.core.errors"}
    assert {entry for entry in real if entry[0] not in families} | {("headers_too_large", 431)} == documented

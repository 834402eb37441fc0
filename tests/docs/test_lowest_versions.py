"""The lowest versions that pyproject.toml allows are those that `make lowest` runs the tests with."""

import re
import tomllib

from tests.support.source import ROOT

REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[\w,]+\])?(?P<bounds>[^;]*)")


def lowest_allowed() -> dict[str, str]:
    """Each package that maitred or an extra for users needs, with the lowest version that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in extras if name != "dev" for line in extras[name])]
    found = {}
    for line in lines:
        requirement = REQUIREMENT.fullmatch(line)
        lowest = re.search(r"[>=]=([0-9.]+)", requirement["bounds"])
        assert lowest is not None, f"{line} has no lower bound"
        found[requirement["name"].lower()] = lowest[1]
    return found


def test_the_lowest_versions_that_are_allowed_are_those_that_are_tested():
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    assert tested == lowest_allowed()


def test_no_bound_is_above_what_is_installed():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    installed = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))

    def number(version: str) -> list[int]:
        return [int(part) for part in version.split(".")]

    above = {name: low for name, low in lowest_allowed().items() if number(low) > number(installed[name])}
    assert above == {}

"""The gateway runs where maitred was installed without any extra."""

import subprocess
import sys
from importlib.metadata import packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROBE = """
import sys
before = set(sys.modules)
import {}
print(*{{name.partition(".")[0] for name in sys.modules.keys() - before}})
"""
MODULES = packages_distributions()
KNOWN = {canonicalize_name(name) for names in MODULES.values() for name in names}


def installed_with(distribution: str) -> set[str]:
    """What comes with it when nobody asks for extras."""
    found: set[str] = set()
    waiting: list[tuple[str, frozenset[str]]] = [(distribution, frozenset())]
    seen = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen or name not in KNOWN:  # such as what only other systems need
            continue
        seen.add((name, extras))
        found.add(name)
        for line in requires(name) or ():
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found


def imported_by(*modules: str) -> set[str]:
    """Packages that come with these modules."""
    probe = PROBE.format(", ".join(modules))
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=300, check=True)
    return set(done.stdout.split())


def test_serving_imports_nothing_of_any_extra():
    modules = imported_by("maitred.app.serve", "maitred.replica.upstream.probe", "maitred.store.migration")
    imported = {canonicalize_name(name) for module in modules for name in MODULES.get(module, ())}
    ours = installed_with("maitred")
    assert {"aiohappyeyeballs", "sqlalchemy"} <= imported & ours
    # uvicorn takes what watches files where anything else has brought it.
    assert imported - ours <= {"watchfiles"}


def test_an_engine_does_not_wait_for_what_only_the_gateway_needs():
    imported = imported_by("maitred.app.start")
    assert {"maitred", "uvloop"} <= imported
    slow = {"sqlalchemy", "alembic", "aiohttp", "uvicorn", "tokenizers", "jinja2", "rich", "typer", "jsonschema"}
    assert imported & slow == set()


def test_a_start_waits_for_nothing_that_only_some_gateways_need():
    imported = imported_by("maitred.app.serve")
    assert {"sqlalchemy", "uvicorn", "tokenizers"} <= imported
    assert imported & {"aiohttp", "alembic", "jsonschema", "pydantic"} == set()

"""What every test may rely on."""

import atexit
import functools
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.support.source import ROOT, SOURCE
from tests.support.suite import fork_server

# How fast the machine draws examples, and runs one, says nothing about the code; a crowded one is slow at both. Half of
# the examples that Hypothesis draws by itself keep the suite short; `--hypothesis-profile thorough` draws ten times as
# many.
_SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("maitred", max_examples=50, **_SLOW)
settings.register_profile("thorough", max_examples=500, **_SLOW)
settings.load_profile("maitred")

# An answer that takes longer hangs. What httpx waits by itself, 5 s, a crowded machine can need.
for each in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, each, 300.0)

# Each of its clients reads all certificates of authorities, 30 ms; once is enough.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)

# No test may reach for a model hub; its client reads this when it is imported, in children too.
os.environ["HF_HUB_OFFLINE"] = "1"

# What keeps compiled modules nowhere compiles those of maitred at each start of a server, a fifth of its start, and the
# tests in each worker, most of their collection.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# One thread computes, in tests that set no other number: workers take the cores already. Threads that wait for each
# other sleep, as those of an engine do, and leave the cores to other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# Without a GPU, Triton's kernels are interpreted. It decides that when it is imported, which torch may do first.
if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110 - nothing else here needs a path
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The bundled model is served where a test names none, also where a real one is installed.
os.environ["MAITRED_TINY"] = "1"

# Servers keep tenants, keys and usage in the user's data folder; those of tests have one of their own.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="maitred-test-data-")
atexit.register(shutil.rmtree, os.environ["XDG_DATA_HOME"], ignore_errors=True)

# Engines keep the weights that they have converted, and how long steps take; those of tests make no room for themselves
# among the user's. All workers of a run share a folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="maitred-test-cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# A shell that starts a job in the background lets it ignore Ctrl-C, and children inherit that. The tests that press
# Ctrl-C on a child need it to listen, however they were started themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Thousands of tests, and the modules that they import, stay: the garbage collector scans none of them, even where an
# engine in a test lets it scan all that was there. Of what tests make it scans all a tenth as often as Python would,
# which is every few seconds.
gc.disable()
gc.unfreeze = lambda: None
gc.set_threshold(*gc.get_threshold()[:2], 10 * gc.get_threshold()[2])


def pytest_addoption(parser):
    parser.addoption("--new-interpreters", action="store_true", help="start Python for each program, as users start it")


def pytest_configure(config):
    if not config.option.new_interpreters:
        fork_server.install()


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config):
    """In a new clone, the kernels of an engine are compiled in the background, once for all workers."""
    if not config.getoption("numprocesses", None) or "NUMBA_CACHE_DIR" in os.environ or any(SOURCE.rglob("*.nbi")):
        return (yield)
    with subprocess.Popen([sys.executable, "-m", "tests.support.suite.compiled_kernels"], cwd=ROOT):
        return (yield)


def pytest_sessionstart(session):
    """In a new clone, each worker compiles its share of the tests: it imports those first."""
    if (worker := getattr(session.config, "workerinput", None)) is None:
        return
    number, workers = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted((ROOT / "tests").rglob("test_*.py"))[number::workers]:
        if not any(path.parent.glob(f"__pycache__/{path.stem}.*pytest*.pyc")):
            with suppress(Exception, pytest.skip.Exception):  # what it raises is told when it is collected
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Files that mostly wait, for processes, alternate with files that mostly compute, so that cores are always busy.

    The file that takes longest is first. Those of integration tests are spread over the first part of the order, so
    that short ones are last.
    """
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waits = [path for path in files if "integration" in path.parts]
    computes = [path for path in files if "integration" not in path.parts]
    places = {path: 0.6 * (number + 0.5) / len(waits) for number, path in enumerate(waits)}
    places |= {path: (number + 0.5) / len(computes) for number, path in enumerate(computes)}
    order = sorted(files, key=lambda path: (path.name != "test_benchmarks.py", places[path]))
    items[:] = [item for path in order for item in files[path]]


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture
def uncollected():
    """Python's collector of cyclic garbage does not run: what is gone was let go of."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def new_interpreters():
    """Python is started for each program, as users start it."""
    with fork_server.new_interpreters():
        yield

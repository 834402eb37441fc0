"""Compilation in a new clone: of the tests, and of an engine's kernels, once for all workers of a run.

Each worker collects all tests at the same time, so each would compile all of them. Here each compiles a share, before
it collects. Numba takes as long for the kernels of an engine as ten engines for their starts, and several would begin
before the first has finished; so a process of its own compiles them while tests are collected.
"""

import compileall
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from _pytest.assertion import rewrite

from tests.support.source import ROOT, SOURCE

_KERNELS = """
from maitred.config.tree import BUNDLED_MODEL
from maitred.core.flow import ServiceWeights
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig

build(BUNDLED_MODEL, EngineConfig(), ServiceWeights())
"""


def compile_share(config, number: int, workers: int) -> None:
    """Compiles every so manieth module, if it was never compiled.

    Args:
        config: Of pytest, which compiles tests with assertions that explain themselves.
        number: Of the worker, from 0.
        workers: How many there are.
    """
    for path in sorted((ROOT / "tests").rglob("test_*.py"))[number::workers]:
        compiled = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if not compiled.exists() and rewrite.try_makedirs(compiled.parent):
            source_hash, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, compiled)
    folders = (SOURCE, ROOT / "benchmarks", ROOT / "tests" / "support")
    for path in [file for folder in folders for file in sorted(folder.rglob("*.py"))][number::workers]:
        compileall.compile_file(path, quiet=2)


@contextmanager
def kernels_compiled() -> Iterator[None]:
    """Compiles the kernels of an engine in the background, if none was ever compiled."""
    if "NUMBA_CACHE_DIR" in os.environ or next(SOURCE.rglob("*.nbi"), None) is not None:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", _KERNELS], cwd=ROOT):
        yield

"""Runs one benchmark with other constants than it has, and writes its results elsewhere.

Every benchmark has a quick form, which still takes most of a minute. Its smallest form shows that it runs, and nothing
else: the caller names its arguments, and the numbers at the top of its file that are to be smaller.
"""

import os
import sys
from dataclasses import is_dataclass, replace
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.__main__ import main, module_name, runnable
from benchmarks.support import report
from tests.support.source import ROOT

OUTPUT, ERRORS = "output", "errors"
"""Files of the folder with results, for what a run prints."""


def run_as_process(name, arguments, constants, results):
    """Runs a benchmark as all there is in this process, and ends it with the exit code; arguments as of `run`."""
    os.setsid()
    for descriptor, file in ((1, OUTPUT), (2, ERRORS)):
        os.dup2(os.open(Path(results) / file, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    # Several run at once on few cores, where threads that wait for each other take the time of others.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    os.chdir(ROOT)
    sys.exit(run(name, arguments, constants, results))


def run(name, arguments, constants, results):
    """Runs a benchmark and returns its exit code.

    Args:
        name: Of the benchmark.
        arguments: Behind the name.
        constants: Name of a constant -> its value: of a dataclass the fields that change, of a mapping the keys that
            stay.
        results: Folder for its result file.
    """
    report.RESULTS = Path(results)
    module = import_module(module_name(runnable()[name]))
    for constant, value in constants.items():
        setattr(module, constant, resized(getattr(module, constant), value))
    sys.argv[1:] = [name, *arguments]
    return main()


def resized(known, value):
    """The value of a constant once it is smaller; of the same kind."""
    if is_dataclass(known):
        return replace(known, **{field: resized(getattr(known, field), part) for field, part in value.items()})
    if isinstance(known, dict):
        return {key: known[key] for key in value}
    return type(known)(value)

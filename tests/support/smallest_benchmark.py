"""Runs one benchmark with other constants than it has, and writes its results elsewhere.

Every benchmark has a quick form, which still takes most of a minute. Its smallest form shows that it runs, and nothing
else: the caller names its arguments, and the numbers at the top of its file that are to be smaller.
"""

import ast
import sys
from dataclasses import is_dataclass, replace
from importlib import import_module
from pathlib import Path

from benchmarks.__main__ import main, module_name, runnable
from benchmarks.support import report
from maitred.engine.lean_torch import complete_torch


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
    file = runnable()[name]
    if file.parent.name == "engine":
        complete_torch()  # it may compare with other libraries, which use all of torch
    module = import_module(module_name(file))
    if "benchmarks.support.shapes" in sys.modules:
        complete_torch()  # and so does a model of random weights
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


if __name__ == "__main__":
    _, called, words, values, folder = sys.argv
    sys.exit(run(called, ast.literal_eval(words), ast.literal_eval(values), folder))

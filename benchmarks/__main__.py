"""Runs a benchmark by its name: ``python -m benchmarks step_cost --quick``; without a name, lists all."""

import ast
import os
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.support.requirements import NOT_RUN, RequirementMissing
from maitred.testing.server_process import ProgramMissing

UNKNOWN = 2


def runnable() -> dict[str, Path]:
    """Files of all benchmarks by name: whatever takes ``--quick``, and the summary."""
    files = sorted(Path(__file__).parent.glob("[a-z]*/*.py"))
    found = {file.stem: file for file in files if file.parent.name != "support" and file.stem != "__init__"}
    return {**found, "summary": Path(__file__).parent / "summary.py"}


def module_name(file: Path) -> str:
    """What Python imports a benchmark's file as."""
    return ".".join(file.relative_to(Path(__file__).parent.parent).with_suffix("").parts)


def main() -> int:
    """Runs the benchmark that the first argument names, with the arguments behind it.

    Returns:
        Its exit code, or `NOT_RUN` if something is missing here that it needs.
    """
    known = runnable()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in known:
        sys.argv[:2] = [str(known[name])]
        os.environ.setdefault("MAITRED_TINY", "1")  # the model of all figures that name none
        try:
            code: int = import_module(module_name(known[name])).main()
        except (ProgramMissing, RequirementMissing) as missing:
            print(f"{name} did not run. {missing}", file=sys.stderr)
            return NOT_RUN
        return code
    helps = name in ("", "-h", "--help")
    if not helps:
        print(f"There is no benchmark {name!r}. These are known:", file=sys.stderr)
    for each, file in known.items():
        summary = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
        print(f"{each:20} {summary}")
    return 0 if helps else UNKNOWN


if __name__ == "__main__":
    sys.exit(main())

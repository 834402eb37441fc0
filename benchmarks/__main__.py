"""Runs a benchmark by its name: ``python -m benchmarks step_cost --quick``; without a name, lists all."""

import ast
import runpy
import sys
from pathlib import Path


def runnable() -> dict[str, Path]:
    """Files of all benchmarks by name: whatever takes ``--quick``, and the summary."""
    files = sorted(Path(__file__).parent.glob("[a-z]*/*.py"))
    found = {file.stem: file for file in files if file.parent.name != "support" and file.stem != "__init__"}
    return {**found, "summary": Path(__file__).parent / "summary.py"}


def main() -> None:
    """Runs the benchmark that the first argument names, with the arguments behind it."""
    known = runnable()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in known:
        parts = known[name].relative_to(Path(__file__).parent.parent).with_suffix("").parts
        del sys.argv[1]
        runpy.run_module(".".join(parts), run_name="__main__", alter_sys=True)
        return
    if name and name not in ("-h", "--help"):
        print(f"There is no benchmark {name!r}. These are known:", file=sys.stderr)
    for each, file in known.items():
        summary = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
        print(f"{each:20} {summary}")
    sys.exit(2 if name and name not in ("-h", "--help") else 0)


if __name__ == "__main__":
    main()

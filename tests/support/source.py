"""The source of maitred as syntax trees, read once, for the tests that hold its rules."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "maitred"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees(folder: Path = SOURCE) -> dict[Path, ast.Module]:
    """The tree of each module, by its path below a folder."""
    return {
        path.relative_to(folder): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))
    }


def words(name: str) -> list[str]:
    """The words of a name, in lower case: of `DispatchCore` and of `dispatch_core` the same two."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)]


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    """Every class with its file."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node


def functions() -> Iterator[tuple[Path, Function]]:
    """Every function and method with its file."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield path, node


def names(folder: Path = SOURCE) -> Iterator[tuple[Path, str, str]]:
    """Every name that is defined, with its file and kind: class, module, function, attribute or variable."""
    for path, tree in trees(folder).items():
        yield path, "module", path.stem
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, "class", node.name
            elif isinstance(node, Function):
                yield path, "function", node.name
            elif isinstance(node, ast.arg):
                yield path, "variable", node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield path, "variable", node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield path, "attribute", node.attr


def docstrings() -> Iterator[tuple[Path, str, str]]:
    """Every docstring of a module, class or function: its file, the name that it belongs to, its text."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
                yield path, getattr(node, "name", path.stem), text


def imports() -> dict[str, set[str]]:
    """Module -> modules of maitred that it imports, those under `TYPE_CHECKING` and inside functions included."""
    named = {
        ".".join(("maitred", *path.with_suffix("").parts)).removesuffix(".__init__"): tree
        for path, tree in trees().items()
    }
    graph: dict[str, set[str]] = {}
    for name, tree in named.items():
        wanted = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            elif isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
        graph[name] = (wanted & named.keys()) - {name}
        # What comes from a package's module is no import of the package itself.
        graph[name] -= {
            module for module in graph[name] if any(other.startswith(f"{module}.") for other in graph[name])
        }
    return graph

"""The source of maitred as syntax trees, read once, for the tests that hold its rules."""

import ast
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "maitred"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@contextmanager
def unscanned() -> Iterator[None]:
    """What is made here stays, and is millions of objects: the garbage collector never scans it."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@cache
def trees(folder: Path = SOURCE) -> dict[Path, ast.Module]:
    """The tree of each module, by its path below a folder."""
    with unscanned():
        return {
            path.relative_to(folder): ast.parse(path.read_text(encoding="utf-8"))
            for path in sorted(folder.rglob("*.py"))
        }


@cache
def nodes(folder: Path = SOURCE) -> list[tuple[Path, ast.AST]]:
    """Every node of these trees with its file."""
    with unscanned():
        return [(path, node) for path, tree in trees(folder).items() for node in ast.walk(tree)]


@cache
def words(name: str) -> list[str]:
    """The words of a name, in lower case: of `DispatchCore` and of `dispatch_core` the same two."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)]


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    """Every class with its file."""
    for path, node in nodes():
        if isinstance(node, ast.ClassDef):
            yield path, node


def functions() -> Iterator[tuple[Path, Function]]:
    """Every function and method with its file."""
    for path, node in nodes():
        if isinstance(node, Function):
            yield path, node


@cache
def names(folder: Path = SOURCE) -> list[tuple[Path, str, str]]:
    """Every name that is defined, with its file and kind: class, module, function, attribute or variable."""
    found = [(path, "module", path.stem) for path in trees(folder)]
    for path, node in nodes(folder):
        match node:
            case ast.ClassDef(name=name):
                found.append((path, "class", name))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.append((path, "function", name))
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                found.append((path, "variable", name))
            case ast.Attribute(attr=name, ctx=ast.Store()):
                found.append((path, "attribute", name))
    return found


def docstrings() -> Iterator[tuple[Path, str, str]]:
    """Every docstring of a module, class or function: its file, the name that it belongs to, its text."""
    for path, node in nodes():
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

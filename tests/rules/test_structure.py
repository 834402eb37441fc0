"""Structure: no circles, small folders, no tiny files, short lists of arguments, Protocols with a reason."""

import ast
from collections import Counter

from tests.support.source import ROOT, SOURCE, Function, classes, imports, trees

MOST_FILES_IN_A_FOLDER = 30
TINY_FILES = 10
"""Files under `TINY_LINES` lines, less packages, settings and migrations. It only falls, as all counts here."""
TINY_LINES = 40
PROTOCOLS_WITH_ONE_IMPLEMENTATION = 14
MOST_ARGUMENTS = 12
MOST_POSITIONAL = 4
MANY_ARGUMENTS = {
    "engine/kernels": 23,  # kernels: every argument is a register
    "cli": 19,  # commands: every argument is an option
}


def test_no_imports_go_in_a_circle():
    """Types count as well: two files that name each other are one."""
    graph = {module: set(wanted) for module, wanted in imports().items()}
    while free := [module for module, wanted in graph.items() if not wanted]:
        for module in free:
            del graph[module]
        for wanted in graph.values():
            wanted.difference_update(free)
    used = {module for wanted in graph.values() for module in wanted}
    assert sorted(graph.keys() & used) == []


def test_no_folder_has_more_files_than_a_reader_can_look_over():
    folders = Counter(path.parent for part in ("src", "tests", "benchmarks") for path in (ROOT / part).rglob("*.py"))
    assert {str(folder): count for folder, count in folders.items() if count > MOST_FILES_IN_A_FOLDER} == {}


def test_tiny_files_only_become_fewer():
    tiny = [
        str(path)
        for path in trees()
        if path.name not in ("__init__.py", "__main__.py", "config.py")
        and path.parent.name != "versions"
        and len((SOURCE / path).read_text(encoding="utf-8").splitlines()) < TINY_LINES
    ]
    assert len(tiny) <= TINY_FILES, tiny


def members(node, known):
    """The names that a class and its bases define, attributes of `self` included."""
    found = {base for name in node.bases if (parent := known.get(name_of(name))) for base in members(parent, known)}
    for inside in node.body:
        if isinstance(inside, Function):
            found.add(inside.name)
            found |= {
                place.attr
                for place in ast.walk(inside)
                if isinstance(place, ast.Attribute) and isinstance(place.ctx, ast.Store)
            }
        elif isinstance(inside, ast.AnnAssign) and isinstance(inside.target, ast.Name):
            found.add(inside.target.id)
        elif isinstance(inside, ast.Assign):
            found |= {target.id for target in inside.targets if isinstance(target, ast.Name)}
    return found


def name_of(base):
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def is_protocol(node):
    return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)


def test_a_protocol_has_two_implementations_or_a_reason():
    """Those of `core` and of the admin services stand for whole packages; any other says why it is one."""
    known = {node.name: node for _, node in classes()}
    having = {name: members(node, known) for name, node in known.items() if not is_protocol(node)}
    single, without_reason = [], []
    for path, node in classes():
        if not is_protocol(node) or str(path).startswith(("core/", "api/admin/service.py")):
            continue
        wanted = members(node, known)
        if sum(wanted <= found for found in having.values()) < 2:
            single.append(node.name)
            if "A Protocol, because " not in ast.get_docstring(node):
                without_reason.append(node.name)
    assert without_reason == []
    assert len(single) <= PROTOCOLS_WITH_ONE_IMPLEMENTATION, single


def test_functions_take_no_more_arguments_than_a_reader_can_hold():
    too_many = []
    for path, tree in trees().items():
        most = max([MOST_ARGUMENTS, *(n for folder, n in MANY_ARGUMENTS.items() if str(path).startswith(folder))])
        for node in ast.walk(tree):
            if isinstance(node, Function):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if len([arg for arg in given if arg.arg not in ("self", "cls")]) > most:
                    too_many.append(f"{path}: {node.name}")
    assert too_many == []


def positional(call):
    """How many arguments a call gives by place; those of a tuple that is written out count each."""
    unpacked = [arg.value for arg in call.args if isinstance(arg, ast.Starred)]
    return len(call.args) + sum(len(value.elts) - 1 for value in unpacked if isinstance(value, ast.Tuple | ast.List))


def own_names(tree):
    """The names of classes and of what is imported from maitred in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("maitred."):
            yield from (alias.asname or alias.name for alias in node.names)


def test_objects_are_made_with_names_for_all_but_a_few_arguments():
    """Its place does not say what a fifth argument is."""
    nameless = []
    for path, tree in trees().items():
        own = {name for name in own_names(tree) if name.lstrip("_")[:1].isupper()}
        nameless += [
            f"{path}:{node.lineno}: {node.func.id}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in own
            and positional(node) > MOST_POSITIONAL
        ]
    assert nameless == []


def test_no_object_is_handed_what_starts_something_later():
    late = []
    for path, tree in trees().items():
        if not str(path).startswith(("app/request", "dispatch")):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper():
                for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    called = value.func if isinstance(value, ast.Call) else None
                    if isinstance(value, ast.Lambda) or (isinstance(called, ast.Name) and called.id == "partial"):
                        late.append(f"{path}: {ast.unparse(node.func)}")
    assert late == []

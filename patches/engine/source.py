"""Does a patch fit a module that is not imported yet? Read its source: nothing is executed.

The registry asks before it applies a feature's first patch. The answer is "no" only when the source leaves no
doubt; aliases, inherited methods and names made at run time are judged when the module is imported.
"""

import ast
import functools
import sys
from importlib.machinery import ModuleSpec

from holmes_ext.patches.engine.patch import Patch

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def find_module(name: str) -> ModuleSpec | None:
    """Where a module would come from, or None. Unlike importlib.util.find_spec, imports no parent."""
    path, parent = None, name.rpartition(".")[0]
    if parent:
        package = find_module(parent)
        path = package.submodule_search_locations if package else None
        if path is None:
            return None
    # not wrapt's import hooks: asking them imports the parents
    finders = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("wrapt")]
    found = (finder.find_spec(name, path) for finder in finders)
    return next(filter(None, found), None)


def source_misfit(patch: Patch) -> str | None:
    """Why the patch certainly does not fit the module's source, or None when it does or might."""
    spec = find_module(patch.module)
    if spec is None:
        return f"there is no module {patch.module}"
    get_source = getattr(spec.loader, "get_source", None)
    source = get_source(patch.module) if get_source is not None else None
    if source is None:
        return None  # an extension module
    node = _parsed(source)
    for part in patch.qualname.split("."):
        body = list(_statements(node.body))
        bindings = [child for child in body if _binds(child, part)]
        if not bindings:
            return None if _may_have_more(node, body) else f"{patch.module} has no {patch.qualname}"
        node = bindings[-1]
        if not isinstance(node, _DEFINITIONS):
            return None  # bound by an assignment or an import
    if isinstance(node, ast.ClassDef):
        return None
    arguments = node.args
    names = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return missing_parameters(patch, names)


_parsed = functools.lru_cache(maxsize=32)(ast.parse)  # several patches look at one module


def missing_parameters(patch: Patch, names) -> str | None:
    """Why these parameter names do not suffice, or None."""
    missing = [name for name in patch.parameters if name not in names]
    return f"{patch.target} has no parameter {', '.join(missing)}" if missing else None


def _statements(body):
    """The statements that run when the body runs, those inside if, try, with and loops too."""
    for statement in body:
        yield statement
        if not isinstance(statement, _DEFINITIONS):
            for field in ("body", "orelse", "finalbody", "handlers"):
                yield from _statements(getattr(statement, field, []))


def _binds(statement, name):
    if isinstance(statement, _DEFINITIONS):
        return statement.name == name
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return any((alias.asname or alias.name.partition(".")[0]) == name for alias in statement.names)
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    nodes = [node for target in targets if target for node in ast.walk(target)]
    return any(isinstance(node, ast.Name) and node.id == name for node in nodes)


def _may_have_more(node, body):
    """Whether names can come from base classes, star imports, a module's __getattr__, globals()."""
    if isinstance(node, ast.ClassDef):
        return bool(node.bases or node.keywords or node.decorator_list)
    if any(isinstance(child, ast.ImportFrom) and child.names[0].name == "*" for child in body):
        return True
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return bool(names & {"globals", "vars", "setattr"}) or any(_binds(child, "__getattr__") for child in body)

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
    """Return where a module would be imported from; None if it is not found.

    importlib.util.find_spec() would import the packages above the module. This function imports nothing.
    """
    path, parent = None, name.rpartition(".")[0]  # path: folders to search; None for a top-level module
    if parent:
        package = find_module(parent)
        path = package.submodule_search_locations if package else None
        if path is None:
            return None
    # wrapt's import hooks are left out: they would import the packages above the module.
    finders = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("wrapt")]
    found = (finder.find_spec(name, path) for finder in finders)
    return next(filter(None, found), None)  # the first finder that knows the module, as in an import


def source_misfit(patch: Patch) -> str | None:
    """Return why a patch certainly does not fit the source code of its module; None if it fits or may fit.

    A patch changes one attribute of the module, e.g. a function or a method. The code is read, not executed.
    """
    spec = find_module(patch.module)
    if spec is None:
        return f"there is no module {patch.module}"
    get_source = getattr(spec.loader, "get_source", None)
    source = get_source(patch.module) if get_source is not None else None
    if source is None:
        return None  # an extension module, which is compiled
    # `node` is the module first, then the class, and at the end the function that the patch changes.
    node = _parsed(source)
    for part in patch.qualname.split("."):  # "Engine" and "step" of "Engine.step"
        statements = list(_statements(node.body))
        bindings = [statement for statement in statements if _binds(statement, part)]
        if not bindings:
            # The name may be inherited or made at run time. Otherwise it certainly does not exist.
            return None if _may_have_more(node, statements) else f"{patch.module} has no {patch.qualname}"
        node = bindings[-1]  # the last definition of a name is in effect
        if not isinstance(node, _DEFINITIONS):
            return None  # an assignment or an import made the name: the source does not show its parameters
    if isinstance(node, ast.ClassDef):
        return None  # a class: its parameters are not checked here
    arguments = node.args
    names = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return missing_parameters(patch, names)


_parsed = functools.lru_cache(maxsize=32)(ast.parse)  # several patches look at one module


def missing_parameters(patch: Patch, names) -> str | None:
    """Return a message if a patch relies on parameters that are not among `names`; else None."""
    missing = [name for name in patch.parameters if name not in names]
    return f"{patch.target} has no parameter {', '.join(missing)}" if missing else None


def _statements(body):
    """Yield all statements of a body, also those inside if, try, with and loops.

    Bodies of functions and classes are left out: their names are not names of this body.
    """
    for statement in body:
        yield statement
        if not isinstance(statement, _DEFINITIONS):
            for field in ("body", "orelse", "finalbody", "handlers"):
                yield from _statements(getattr(statement, field, []))


def _binds(statement, name):
    """Return whether a statement defines, imports or assigns a name."""
    if isinstance(statement, _DEFINITIONS):
        return statement.name == name
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return any((alias.asname or alias.name.partition(".")[0]) == name for alias in statement.names)
    # An assignment `a = b = 1` has several targets. `a: int = 1`, `a += 1` and `for a in ...` have one.
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    nodes = [node for target in targets if target for node in ast.walk(target)]
    return any(isinstance(node, ast.Name) and node.id == name for node in nodes)


def _may_have_more(node, statements):
    """Return whether a module or class may have names that none of its statements binds.

    Base classes, metaclasses and decorators may add names to a class. A star import, __getattr__, globals(),
    vars() or setattr() may add names to a module.

    Args:
        node: The module or class.
        statements: Its statements, as _statements() yields them.
    """
    if isinstance(node, ast.ClassDef):
        return bool(node.bases or node.keywords or node.decorator_list)  # a metaclass is a keyword
    if any(isinstance(child, ast.ImportFrom) and child.names[0].name == "*" for child in statements):
        return True
    used_names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return bool(used_names & {"globals", "vars", "setattr"}) or any(
        _binds(statement, "__getattr__") for statement in statements
    )

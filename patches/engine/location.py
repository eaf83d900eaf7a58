"""Applies patches (changes of holmes) to one attribute of a framework, and removes them.

A `Location` stands for one attribute of a module or class, e.g. a function or method:

    applying a patch   The attribute gets a new value, usually a wrapper that runs instead of the function.
    removing a patch   The remaining patches are applied again to the original value. So patches of the same
                       function can be removed in any order.
    copies             Other modules of the framework may have imported a function (`from x import f`). A
                       class may hold one of its methods in a dict, too. At each change of the attribute, the
                       Location finds such copies by identity and changes them too.

`ImportObserver` reports each import of the program, so that patches are applied when their module exists.

Copies outside the framework, e.g. in a user's module, are not found. They keep the wrapper. After its patch
is removed, the wrapper only calls the original function.

`source_misfit` checks a patch of a module that is not imported yet: it parses the module's source, and
executes nothing. The registry calls it before it applies the first patch of a feature. It rejects a patch
only if the source leaves no doubt. Aliases, inherited methods and names made at run time can be checked
only when the module is imported.
"""

import ast
import functools
import importlib.abc
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import signature_of

_log = logging.getLogger(__name__)


class Misfit(Exception):
    """The installed framework differs from the expectations of a patch (change of holmes).

    The patch cannot be applied. The message is the reason, e.g. a missing function or parameter.
    """


class Location:
    """Attribute of an imported module or class, with the patches that are applied to it.

    A patch is a change of holmes, usually a wrapper around a function of a framework. The methods are not
    thread-safe.
    """

    def __init__(self, patch: Patch):
        """Find the attribute of a framework that a patch changes; the patch is not applied yet.

        Raises:
            Misfit: the module has no such attribute.
        """
        self.target = patch.target  # "module:qualname"
        self.package = patch.module.partition(".")[0]  # "torch" of "torch.distributed"
        self.parent, self.name = _locate(patch.module, patch.qualname)
        # Whether a base class of the parent defines the attribute.
        self.is_inherited = self.name not in vars(self.parent)
        self.original = _stored_value(self.parent, self.name)
        # The value that holmes has set last; at first the framework's own.
        self.value = self.original
        self.patches: list[Patch] = []  # in the order of their application

    def check(self, patch: Patch) -> None:
        """Check that a framework's function has all parameters that a patch relies on.

        The function is the attribute that this Location stands for: `name` in the module or class
        `parent`. Parameters differ between releases of the framework. Therefore this check precedes
        add().

        Args:
            patch: The patch. Its field `parameters` lists names of parameters.

        Raises:
            Misfit: the function lacks a parameter, or Python knows no signature of the function, so
                that the patch cannot be applied. The message is the reason.
        """
        if not patch.parameters:
            return
        function = getattr(self.parent, self.name)
        try:
            signature = signature_of(function)
        except (TypeError, ValueError):
            raise Misfit(f"{patch.target} has no signature to check") from None
        # A message that names the missing parameters; None if there are none.
        reason = missing_parameters(patch, signature.parameters.keys())
        if reason:
            raise Misfit(reason)

    def add(self, patch: Patch) -> None:
        """Apply a patch (change of holmes) to the framework's attribute.

        If the patch raises an error, the attribute has not changed.
        """
        value = self._patched_value(patch, self.value)
        self.patches.append(patch)
        self._set_everywhere(value)

    def remove(self, patch: Patch) -> None:
        """Undo a patch (change of holmes) of the framework's attribute, and keep the other patches.

        After the last patch is removed, the attribute and its copies have their original value.
        """
        self.patches.remove(patch)
        # The patches that remain are applied again, to the value without any patch.
        value = self.original
        for remaining_patch in self.patches:
            value = self._patched_value(remaining_patch, value)
        self._set_everywhere(value)

    def _patched_value(self, patch: Patch, value: Any) -> Any:
        """Return the attribute's new value: the result of applying a patch to `value`.

        If the patch has a wrapper (Patch.wrap), the value is a plain function that calls the wrapper. Python
        binds a plain function to instances, and pickles it like the original. A callable object would not do.

        Args:
            value: The attribute's value without this patch, e.g. a function or a staticmethod object.
        """
        if patch.replace:  # the patch makes the new value itself
            return patch.replace(value)
        wrap = patch.wrap
        assert wrap is not None, "a Patch has either `replace` or `wrap`"

        # A class stores a static or class method as an object that holds the function.
        decorator: Callable[..., Any] | None = None
        function = value
        if isinstance(value, (staticmethod, classmethod)):
            decorator = type(value)
            function = value.__func__
        is_in_class = not isinstance(self.parent, ModuleType)

        # The first argument of a method is the instance; that of a class method is the class.
        has_self = is_in_class and decorator is not staticmethod

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            """Run a patch's wrapper in place of the framework's function that the patch changes.

            Programs call this function, because it is the new value of the patched attribute. The
            wrapper receives the framework's function, the object whose method that is (or None),
            and the arguments. After the patch has been removed, only the framework's function is
            called.
            """
            instance = None
            target = function
            if has_self:
                instance = args[0]
                args = args[1:]
                # Python's way to bind a function to an instance, as the access `instance.method` does.
                target = function.__get__(instance, type(instance))
            if patch not in self.patches:  # it was removed, but a copy of `call` is still in use
                return target(*args, **kwargs)
            return wrap(target, instance, args, kwargs)  # the wrapper may call `target`

        if decorator is not None:
            return decorator(call)
        return call

    def _set_everywhere(self, value: Any) -> None:
        """Give the attribute a new value, also in all copies of it that the framework has made.

        A copy arises by `from x import f` in another module of the framework. Copies are found by
        identity: they are the same object as the former value. That is the value of the last call
        of this method, or the framework's original value before the first call.

        If another library has set the attribute since the last call, the attribute keeps the
        library's value. The copies still have the former value, and get the new value.
        """
        former = self.value
        is_patched = former is not self.original
        is_changed_by_others = is_patched and vars(self.parent).get(self.name) is not former
        if is_changed_by_others:
            _log.warning(
                "holmes: %s was changed by somebody else meanwhile: it stays as it is", self.target
            )
        elif value is self.original and self.is_inherited:
            delattr(self.parent, self.name)  # the base class's attribute is found again
        else:
            setattr(self.parent, self.name, value)
        self.value = value  # the copies have it from now on
        if not callable(self.original):
            return  # copies of a constant cannot be found by identity: every None is the same object

        # The namespaces of the framework's modules; for a method, the dicts in its class.
        for namespace in self._dicts_with_copies():
            for key, stored in list(namespace.items()):  # a copied list: the loop changes the dict
                if stored is former:  # a copy of the attribute
                    namespace[key] = value

    def _dicts_with_copies(self) -> list[dict[str, Any]]:
        """Return the dicts that may hold copies of the attribute.

        For a function, these are the namespaces of all modules of the framework (`from x import f`). For a
        method, these are the dicts that are attributes of its class.
        """
        if isinstance(self.parent, ModuleType):
            return [vars(module) for module in _imported_modules(self.package)]
        attributes = list(vars(self.parent).values())
        return [attribute for attribute in attributes if isinstance(attribute, dict)]


class _Attribute(NamedTuple):
    """Attribute, e.g. a function or method, with the module or class that has it."""

    parent: Any  # the module or class
    name: str  # name of the attribute in `parent`


def _locate(module: str, qualname: str) -> _Attribute:
    """Find an attribute of an imported module by its dotted name.

    For "Engine.step" in "deepspeed.runtime.engine", the parent is the class Engine, and the name is "step".

    Args:
        module: Name of the module.
        qualname: Name of the attribute inside the module.

    Raises:
        Misfit: there is no such attribute.
    """
    *path, name = qualname.split(".")
    parent: object = sys.modules[module]
    for part in path:
        parent = getattr(parent, part, None)
    if parent is None or not hasattr(parent, name):
        raise Misfit(f"{module} has no {qualname}")
    return _Attribute(parent, name)


def _stored_value(parent: Any, name: str) -> Any:
    """Return an attribute as its module or class stores it.

    A static method is returned as a staticmethod object, not as the function that getattr() returns.
    """
    if isinstance(parent, ModuleType) and name not in vars(parent):
        return getattr(parent, name)  # the module computes it by __getattr__
    return inspect.getattr_static(parent, name)


def _imported_modules(package: str) -> list[ModuleType]:
    """Return all imported modules of a top-level package, e.g. of "torch"."""
    # Only names are copied: list(sys.modules.items()) makes tuples, and this may start the garbage collector.
    # Its finalizers may import modules, and so change sys.modules while the list is made.
    names = [
        name for name in list(sys.modules) if name == package or name.startswith(package + ".")
    ]
    modules = [sys.modules.get(name) for name in names]
    return [module for module in modules if isinstance(module, ModuleType)]


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module (it names the source file); None if the module is not found.

    Nothing is imported. importlib.util.find_spec() would import the packages above the module.
    """
    folders = None  # to search in; None: a top-level module is searched on sys.path
    parent = name.rpartition(".")[0]
    if parent:
        package = find_module(parent)
        if package is None or package.submodule_search_locations is None:
            return None
        folders = package.submodule_search_locations
    for finder in sys.meta_path:  # an import, too, uses the first finder that returns a spec
        if type(finder).__module__.startswith("wrapt"):
            continue  # wrapt's import hooks would import the packages above the module
        spec = finder.find_spec(name, folders)
        if spec:
            return spec
    return None


def source_misfit(patch: Patch) -> str | None:
    """Return the reason if a patch certainly does not fit the source code of its module; else None.

    A patch changes one attribute of the module, e.g. a function or method. The code is parsed, not executed,
    so None does not prove that the patch fits.
    """
    spec = find_module(patch.module)
    if spec is None:
        return f"there is no module {patch.module}"
    get_source = getattr(spec.loader, "get_source", None)
    if get_source is None:
        return None  # a compiled extension module
    source = get_source(patch.module)
    if source is None:
        return None

    # `node` is the module first, then the class, and at the end the function that the patch changes.
    node: Any = _parsed(source)
    for part in patch.qualname.split("."):  # "Engine" and "step" of "Engine.step"
        statements = list(_statements(node.body))
        bindings = [statement for statement in statements if _binds(statement, part)]
        if not bindings:
            if _may_have_other_names(node, statements):
                return None  # the name may be inherited or made at run time
            return f"{patch.module} has no {patch.qualname}"
        node = bindings[-1]  # the last definition of a name is in effect
        if not isinstance(node, _DEFINITIONS):
            return None  # an assignment or an import made the name: the source does not show its parameters
    if isinstance(node, ast.ClassDef):
        return None  # a class: its parameters are not checked here
    arguments: ast.arguments = node.args
    parameters = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return missing_parameters(patch, {parameter.arg for parameter in parameters})


_parsed = functools.lru_cache(maxsize=32)(ast.parse)  # several patches change the same module


def missing_parameters(patch: Patch, names: Collection[str]) -> str | None:
    """Return a message if a patched function lacks parameters that the patch relies on; else None.

    Args:
        names: Parameters of the patched function.
    """
    missing = [name for name in patch.parameters if name not in names]
    if not missing:
        return None
    return f"{patch.target} has no parameter {', '.join(missing)}"


def _statements(body: Iterable[ast.AST]) -> Iterator[Any]:
    """Yield all statements of a body, also those inside if, try, with and loops.

    Bodies of functions and classes are left out: their names are not names of this body.
    """
    for statement in body:
        yield statement
        if isinstance(statement, _DEFINITIONS):
            continue
        for field in ("body", "orelse", "finalbody", "handlers"):
            yield from _statements(getattr(statement, field, []))


def _binds(statement: Any, name: str) -> bool:
    """Return whether a statement defines, imports or assigns a name.

    Args:
        statement: A node of Python's module ast.
        name: The name.
    """
    if isinstance(statement, _DEFINITIONS):
        return statement.name == name
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        # `import a.b` binds the name a, `import a.b as c` the name c.
        imported = [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
        return name in imported
    if isinstance(statement, ast.Assign):
        targets = statement.targets  # several in `a = b = 1`
    else:
        target = getattr(statement, "target", None)  # of `a: int = 1`, `a += 1` and `for a in ...`
        targets = [target] if target else []
    for target in targets:
        for node in ast.walk(target):  # `a, b = 1, 2` has the tuple (a, b) as its target
            if isinstance(node, ast.Name) and node.id == name:
                return True
    return False


def _may_have_other_names(node: Any, statements: list[Any]) -> bool:
    """Return whether a module or class may have names that none of its statements binds.

    Base classes, metaclasses and decorators may add names to a class. A star import, __getattr__, globals(),
    vars() or setattr() may add names to a module.

    Args:
        node: The module or class.
        statements: Its statements, as _statements() yields them.
    """
    if isinstance(node, ast.ClassDef):
        return bool(node.bases or node.keywords or node.decorator_list)  # a metaclass is a keyword
    for statement in statements:
        is_star_import = isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*"
        if is_star_import or _binds(statement, "__getattr__"):
            return True
    used_names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return bool(used_names & {"globals", "vars", "setattr"})


#: Modules whose functions search for a module, but do not import it.
_SEARCHING_MODULES = ("importlib.util", "holmes_ext.patches.engine.location")


class ImportObserver(importlib.abc.MetaPathFinder):
    """Finder that finds no module. It only reports the names of modules whose import begins."""

    def __init__(self, import_begins: Callable[[str], None]):
        self._import_begins = import_begins

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Report that the import of a module begins, and let the other finders find it.

        A search without an import, e.g. by importlib.util.find_spec(), is not reported.
        """
        # Frame 1 is _find_spec of Python's import system, frame 2 is its caller.
        caller = sys._getframe(2).f_globals.get("__name__")
        if caller not in _SEARCHING_MODULES:
            self._import_begins(name)
        return None


def is_imported(name: str) -> bool:
    """Return whether the import of a module has ended."""
    module = sys.modules.get(name)
    # Python sets `_initializing` in the module's spec during the import.
    return module is not None and not getattr(module.__spec__, "_initializing", False)

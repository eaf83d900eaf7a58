"""Applies patches (changes of holmes) to one attribute of a framework, e.g. a function, and removes them.

A `Location` stands for one attribute of a module or class:

    applying a patch   The attribute gets a new value, usually a wrapper that runs instead of the function.
    removing a patch   The remaining patches are applied again to the original value. So patches of the same
                       function can be removed in any order.
    copies             Other modules of the framework may have imported a function (`from x import f`). A
                       class may hold one of its methods in a dict, too. At each change of the attribute, the
                       Location finds such copies by identity and changes them too.

Copies outside the framework, e.g. in a user's module, are not found. They keep the wrapper. After its patch
is removed, the wrapper only calls the original function.

Whether a patch fits a module that is not imported yet is read from the module's source: nothing is executed.
The registry asks before it applies a feature's first patch. The answer is "no" only when the source leaves no
doubt; aliases, inherited methods and names made at run time are judged when the module is imported.
"""

import ast
import functools
import inspect
import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import signature_of

_log = logging.getLogger(__name__)


class Misfit(Exception):
    """A patch cannot be applied, because the installed framework differs from what the patch expects.

    The message is the reason, e.g. a missing function or parameter.
    """


class Location:
    """Attribute of an imported module or class, with the patches (changes of holmes) that apply to it.

    The methods are not thread-safe.
    """

    def __init__(self, patch: Patch):
        """Find the attribute that a patch is to change. The patch is not applied yet.

        Raises:
            Misfit: the module has no such attribute.
        """
        self.target = patch.target  # "module:qualname"
        self.package = patch.module.partition(".")[0]  # "torch" of "torch.distributed"
        self.parent, self.name = _locate(patch.module, patch.qualname)  # parent: a module or class
        self.is_inherited = self.name not in vars(
            self.parent
        )  # a base class of the parent defines it
        self.original = _stored_value(self.parent, self.name)
        self.value = self.original  # the attribute's value now
        self.patches: list[Patch] = []  # in the order in which they were applied

    def check(self, patch: Patch) -> None:
        """Check that the function which the patch changes has all parameters that the patch relies on.

        Raises:
            Misfit: a parameter is missing, or the function has no signature.
        """
        if not patch.parameters:
            return
        try:
            names = signature_of(
                getattr(self.parent, self.name)
            ).parameters  # name -> inspect.Parameter
        except (TypeError, ValueError):
            raise Misfit(f"{patch.target} has no signature to check") from None
        reason = missing_parameters(patch, names)  # in words; None if none is missing
        if reason:
            raise Misfit(reason)

    def add(self, patch: Patch) -> None:
        """Apply a patch to the attribute. If the patch raises an error, the attribute has not changed."""
        value = self._patched_value(patch, self.value)
        self.patches.append(patch)
        self._set_everywhere(value)

    def remove(self, patch: Patch) -> None:
        """Remove a patch from the attribute, and keep the other patches.

        After the last patch is removed, the attribute and its copies have their original value.
        """
        self.patches.remove(patch)
        # The patches that remain are applied again, to the value without any patch.
        value = self.original
        for remaining_patch in self.patches:
            value = self._patched_value(remaining_patch, value)
        self._set_everywhere(value)

    def _patched_value(self, patch, value):
        """Return the new value of the attribute if a patch (a change of holmes) is applied to `value`.

        If the patch has a wrapper (Patch.wrap), the value is a plain function that calls the wrapper. Python
        binds a plain function to instances, and pickles it like the original. A callable object would not do.

        Args:
            value: The attribute's value without this patch, e.g. a function or a staticmethod object.
        """
        if patch.replace:  # the patch makes the new value itself
            return patch.replace(value)

        # staticmethod or classmethod if the class stores such an object, else None.
        decorator = type(value) if isinstance(value, (staticmethod, classmethod)) else None
        function = value.__func__ if decorator else value
        is_in_class = not isinstance(self.parent, ModuleType)
        has_self = (
            is_in_class and decorator is not staticmethod
        )  # of a classmethod, the class is `self`

        @functools.wraps(function)
        def call(*args, **kwargs):
            """Call the patch's wrapper. Programs call this new function in place of `function`."""
            instance = None
            target = function
            if has_self:
                instance, args = args[0], args[1:]
                # Python's way to bind a function to an instance, as the access `instance.method` does.
                target = function.__get__(instance, type(instance))
            if patch not in self.patches:
                return target(
                    *args, **kwargs
                )  # the patch was removed, but somebody still holds `call`
            return patch.wrap(target, instance, args, kwargs)  # the wrapper may call `target`

        return decorator(call) if decorator else call

    def _set_everywhere(self, value):
        """Give the attribute a new value, and replace all copies of the former value in the framework."""
        former = self.value
        is_patched = former is not self.original
        # Somebody else may have replaced the wrapper that holmes set.
        is_changed_by_others = is_patched and vars(self.parent).get(self.name) is not former
        if is_changed_by_others:
            _log.warning(
                "holmes: %s was changed by somebody else meanwhile: it stays as it is", self.target
            )
        elif value is self.original and self.is_inherited:
            delattr(self.parent, self.name)  # the base class's attribute is found again
        else:
            setattr(self.parent, self.name, value)
        self.value = value
        if not callable(self.original):
            return  # copies of a constant cannot be found by identity: every None is the same object
        for namespace in self._namespaces():
            for key, held in list(namespace.items()):  # a copied list: the loop changes the dict
                if held is former:  # a copy of the attribute
                    namespace[key] = value

    def _namespaces(self):
        """Return the dicts that may hold copies of the attribute.

        For a function, these are the namespaces of all modules of the framework (`from x import f`). For a
        method, these are the dicts that are attributes of its class.
        """
        if isinstance(self.parent, ModuleType):
            return [vars(module) for module in _imported_modules(self.package)]
        attributes = list(vars(self.parent).values())
        return [attribute for attribute in attributes if isinstance(attribute, dict)]


def _locate(module, qualname):
    """Find an attribute of an imported module, e.g. "Engine.step" in "deepspeed.runtime.engine".

    Returns:
        The module or class that has the attribute (the class Engine), and the attribute's name ("step").

    Raises:
        Misfit: there is no such attribute.
    """
    *path, name = qualname.split(".")
    parent: object = sys.modules[module]
    for part in path:
        parent = getattr(parent, part, None)
    if parent is None or not hasattr(parent, name):
        raise Misfit(f"{module} has no {qualname}")
    return parent, name


def _stored_value(parent, name):
    """Return an attribute as its module or class stores it, e.g. a staticmethod object, not its function."""
    if isinstance(parent, ModuleType) and name not in vars(parent):
        return getattr(parent, name)  # the module computes it by __getattr__
    return inspect.getattr_static(parent, name)


def _imported_modules(package):
    """Return all modules of a top-level package that are imported, e.g. of "torch"."""
    # Only names are copied: list(sys.modules.items()) makes tuples, which may start the garbage collector.
    # Its finalizers may import modules, and so change sys.modules while the list is made.
    names = [
        name for name in list(sys.modules) if name == package or name.startswith(package + ".")
    ]
    modules = [sys.modules.get(name) for name in names]
    return [module for module in modules if isinstance(module, ModuleType)]


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def find_module(name: str) -> ModuleSpec | None:
    """Return where a module would be imported from; None if it is not found.

    importlib.util.find_spec() would import the packages above the module. This function imports nothing.
    """
    path, parent = (
        None,
        name.rpartition(".")[0],
    )  # path: folders to search; None for a top-level module
    if parent:
        package = find_module(parent)
        path = package.submodule_search_locations if package else None
        if path is None:
            return None
    # wrapt's import hooks are left out: they would import the packages above the module.
    finders = [
        finder for finder in sys.meta_path if not type(finder).__module__.startswith("wrapt")
    ]
    found = (finder.find_spec(name, path) for finder in finders)
    return next(
        filter(None, found), None
    )  # the first finder that knows the module, as in an import


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
            return (
                None
                if _may_have_more(node, statements)
                else f"{patch.module} has no {patch.qualname}"
            )
        node = bindings[-1]  # the last definition of a name is in effect
        if not isinstance(node, _DEFINITIONS):
            return None  # an assignment or an import made the name: the source does not show its parameters
    if isinstance(node, ast.ClassDef):
        return None  # a class: its parameters are not checked here
    arguments = node.args
    names = {
        argument.arg
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    }
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
        return any(
            (alias.asname or alias.name.partition(".")[0]) == name for alias in statement.names
        )
    # An assignment `a = b = 1` has several targets. `a: int = 1`, `a += 1` and `for a in ...` have one.
    targets = (
        statement.targets
        if isinstance(statement, ast.Assign)
        else [getattr(statement, "target", None)]
    )
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
    if any(
        isinstance(child, ast.ImportFrom) and child.names[0].name == "*" for child in statements
    ):
        return True
    used_names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return bool(used_names & {"globals", "vars", "setattr"}) or any(
        _binds(statement, "__getattr__") for statement in statements
    )

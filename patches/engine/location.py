"""Applies patches to one attribute of a module or class, and to every copy of it, and removes them.

A `Location` keeps the original value and the list of patches on it. To remove a patch, it applies the
remaining ones to the original again. Features that patch the same function can therefore be switched off in
any order.

A framework may hold copies of the attribute: of a function in other modules of the same top-level package
(`from x import f`), of a method in a dict of its class. Copies are searched for by identity at each change.
Therefore a copy that was made of the patched value is restored, too. Copies elsewhere (in a user's module)
keep the wrapper, which only calls the original after its patch is removed.
"""

import functools
import inspect
import logging
import sys
from types import ModuleType

from holmes_ext.patches.engine.call import signature_of
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.source import missing_parameters

_log = logging.getLogger(__name__)


class Misfit(Exception):
    """The installed target does not fit the patch. The message is the reason."""


class Location:
    """Attribute of an imported module that one or more patches change. Not thread-safe."""

    def __init__(self, patch: Patch):
        """Find the patch's target, without changing it.

        Raises:
            Misfit: the module has no such attribute.
        """
        self.target = patch.target
        self.package = patch.module.partition(".")[0]
        self.parent, self.name = _locate(patch.module, patch.qualname)  # parent: a module or class
        self.inherited = self.name not in vars(self.parent)
        self.original = _raw(self.parent, self.name)
        self.value = self.original  # the attribute's value now
        self.patches: list[Patch] = []  # the outermost wrapper last

    def check(self, patch: Patch) -> None:
        """Check that the target has the parameters that the patch relies on.

        Raises:
            Misfit: a parameter is missing, or the target has no signature.
        """
        if not patch.parameters:
            return
        try:
            names = signature_of(getattr(self.parent, self.name)).parameters
        except (TypeError, ValueError):
            raise Misfit(f"{patch.target} has no signature to check") from None
        reason = missing_parameters(patch, names)
        if reason:
            raise Misfit(reason)

    def add(self, patch: Patch) -> None:
        """Apply the patch. If its `replace` raises an error, nothing has changed."""
        value = self._apply(patch, self.value)
        self.patches.append(patch)
        self._hold(value)

    def remove(self, patch: Patch) -> None:
        """Remove the patch. When the last one is removed, the attribute and its copies are the original."""
        self.patches.remove(patch)
        value = self.original
        for other in self.patches:
            value = self._apply(other, value)
        self._hold(value)

    def _apply(self, patch, value):
        """Return what replaces `value` under this patch.

        With Patch.wrap it is a plain function, not a callable object, so that Python binds it to instances
        and pickles it as it does with the original.
        """
        if patch.replace:
            return patch.replace(value)
        decorator = type(value) if isinstance(value, (staticmethod, classmethod)) else None
        function = value.__func__ if decorator else value
        is_bound = not isinstance(self.parent, ModuleType) and decorator is not staticmethod

        @functools.wraps(function)
        def call(*args, **kwargs):
            instance = None
            wrapped = function
            if is_bound:
                instance, args = args[0], args[1:]
                wrapped = function.__get__(instance, type(instance))
            if patch in self.patches:
                return patch.wrap(wrapped, instance, args, kwargs)
            return wrapped(*args, **kwargs)  # a copy outlived the patch

        return decorator(call) if decorator else call

    def _hold(self, value):
        """Set the attribute, and all copies of its former value, to the new value."""
        former = self.value
        if former is not self.original and vars(self.parent).get(self.name) is not former:
            _log.warning("holmes: %s was changed by somebody else meanwhile: it stays as it is", self.target)
        elif value is self.original and self.inherited:
            delattr(self.parent, self.name)
        else:
            setattr(self.parent, self.name, value)
        self.value = value
        if callable(self.original):  # constants have no copies: every None is the same object
            for table in self._tables():
                for key, held in list(table.items()):
                    if held is former:
                        table[key] = value

    def _tables(self):
        """Return the dicts that may contain copies of the attribute."""
        if isinstance(self.parent, ModuleType):
            return [vars(module) for module in _modules(self.package)]
        return [table for table in list(vars(self.parent).values()) if isinstance(table, dict)]


def _locate(module, qualname):
    """Return the module or class that has the attribute, and the attribute's name.

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


def _raw(parent, name):
    """Return the attribute as it is stored, e.g. a staticmethod object instead of its function."""
    if isinstance(parent, ModuleType) and name not in vars(parent):
        return getattr(parent, name)  # the module computes it by __getattr__
    return inspect.getattr_static(parent, name)


def _modules(package):
    """Return the imported modules of a top-level package.

    It copies only the names of sys.modules, not its items: tuples of items may start the garbage collector,
    whose finalizers may import modules and so change sys.modules during the loop.
    """
    names = [name for name in list(sys.modules) if name == package or name.startswith(package + ".")]
    modules = [sys.modules.get(name) for name in names]
    return [module for module in modules if isinstance(module, ModuleType)]

"""The place that a patch changes: one attribute, and every copy of it.

A location remembers the original and the patches on it, outermost last. Removing one builds the value anew
from the original, so features that patch the same function can be switched off in any order.

`from x import f` copies are found by identity among the modules of the target's top-level package, each time
anew: so a copy that was made while the patch was on is put right too when it is undone. Copies that
others hold (a user's own import) keep the wrapper, which from then on only calls the original.
"""

import functools
import importlib
import inspect
import logging
import operator
import sys
from types import FunctionType, ModuleType

import wrapt

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.source import missing_parameters

_log = logging.getLogger(__name__)


class Misfit(Exception):
    """The target is not what the patch expects; the message is the reason."""


def _named(module, qualname):
    return operator.attrgetter(qualname)(importlib.import_module(module))


class _Bound(wrapt.BoundFunctionWrapper):
    def __reduce_ex__(self, protocol):
        if self._self_instance is None:  # reached through the class
            return _named, (self.__wrapped__.__module__, self.__wrapped__.__qualname__)
        return getattr, (self._self_instance, self.__wrapped__.__name__)


class Wrapper(wrapt.FunctionWrapper):
    """wrapt's wrapper, which can also be pickled (by name, as functions are) and copied (to itself)."""

    __bound_function_wrapper__ = _Bound

    def __reduce_ex__(self, protocol):
        return self.__wrapped__.__qualname__

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self


class Location:
    """The target of one or more patches, in a module that is imported. Not thread-safe."""

    def __init__(self, patch: Patch):
        """Find the target; Misfit when it is not there. Changes nothing."""
        self.target, self.package = patch.target, patch.module.partition(".")[0]
        self.parent, self.name = _locate(patch.module, patch.qualname)
        self.inherited = self.name not in vars(self.parent)
        self.original = _raw(self.parent, self.name)
        self.value = self.entry = self.original  # what attributes hold, what dict entries hold
        self.patches: list[Patch] = []
        self.entries: list[tuple[dict, object]] = []  # (table, key)

    def check(self, patch: Patch) -> None:
        """Misfit when the target lacks the patch's parameters, or a rebind place does not hold it."""
        if patch.parameters:
            try:
                names = inspect.signature(getattr(self.parent, self.name)).parameters
            except (TypeError, ValueError):
                raise Misfit(f"{patch.target} has no signature to check") from None
            if reason := missing_parameters(patch, names):
                raise Misfit(reason)
        self._entries_of(patch)

    def add(self, patch: Patch) -> None:
        """Apply the patch. Raises what its replace raises, and then has changed nothing."""
        entries = self._entries_of(patch)
        value = self._apply(patch, self.value)
        self.patches.append(patch)
        self.entries += entries
        self._hold(value)

    def remove(self, patch: Patch) -> None:
        """Take the patch off; when it was the last one, everything is again as it was found."""
        self.patches.remove(patch)
        value = self.original
        for other in self.patches:
            value = self._apply(other, value)
        self._hold(value)

    def _apply(self, patch, value):
        if patch.replace:
            return patch.replace(value)
        return Wrapper(value, patch.wrap, enabled=lambda: patch in self.patches)

    def _hold(self, value):
        """Put value into the attribute and all its copies, where the former value was."""
        former = self.value
        if former is not self.original and vars(self.parent).get(self.name) is not former:
            _log.warning("holmes: %s was changed by somebody else meanwhile: it stays as it is", self.target)
        elif value is self.original and self.inherited:
            delattr(self.parent, self.name)
        else:
            setattr(self.parent, self.name, value)
        # not constants: every None is the same one
        if isinstance(self.parent, ModuleType) and callable(self.original):
            for module in _modules(self.package):
                for name, held in list(vars(module).items()):
                    if held is former:
                        setattr(module, name, value)
        self.value, self.entry = value, self._as_entry(value)
        for table, key in self.entries:
            table[key] = self.entry

    def _as_entry(self, value):
        """What a dict holds for a method: a function of (self, ...): wrappers bind only as attributes."""
        of_class = type(self.original) is FunctionType and not isinstance(self.parent, ModuleType)
        if not isinstance(value, Wrapper) or not of_class:
            return value

        @functools.wraps(self.original)
        def call(instance, *args, **kwargs):
            return value.__get__(instance, type(instance))(*args, **kwargs)

        return call

    def _entries_of(self, patch):
        """The dict entries that patch.rebind names, in imported modules; others copy the patched object."""
        entries = []
        for module, qualname, name in patch.rebind_places():
            if module in sys.modules:
                parent, attribute = _locate(module, qualname)
                table = getattr(parent, attribute)
                keys = [key for key in table if name in (key, getattr(key, "__name__", None))]
                if not keys or not all(any(table[key] is mine for mine in (self.original, self.entry))
                                       for key in keys):
                    raise Misfit(f"{module}:{qualname}[{name}] does not hold {patch.target}")
                entries += [(table, key) for key in keys]
        return entries


def _locate(module, qualname):
    """(the object that has the attribute, the attribute's name); Misfit when there is no such attribute."""
    *path, name = qualname.split(".")
    parent: object = sys.modules[module]
    for part in path:
        parent = getattr(parent, part, None)
    if parent is None or not hasattr(parent, name):
        raise Misfit(f"{module} has no {qualname}")
    return parent, name


def _raw(parent, name):
    """The attribute as it is stored: staticmethod and classmethod objects, not what they give."""
    if isinstance(parent, ModuleType) and name not in vars(parent):
        return getattr(parent, name)  # given by the module's __getattr__
    return inspect.getattr_static(parent, name)


def _modules(package):
    """The imported modules of a top-level package, by the names alone: a list of items makes tuples, which
    may start the garbage collector; its finalizers may import."""
    names = [name for name in list(sys.modules) if name == package or name.startswith(package + ".")]
    return [module for name in names if isinstance(module := sys.modules.get(name), ModuleType)]

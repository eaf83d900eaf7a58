"""The place that a patch changes: one attribute, and every copy of it.

A location remembers the original and the patches on it, outermost last. Removing one builds the value anew
from the original, so features that patch the same function can be switched off in any order.

Copies are found by identity, each time anew, so that one which was made while the patch was on is put right
too when it is undone: of a function (`from x import f`) in the modules of the target's top-level package, of
a method in the dicts of its class. Copies that others hold (a user's own import) keep the wrapper, which from
then on only calls the original.
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
    """The target is not what the patch expects; the message is the reason."""


class Location:
    """The target of one or more patches, in a module that is imported. Not thread-safe."""

    def __init__(self, patch: Patch):
        """Find the target; Misfit when it is not there. Changes nothing."""
        self.target, self.package = patch.target, patch.module.partition(".")[0]
        self.parent, self.name = _locate(patch.module, patch.qualname)
        self.inherited = self.name not in vars(self.parent)
        self.original = _raw(self.parent, self.name)
        self.value = self.original  # what the attribute holds now
        self.patches: list[Patch] = []

    def check(self, patch: Patch) -> None:
        """Misfit when the target lacks the patch's parameters."""
        if patch.parameters:
            try:
                names = signature_of(getattr(self.parent, self.name)).parameters
            except (TypeError, ValueError):
                raise Misfit(f"{patch.target} has no signature to check") from None
            if reason := missing_parameters(patch, names):
                raise Misfit(reason)

    def add(self, patch: Patch) -> None:
        """Apply the patch. Raises what its replace raises, and then has changed nothing."""
        value = self._apply(patch, self.value)
        self.patches.append(patch)
        self._hold(value)

    def remove(self, patch: Patch) -> None:
        """Take the patch off; when it was the last one, everything is again as it was found."""
        self.patches.remove(patch)
        value = self.original
        for other in self.patches:
            value = self._apply(other, value)
        self._hold(value)

    def _apply(self, patch, value):
        """What a patch puts in the place of value: a function like it, bound, pickled and copied as such."""
        if patch.replace:
            return patch.replace(value)
        kind = type(value) if isinstance(value, (staticmethod, classmethod)) else None
        function = value.__func__ if kind else value
        of_instance = not isinstance(self.parent, ModuleType) and kind is not staticmethod

        @functools.wraps(function)
        def call(*args, **kwargs):
            instance, wrapped = None, function
            if of_instance:
                instance, args = args[0], args[1:]
                wrapped = function.__get__(instance, type(instance))
            on = patch in self.patches
            return patch.wrap(wrapped, instance, args, kwargs) if on else wrapped(*args, **kwargs)

        return kind(call) if kind else call

    def _hold(self, value):
        """Put value into the attribute and all its copies, where the former value was."""
        former = self.value
        if former is not self.original and vars(self.parent).get(self.name) is not former:
            _log.warning("holmes: %s was changed by somebody else meanwhile: it stays as it is", self.target)
        elif value is self.original and self.inherited:
            delattr(self.parent, self.name)
        else:
            setattr(self.parent, self.name, value)
        self.value = value
        if callable(self.original):  # not constants: every None is the same one
            for table in self._tables():
                for key, held in list(table.items()):
                    if held is former:
                        table[key] = value

    def _tables(self):
        """The dicts that may have copies."""
        if isinstance(self.parent, ModuleType):
            return [vars(module) for module in _modules(self.package)]
        return [table for table in list(vars(self.parent).values()) if isinstance(table, dict)]


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

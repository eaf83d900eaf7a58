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
        self.is_inherited = self.name not in vars(self.parent)  # a base class of the parent defines it
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
            names = signature_of(getattr(self.parent, self.name)).parameters  # name -> inspect.Parameter
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
        has_self = is_in_class and decorator is not staticmethod  # of a classmethod, the class is `self`

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
                return target(*args, **kwargs)  # the patch was removed, but somebody still holds `call`
            return patch.wrap(target, instance, args, kwargs)  # the wrapper may call `target`

        return decorator(call) if decorator else call

    def _set_everywhere(self, value):
        """Give the attribute a new value, and replace all copies of the former value in the framework."""
        former = self.value
        is_patched = former is not self.original
        # Somebody else may have replaced the wrapper that holmes set.
        is_changed_by_others = is_patched and vars(self.parent).get(self.name) is not former
        if is_changed_by_others:
            _log.warning("holmes: %s was changed by somebody else meanwhile: it stays as it is", self.target)
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
    names = [name for name in list(sys.modules) if name == package or name.startswith(package + ".")]
    modules = [sys.modules.get(name) for name in names]
    return [module for module in modules if isinstance(module, ModuleType)]

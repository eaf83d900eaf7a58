"""Hooks that run when a program has imported a module.

This module uses only the standard library, because it also runs in environments of users that do not have the
dependencies of holmes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def call_after_import(callbacks: dict[str, Callable[[ModuleType], None]]) -> None:
    """Register functions that are called once, after the program has imported a module.

    Args:
        callbacks: Name of a module -> function that is called with the imported module.
    """
    sys.meta_path.insert(0, _AfterImport(callbacks))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import finder that calls a registered function (a callback) after the import of a module.

    call_after_import() puts it first into sys.meta_path. For a module with a callback, it gets the
    spec from the other finders, and patches the spec's loader. The loader then calls the callback
    when it has executed the module.
    """

    def __init__(self, callbacks: dict[str, Callable[[ModuleType], None]]):
        self._callbacks = dict(callbacks)  # name of a module -> function to be called with it

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a module's spec, with a loader that calls the module's callback after the import.

        The callbacks are those given to call_after_import(). The other finders of sys.meta_path
        find the spec. Its loader is patched, and the callback is removed: it is called once.

        Args:
            name, path, target: As of importlib.abc.MetaPathFinder.find_spec().

        Returns:
            None for a module without a callback, or if no other finder finds the module.
            Python then asks the next finder.
        """
        if name not in self._callbacks:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        for spec in (finder.find_spec(name, path, target) for finder in others):
            if spec is not None and spec.loader is not None:
                self._call_after(spec.loader, self._callbacks.pop(name))
                return spec
        return None

    @staticmethod
    def _call_after(loader: importlib.abc.Loader, callback: Callable[[ModuleType], None]) -> None:
        """Patch a loader, so that it calls `callback` with a module after executing the module."""
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]

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
    """Register functions that are called once, after a module has been imported.

    Args:
        callbacks: Name of a module -> function, which is called with the module.
    """
    sys.meta_path.insert(0, _AfterImport(callbacks))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finder that lets the other finders find a module, and adds the callback to the module's loader."""

    def __init__(self, callbacks: dict[str, Callable[[ModuleType], None]]):
        self._callbacks = dict(callbacks)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the specification of a module that has a callback, None for all others."""
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
        """Let a loader call the callback after it has executed the module."""
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]

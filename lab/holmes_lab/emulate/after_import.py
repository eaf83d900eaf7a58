"""Calls functions when a program has imported a module: only the standard library, as a user's environment
need not have what holmes depends on."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def call_after_import(callbacks: dict[str, Callable[[ModuleType], None]]) -> None:
    """Each function is called once, with its module."""
    sys.meta_path.insert(0, _AfterImport(callbacks))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function when a module has been imported; each once."""

    def __init__(self, callbacks: dict[str, Callable[[ModuleType], None]]):
        self._callbacks = dict(callbacks)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
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
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]

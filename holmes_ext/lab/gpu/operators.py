"""Loads the emulated GPU's operators (csrc/operators) when a program imports torch: the program knows nothing.

Only the standard library: a user's environment need not have what holmes depends on.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

#: Path of libholmes_operators.so, for every Python that a rank starts.
VARIABLE = "HOLMES_GPU_OPERATORS"


def install_when_imported(library: str) -> None:
    """Called by lab/emulate/site/sitecustomize.py."""
    loaded: list[ctypes.CDLL] = []

    def prepare() -> None:
        """Before torch's Python part replaces Meta kernels."""
        loaded.append(ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL))
        loaded[0].egpuOperatorsPrepare()

    def install() -> None:
        loaded[0].egpuOperatorsInstall.restype = ctypes.c_char_p
        if problem := loaded[0].egpuOperatorsInstall():
            sys.exit(f"holmes lab: the operators of the emulated GPU cannot be installed: {problem.decode()}")

    sys.meta_path.insert(0, _AfterImport({"torch._C": prepare, "torch": install}))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function when a module has been imported; each once."""

    def __init__(self, callbacks: dict[str, Callable[[], None]]):
        self._callbacks = callbacks

    def find_spec(self, name: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._callbacks:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        for spec in (finder.find_spec(name, path, target) for finder in others):
            if spec is not None and spec.loader is not None:
                self._call_after(spec.loader, self._callbacks.pop(name))
                return spec
        return None

    @staticmethod
    def _call_after(loader: importlib.abc.Loader, callback: Callable[[], None]) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            callback()

        loader.exec_module = exec_module  # type: ignore[method-assign]

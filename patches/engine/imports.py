"""Finds out which modules the program imports, and reports each import when it begins."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

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

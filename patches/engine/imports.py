"""Notices which modules the program imports."""

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

        importlib.util.find_spec(), by which a program asks whether a package is installed, begins no import.
        """
        # The frames above are _find_spec of Python's import system, and who calls that.
        caller = sys._getframe(2).f_globals.get("__name__")
        if caller not in _SEARCHING_MODULES:
            self._import_begins(name)
        return None


def is_imported(name: str) -> bool:
    """Return whether the import of a module has ended. Python sets `_initializing` during the import."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)

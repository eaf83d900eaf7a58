"""Serves empty modules to Megatron-DeepSpeed for packages that it imports but a GPT never uses.

Megatron-DeepSpeed fails at an import if one of these packages is missing:

    deepspeed.compression.compress    imported by megatron/training.py; DeepSpeed 0.19.7 and later lack it
    torchvision                       imported by megatron/data/vit_dataset.py and image_folder.py; only
                                      vision models need

An import hook on sys.meta_path makes an empty module for a missing package, if code of Megatron-DeepSpeed
imports it. Names of an empty module can be imported, and classes can be derived from them. A call raises
an error that says how to install the package.
"""

from __future__ import annotations

import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches import registry
from holmes_ext.patches.engine.location import find_module
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.megatron.features import MEGATRON_DEEPSPEED_IMPORTS
from holmes_ext.runtime import session
from holmes_ext.runtime.session import tell

#: Package that Megatron-DeepSpeed imports, but that a GPT never uses -> command that installs it.
UNUSED_BY_GPT = {
    "deepspeed.compression.compress": "pip install 'deepspeed<0.19.7'",
    "torchvision": "pip install torchvision",
}


def _unused_package_of(module: str) -> str:
    """Return the package of a module, if Megatron-DeepSpeed imports it without use for a GPT; else "".

    For example "torchvision" for "torchvision.transforms". UNUSED_BY_GPT lists these packages.
    """
    for package in UNUSED_BY_GPT:
        if module == package or module.startswith(f"{package}."):
            return package
    return ""


def _not_installed_error(module: str, name: str) -> HolmesError:
    """Return the error for the use of a name that an empty module stands for.

    Args:
        module: Full name of the empty module, such as "torchvision.transforms".
        name: Name in the module, such as "Resize".
    """
    package = _unused_package_of(module)
    return HolmesError(
        f"{name} of {module} is used, but {package} is not installed: {UNUSED_BY_GPT[package]}"
    )


class _PlaceholderClass(type):
    """Metaclass of classes without a working implementation. Making an instance raises an error.

    The classes are in empty modules: placeholders for modules that the program imports and that are not
    installed.

    The error also comes from classes of the program that derive from a placeholder.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # The base class furthest from `cls` is the class of the empty module itself.
        for base in reversed(cls.__mro__):
            if isinstance(base, _PlaceholderClass):
                raise _not_installed_error(base.__module__, base.__name__)


class _EmptyModule(ModuleType):
    """Module of a missing package, with a placeholder for every name that Megatron-DeepSpeed imports.

    A capitalized name becomes a class. A name in lower case can be a function or a submodule, which an import
    does not show: it becomes a submodule that can be called like a function.
    """

    __path__: list[str] = []  # marks a package, whose submodules can be imported

    def __getattr__(self, name: str) -> Any:
        """Return a placeholder class for a capitalized name, if code of Megatron-DeepSpeed imports it.

        Python calls this method for `from torchvision import name` and `torchvision.name`.

        Raises:
            AttributeError: There is no placeholder class. For a name in lower case, Python then
                tries to import a submodule of this name, which _EmptyModuleFinder makes. For code
                outside Megatron-DeepSpeed the package is missing, as without holmes.
        """
        if name.startswith("__") or name.islower() or not _is_imported_by_megatron():
            raise AttributeError(f"{self.__name__} is not installed: it has no {name}")
        return _PlaceholderClass(name, (), {"__module__": self.__name__})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function_name = self.__name__.rpartition(".")[2]
        raise _not_installed_error(self.__name__, function_name)


class _EmptyModuleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that makes empty modules for missing packages of UNUSED_BY_GPT.

    It is the last entry of sys.meta_path: Python calls it only if there is no real module.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not _unused_package_of(name):
            return None
        feature_is_on = registry().is_on(MEGATRON_DEEPSPEED_IMPORTS.name)
        if not feature_is_on or not _is_imported_by_megatron():
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing: the module is empty."""


def _is_imported_by_megatron() -> bool:
    """Return whether code of megatron makes the import that runs now.

    The importing code is the innermost stack frame outside Python's import system and this file.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        is_import_system = name.startswith(("importlib", "_frozen_importlib", "wrapt"))
        if name != __name__ and not is_import_system:
            return name.partition(".")[0] == "megatron"
        frame = frame.f_back
    return False


_empty_module_finder = _EmptyModuleFinder()


def _serve_missing_packages(original: Any) -> Any:
    """Install an import hook that makes empty modules for missing packages that a GPT never uses.

    Megatron-DeepSpeed imports these packages (UNUSED_BY_GPT) in any case. If one is missing, a line for the
    user says so.

    holmes patches the attribute megatron.arguments.deepspeed with this function only to have it called
    when that module is imported. The attribute exists in Megatron-DeepSpeed, and not in Megatron-LM. The
    modules that import the packages come later.

    Args:
        original: megatron.arguments.deepspeed.

    Returns:
        `original`, unchanged.
    """
    missing = [package for package in UNUSED_BY_GPT if find_module(package) is None]
    if not missing or _empty_module_finder in sys.meta_path:
        return original
    sys.meta_path.append(_empty_module_finder)
    current = session.active()
    if current is not None:
        tell(
            current,
            f"{' and '.join(missing)}: not installed; Megatron-DeepSpeed gets an empty module in "
            "place of it, which a GPT does not use "
            f"(HOLMES_DISABLE={MEGATRON_DEEPSPEED_IMPORTS.name} switches this off)",
        )
    return original


PATCHES = (
    Patch(
        MEGATRON_DEEPSPEED_IMPORTS,
        "megatron.arguments:deepspeed",
        "Megatron-DeepSpeed fails at imports of packages that a GPT never uses",
        replace=_serve_missing_packages,
    ),
)

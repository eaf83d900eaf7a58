"""What Megatron-DeepSpeed imports and a GPT never uses is served empty when it is missing, to it alone.

    deepspeed.compression.compress    megatron/training.py; DeepSpeed 0.19.7 and newer no longer have it
    torchvision                       megatron/data/vit_dataset.py, image_folder.py: of its vision models

A name of an empty module can be imported and derived from; whoever calls it is told what to install."""

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

#: Module -> how to have the real one.
UNUSED = {
    "deepspeed.compression.compress": "pip install 'deepspeed<0.19.7'",
    "torchvision": "pip install torchvision",
}


def _package_of(module: str) -> str:
    return next((package for package in UNUSED if f"{module}.".startswith(f"{package}.")), "")


def _refuse(module: str, name: str) -> HolmesError:
    package = _package_of(module)
    return HolmesError(
        f"{name} of {module} is used, but {package} is not installed: {UNUSED[package]}"
    )


class _Missing(type):
    """Of classes that stand for those of a missing module."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        base = next(base for base in cls.__mro__[::-1] if isinstance(base, _Missing))
        raise _refuse(base.__module__, base.__name__)


class _Empty(ModuleType):
    """Has any class that Megatron-DeepSpeed asks for, and nothing for others; what is written small is a
    module too, since functions and modules cannot be told apart."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name.islower() or not _asked_by_megatron():
            raise AttributeError(f"{self.__name__} is not installed: it has no {name}")
        return _Missing(name, (), {"__module__": self.__name__})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _refuse(self.__name__, self.__name__.rpartition(".")[2])


class _Server(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on sys.meta_path: asked only when there is no real module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if (
            _package_of(name)
            and registry().is_on(MEGATRON_DEEPSPEED_IMPORTS.name)
            and _asked_by_megatron()
        ):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _asked_by_megatron() -> bool:
    """Return whether megatron's code makes the import that runs now.

    The importing code is the first frame outside Python's import system and this file.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and not name.startswith(("importlib", "_frozen_importlib", "wrapt")):
            return name.partition(".")[0] == "megatron"
        frame = frame.f_back
    return False


_server = _Server()


def _serve(original: Any) -> Any:
    """Serve empty modules for those packages of UNUSED that are not installed.

    This function runs when megatron.arguments is imported. The modules that import these packages come later.

    Returns:
        The argument, unchanged.
    """
    missing = [package for package in UNUSED if find_module(package) is None]
    if missing and _server not in sys.meta_path:
        sys.meta_path.append(_server)
        if (current := session.active()) is not None:
            what = " and ".join(missing)
            tell(
                current,
                f"{what}: not installed; Megatron-DeepSpeed imports what a GPT does not use, which "
                f"is served empty (HOLMES_DISABLE={MEGATRON_DEEPSPEED_IMPORTS.name}: it is not)",
            )
    return original


PATCHES = (
    Patch(
        MEGATRON_DEEPSPEED_IMPORTS,
        "megatron.arguments:deepspeed",
        "what it imports and a GPT never uses is served empty when it is missing",
        replace=_serve,
    ),
)

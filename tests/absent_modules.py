"""Stand-ins for packages that Megatron's argument parsers import and this environment lacks.

A test runs a parser in a process of its own, with child_environment(). The process calls
stand_in_for_absent_modules() before it imports Megatron.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
import typing
from pathlib import Path
from unittest.mock import MagicMock

PACKAGES = (
    "transformers",
    "torchvision",
    "sentencepiece",
    "tiktoken",
    "triton",
    "pybind11",
    "six",
)


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports an empty module, whose attributes are mocks, for each package that is absent."""

    def find_spec(self, name, path=None, target=None):
        is_absent = name.split(".")[0] in PACKAGES or name.startswith("deepspeed.compression")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__, module.__version__ = [], "3.0.0"

        def mock(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock()

        module.__getattr__ = mock
        return module

    def exec_module(self, module):
        pass


def stand_in_for_absent_modules() -> None:
    """Let this process import the packages that are absent; installed ones are imported as usual."""
    typing.override = getattr(typing, "override", lambda method: method)  # Python < 3.12
    sys.meta_path.append(AbsentModules())


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that calls stand_in_for_absent_modules()."""
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "TORCHDYNAMO_DISABLE": "1",
        "TORCHINDUCTOR_TLX_MODE": "off",  # torch 2.15 would ask Triton, which is a stand-in here
        "RANK": "0",
        **variables,
    }

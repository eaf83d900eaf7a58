"""Loads the emulated GPU's operators (csrc/operators) when a program imports torch: the program knows nothing."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import wrapt

#: Path of libholmes_operators.so, for every Python that a rank starts.
VARIABLE = "HOLMES_GPU_OPERATORS"


def install_when_imported(library: str) -> None:
    """Called by lab/emulate/site/sitecustomize.py."""
    loaded: list[ctypes.CDLL] = []

    def prepare(_: Any) -> None:
        """Before torch's Python part replaces Meta kernels."""
        loaded.append(ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL))
        loaded[0].egpuOperatorsPrepare()

    def install(_: Any) -> None:
        loaded[0].egpuOperatorsInstall.restype = ctypes.c_char_p
        if problem := loaded[0].egpuOperatorsInstall():
            sys.exit(f"holmes lab: the operators of the emulated GPU cannot be installed: {problem.decode()}")

    wrapt.register_post_import_hook(prepare, "torch._C")
    wrapt.register_post_import_hook(install, "torch")

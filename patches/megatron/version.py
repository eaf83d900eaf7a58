"""Which megatron-core is loaded: installed, or run from a source tree such as Megatron-LM's, under any path."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

#: megatron-core of PyPI from 0.14 on, and what Megatron-LM's main branch calls 0.20.
MEGATRON = "megatron-core>=0.14,<0.21"


def loaded_version() -> str | None:
    """The version of the megatron.core that the program imports, from its own package_info (megatron.core is not whole yet).

    None when it is the copy that Megatron-DeepSpeed brings: its pipeline is DeepSpeed's, and there is nothing in it to patch.
    """
    version = importlib.import_module("megatron.core.package_info").__version__
    return None if version.startswith("0.2.") and _is_megatron_deepspeed() else version


def _is_megatron_deepspeed() -> bool:
    """By the file beside megatron/core that Megatron-LM has moved, and that reads deepspeed's arguments here; nothing is imported."""
    beside = Path(sys.modules["megatron.core"].__path__[0]).parent / "arguments.py"
    return beside.is_file() and "add_config_arguments" in beside.read_text(errors="replace")

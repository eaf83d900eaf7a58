"""Finds the checkouts of frameworks whose unmodified scripts the tests and benchmarks run.

They are looked for in $HOLMES_CHECKOUTS, and in ~/.cache/holmes_ext/checkouts if that variable is not set:

    Megatron-LM           https://github.com/NVIDIA/Megatron-LM
    Megatron-DeepSpeed    https://github.com/deepspeedai/Megatron-DeepSpeed

`make checkouts` clones the pinned commits where there is internet.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "HOLMES_CHECKOUTS"


def checkouts_folder() -> Path:
    """Return the folder that contains the checkouts. It need not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(VARIABLE) or cache / "holmes_ext" / "checkouts").absolute()


def find_checkout(name: str) -> Path | None:
    """Return the folder of the checkout `name`, or None if it contains no pretrain_gpt.py."""
    folder = checkouts_folder() / name
    return folder if (folder / "pretrain_gpt.py").is_file() else None


def why_missing(name: str) -> str:
    """Return the reason for skipping what needs the checkout `name`."""
    return f"no checkout of {name} in {checkouts_folder()}: make checkouts"


def checkout_or_skip(name: str) -> Path:
    """Return the folder of the checkout `name`; skip the running test if there is none."""
    import pytest  # the benchmarks use this module without pytest

    folder = find_checkout(name)
    if folder is None:
        pytest.skip(why_missing(name))
    return folder

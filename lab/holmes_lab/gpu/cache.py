"""The folder in which the emulated GPU's libraries are built and kept.

These libraries are the emulated CUDA runtime, the operators of torch, and NCCL.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_ext.words import why

#: Environment variable that names another folder.
VARIABLE = "HOLMES_GPU_CACHE"


def cache_folder() -> Path:
    """Return the folder of the emulated GPU's built libraries.

    It is $HOLMES_GPU_CACHE, or a folder in the user's cache.
    """
    return Path(os.environ.get(VARIABLE) or Path(user_cache(), "holmes_ext", "gpu")).absolute()


def user_cache() -> Path:
    """Return the user's cache folder: $XDG_CACHE_HOME, or ~/.cache.

    If the user has no home folder, it is the folder for temporary files, such as /tmp.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache"
    except (
        RuntimeError
    ):  # no HOME, and the user's number is not in /etc/passwd, as in some containers
        return Path(tempfile.gettempdir())


def make_cache(cache: Path) -> None:
    """Create the folder of the emulated GPU's built libraries.

    Raises:
        HolmesError: the folder cannot be created.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HolmesError(
            f"{cache}: the emulated GPU cannot be built there ({why(error)}); name another folder with "
            f"{VARIABLE}"
        ) from None

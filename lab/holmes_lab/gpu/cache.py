"""The folder for the emulated GPU's libraries: they are built and kept there.

These libraries are the emulated CUDA runtime, the operators of torch, and NCCL.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_ext.files import require_own
from holmes_ext.words import why

#: Environment variable that names another folder.
VARIABLE = "HOLMES_GPU_CACHE"
_WAY_OUT = f"name another folder with {VARIABLE}"


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
    except RuntimeError:
        # There is no HOME, and the user's number is not in /etc/passwd, as in some containers.
        return Path(tempfile.gettempdir())


def make_cache(cache: Path) -> None:
    """Create the folder of the emulated GPU's built libraries.

    Raises:
        HolmesError: the folder cannot be created, or another user can change it.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HolmesError(
            f"{cache}: the emulated GPU cannot be built there ({why(error)}); {_WAY_OUT}"
        ) from None
    require_own_cache(cache)


def require_own_cache(cache: Path) -> None:
    """Check that no other user, except root, can put libraries into the cache: jobs of this user load them.

    Raises:
        HolmesError: Another user owns the folder or a component in it, or everybody may change it.
    """
    require_own(cache, "the cache of the emulated GPU", _WAY_OUT)
    components = cache.iterdir() if cache.is_dir() else ()
    for path in components:
        require_own(path, "a component of the emulated GPU", _WAY_OUT)

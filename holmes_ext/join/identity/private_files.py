"""Files and folders that only this user can read, for keys and invitations. Needs no torch.

A file is complete or absent, also on a full disk. A link at its path is not followed. A file or folder of
another user is refused, because its owner knows its content, or could replace it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_ext.words import why

#: Mode bits that let other users read, write or enter.
_OTHERS = 0o077
#: Mode bits that let other users write.
_OTHERS_WRITE = 0o022
#: Most bytes of a file that is read.
_MOST_BYTES = 2**18
_ROOT = 0


def state_home(environ: Mapping[str, str]) -> Path:
    """Return the folder for state of this user: XDG_STATE_HOME/holmes_ext, or ~/.local/state/holmes_ext."""
    state = environ.get("XDG_STATE_HOME")
    if not state:
        state = str(Path(environ.get("HOME", "/")) / ".local" / "state")
    return Path(state) / "holmes_ext"


def make_private_folder(path: Path) -> None:
    """Make a folder that only this user can enter, unless it exists.

    Raises:
        HolmesError: The folder cannot be made, is another user's, or can be read by others.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise HolmesError(
            f"{path}: no private folder can be made there ({why(error)}); set XDG_STATE_HOME to another place"
        ) from None
    check_private_folder(path)


def check_private_folder(path: Path) -> None:
    """Raise HolmesError if a folder is another user's, or others can read it."""
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise HolmesError(f"{path}: is no folder, or a link; remove it")
    if state.st_uid != os.geteuid():
        raise HolmesError(f"{path}: belongs to user {state.st_uid}, not to {os.geteuid()}")
    if state.st_mode & _OTHERS:
        raise HolmesError(f"{path}: others on this host can read it: chmod 700 {path}")


def write_private(path: Path, text: str, replaces: bool = False) -> None:
    """Write a file that only this user can read; after an error, nothing has changed.

    Args:
        path: The file.
        text: Content of the file.
        replaces: Replace a file of this name. Otherwise it must not exist.

    Raises:
        OSError: The file cannot be written; FileExistsError: it exists.
    """
    # Another process, or user, cannot guess the name; O_EXCL and O_NOFOLLOW refuse an existing file or link.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            os.rename(partial, path)
        else:
            os.link(partial, path)  # fails if `path` exists, also if it is a link
    finally:
        with contextlib.suppress(FileNotFoundError):  # it was renamed
            os.unlink(partial)


def read_private(path: Path, is_given: bool = False) -> str:
    """Return the text of a file of this user.

    Args:
        path: The file.
        is_given: The user has put the file there, so root may own it, and others may read it.

    Raises:
        FileNotFoundError: There is no such file.
        HolmesError: The file cannot be read, is another user's, or others can read or write it.
    """
    try:
        # O_NONBLOCK: opening a pipe without a writer must not wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            _check_private_file(path, os.fstat(descriptor), is_given)
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise HolmesError(f"{path}: cannot be read ({why(error)})") from None
    if len(data) > _MOST_BYTES:
        raise HolmesError(f"{path}: is longer than {_MOST_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeError:
        raise HolmesError(f"{path}: cannot be read (it is not UTF-8)") from None


def can_others_read(path: Path) -> bool:
    """Return whether other users of this host can read a file."""
    return bool(path.stat().st_mode & _OTHERS)


def _check_private_file(path: Path, state: os.stat_result, is_given: bool) -> None:
    """Raise HolmesError if a file is no regular file, or if other users may have changed or read it.

    Args:
        path: The file, for messages.
        state: Its fstat().
        is_given: The user has put the file there, so root may own it, and others may read it. Else
            only the user may own it, and nobody else may read it.
    """
    if not stat.S_ISREG(state.st_mode):
        raise HolmesError(f"{path}: is no regular file")
    user = os.geteuid()
    owners = (user, _ROOT) if is_given else (user,)
    if state.st_uid not in owners:
        raise HolmesError(
            f"{path}: belongs to user {state.st_uid}, not to {user}: chown {user} {path}"
        )
    if state.st_mode & (_OTHERS_WRITE if is_given else _OTHERS):
        raise HolmesError(
            f"{path}: others on this host can use it (mode {stat.S_IMODE(state.st_mode):o}):"
            f" chmod 600 {path}"
        )

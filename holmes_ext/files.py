"""Writes files that are never seen incomplete, and checks who may change a file.

In a folder to which others can write, another user may place a link that leads to any file of this user.
So a new file gets a name that nobody can guess and must not exist (O_EXCL, O_NOFOLLOW), and links of other
users are not followed.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import stat
import time
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_ext.words import why

#: Links to links that are followed.
_MOST_LINKS = 40
#: Longest wait for the reader of a pipe that is written as a file, in seconds.
_PIPE_S = 5.0
#: Seconds between two attempts to open a pipe that nobody reads yet.
_RETRY_S = 0.02
#: Permissions of a new file, without those that the umask takes away.
_NEW_MODE = 0o666
_ROOT = 0


def save(path: str | Path, text: str, what: str) -> None:
    """Replace the content of a file that the user named; after an error the file is unchanged.

    Args:
        path: The file.
        text: Its new content.
        what: Noun for the content in the error message, such as "the plan".

    Raises:
        HolmesError: the file cannot be written.
    """
    try:
        write_whole(path, text)
    except (OSError, ValueError) as error:
        raise HolmesError(
            f"{path}: {what} cannot be written ({why(error)}); name another place"
        ) from None


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Replace the content of a file, or leave the file unchanged if that fails.

    The content is written to a new file with a random name in the same folder, which then replaces the
    file. The file keeps its permissions. A pipe or a device such as /dev/stdout is written to instead
    of replaced. A link is followed if it belongs to this user or to root.

    Raises:
        OSError: the file cannot be written, or is a link of another user.
    """
    target = _followed(Path(path))
    data = content.encode("utf-8") if isinstance(content, str) else content
    if target.exists() and not target.is_file():
        _write_into(target, data)
    else:
        _replace(Path(os.path.realpath(target)) if _is_of_kernel(target) else target, data)


def require_own(path: str | Path, content: str, way_out: str) -> None:
    """Raise an error if another user, except root, owns a file or folder, or if everybody may change it.

    Args:
        path: The file or folder. Nothing is checked if it does not exist.
        content: Noun for the content, such as "the cache", for the error message.
        way_out: End of the error message.

    Raises:
        HolmesError: Another user can decide what is in the file or folder.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise HolmesError(f"{path}: {content} cannot be used ({why(error)}); {way_out}") from None
    if not _is_trusted(status.st_uid):
        problem = f"belongs to user {status.st_uid}"
    elif status.st_mode & stat.S_IWOTH:
        problem = f"can be changed by every user (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise HolmesError(f"{path}: {content} {problem}; {way_out}")


def _is_trusted(user: int) -> bool:
    """Return whether this process may trust files of a user: root, or the user of this process."""
    return user in (os.geteuid(), _ROOT)


def _is_of_kernel(path: Path) -> bool:
    """Return whether a path is in /proc (also as /dev/fd/1), whose links only the kernel can follow."""
    return Path(os.path.realpath(path.parent)).is_relative_to("/proc")


def _followed(path: Path) -> Path:
    """Return the path to which a link leads, or the path itself if it is no link.

    Links in /proc are returned unchanged: only the kernel can follow them.

    Raises:
        OSError: The link belongs to another user than this one and root, or the path cannot be examined.
    """
    for _ in range(_MOST_LINKS):
        try:
            status = path.lstat()
        except FileNotFoundError:
            return path
        if not stat.S_ISLNK(status.st_mode) or _is_of_kernel(path):
            return path
        if not _is_trusted(status.st_uid):
            raise PermissionError(errno.EPERM, f"it is a link of user {status.st_uid}")
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _replace(target: Path, data: bytes) -> None:
    """Replace `target` by a new file with this content and the permissions of `target`."""
    partial = target.with_name(f".holmes-{secrets.token_hex(8)}")
    try:
        mode = stat.S_IMODE(target.lstat().st_mode)
    except FileNotFoundError:  # the file is new
        mode = None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # Until an existing file is replaced, nobody else may read the new content.
    descriptor = os.open(partial, flags, _NEW_MODE if mode is None else stat.S_IRUSR | stat.S_IWUSR)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
            if mode is not None:
                os.fchmod(descriptor, mode)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write_into(path: Path, data: bytes) -> None:
    """Write to a pipe or a device.

    Raises:
        OSError: It cannot be written, or nobody reads the pipe for _PIPE_S seconds.
    """
    descriptor = _open_for_writing(path)
    try:
        left = memoryview(data)
        while left:
            _, writable, _ = select.select([], [descriptor], [], _PIPE_S)
            if not writable:
                raise TimeoutError(f"nobody reads it for {_PIPE_S:.0f} s")
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def _open_for_writing(path: Path) -> int:
    """Return a descriptor of a pipe or a device, after waiting for the reader of a pipe."""
    end = time.monotonic() + _PIPE_S
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: nobody reads the pipe
                raise
            if time.monotonic() > end:
                raise TimeoutError(f"nobody reads it for {_PIPE_S:.0f} s") from None
        time.sleep(_RETRY_S)

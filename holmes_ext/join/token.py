"""Token of a run, the shared secret of its jobs: whoever has it may join. Needs no torch.

The token comes from the first of these that exists:

    HOLMES_JOIN_TOKEN         the token itself
    HOLMES_JOIN_TOKEN_FILE    a file that contains it
    neither                   `holmes join serve` keeps a random token for each port in
                              ~/.local/state/holmes_ext (mode 0600), where `holmes join status` on the same
                              host reads it
"""

from __future__ import annotations

import math
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_ext.words import why

#: Characters of the shortest valid token.
LEAST = 12
#: Entropy below which a warning is printed, in bits; random tokens have 144.
_SAFE_BITS = 72
#: Bytes of a random token.
_DRAWN_BYTES = 18
#: Mode bits of a file that let other users access it.
_OTHERS = 0o077
#: Bytes of the largest file that is read as a token.
_MOST_BYTES = 4096


def token_from(environ: Mapping[str, str], port: int = 0) -> str:
    """Return the token (shared secret) of the run, from the environment or from a file.

    HOLMES_JOIN_TOKEN has the token, or HOLMES_JOIN_TOKEN_FILE names a file with it. Without both,
    it is the token that `holmes join serve` has stored on this host for its port.

    Args:
        environ: Environment variables.
        port: Port of the coordinator, if it may run on this host; 0: it runs elsewhere.

    Raises:
        HolmesError: There is no token, or it is invalid.
    """
    if "HOLMES_JOIN_TOKEN" in environ:
        return _checked(environ["HOLMES_JOIN_TOKEN"].strip(), "HOLMES_JOIN_TOKEN")
    path = environ.get("HOLMES_JOIN_TOKEN_FILE")
    if path:
        return _read(Path(path), "HOLMES_JOIN_TOKEN_FILE: ")
    if port:
        kept = kept_file(environ, port)  # of `holmes join serve` on this host
        if kept.exists():
            return _read(kept)
    raise HolmesError(
        "a joined job needs the run's token: set HOLMES_JOIN_TOKEN, or HOLMES_JOIN_TOKEN_FILE to the file "
        "that `holmes join serve` names"
    )


def served_token(environ: Mapping[str, str], port: int) -> tuple[str, Path | None]:
    """Return the token (shared secret) with which `holmes join serve` starts; create it if needed.

    The token is HOLMES_JOIN_TOKEN, or the content of the file HOLMES_JOIN_TOKEN_FILE, or of a
    default file for this port. A file that does not exist is created with a random token.

    Args:
        environ: Environment variables.
        port: Port of the coordinator.

    Returns:
        The token, and the path of its file; None instead of the path if HOLMES_JOIN_TOKEN is set.

    Raises:
        HolmesError: The token is invalid, or the file cannot be written.
    """
    if "HOLMES_JOIN_TOKEN" in environ:
        return token_from(environ), None
    path = Path(environ.get("HOLMES_JOIN_TOKEN_FILE") or kept_file(environ, port))
    if not path.exists():
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Only this user may read the file, from its creation on; an existing file is not overwritten.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(_DRAWN_BYTES) + "\n")
        except OSError as error:
            raise HolmesError(
                f"{path}: the run's token cannot be kept there ({why(error)}); name another file with"
                " HOLMES_JOIN_TOKEN_FILE, or set HOLMES_JOIN_TOKEN"
            ) from None
    return _read(path), path


def kept_file(environ: Mapping[str, str], port: int) -> Path:
    """Return the file in which `holmes join serve` keeps the token of a port."""
    state = environ.get("XDG_STATE_HOME")
    if not state:
        state = str(Path(environ.get("HOME", "/")) / ".local" / "state")
    return Path(state) / "holmes_ext" / f"join-{port}.token"


def warning_of(token: str) -> str:
    """Return a warning if the token can be guessed; "" if it cannot.

    Its entropy is estimated as if each character were drawn from the distinct characters of the token.
    """
    distinct_characters = max(2, len(set(token)))
    entropy_bits = len(token) * math.log2(distinct_characters)
    if entropy_bits >= _SAFE_BITS:
        return ""
    return "the token can be guessed by trying; let `holmes join serve` draw one, or: openssl rand -base64 18"


def exposure_of(path: Path) -> str:
    """Return a warning if other users of this host can read the file; "" if they cannot."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        return f"others on this host can read {path} (mode {mode:o}): chmod 600 {path}"
    return ""


def _read(path: Path, source: str = "") -> str:
    """Return the token in a file; raise HolmesError if it cannot be read, or is invalid.

    Args:
        path: The file.
        source: Prefix of error messages, such as the name of a variable.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise HolmesError(f"{source}{path}: is no file, so no token is read from it")
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        return _checked(text.decode("utf-8").strip(), f"{source}{path}")
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else why(error)
        raise HolmesError(f"{source}{path}: cannot be read ({reason})") from None


def _checked(token: str, source: str) -> str:
    """Return the token; raise HolmesError if it is too short, too long or not printable."""
    if len(token) < LEAST:
        problem = f"has {len(token)} characters" if token else "is empty"
        raise HolmesError(
            f"{source}: the token {problem}, it needs {LEAST} at least; let `holmes join serve` draw one"
        )
    if len(token) > _MOST_BYTES or not token.isprintable():
        raise HolmesError(
            f"{source}: the token is one line of at most {_MOST_BYTES} characters that can be printed"
        )
    return token

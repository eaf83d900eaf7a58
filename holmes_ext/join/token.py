"""The token of a run: whoever has it may join. Needs no torch.

HOLMES_JOIN_TOKEN         the token itself
HOLMES_JOIN_TOKEN_FILE    a file that holds it
neither                   `holmes join serve` keeps one for each port in ~/.local/state/holmes_ext, mode 0600,
                          and `holmes join status` on the same host reads it there
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

#: Characters of the shortest token that is taken.
LEAST = 12
#: Bits that a token should have at least; the ones that are drawn here have 144.
_SAFE_BITS = 72
_DRAWN_BYTES = 18
#: Bytes of the largest file that is read as a token.
_MOST_BYTES = 4096


def token_from(environ: Mapping[str, str], port: int = 0) -> str:
    """From the environment, else what `serve` keeps for this port (not 0) on this host. HolmesError: none, or
    unusable."""
    if "HOLMES_JOIN_TOKEN" in environ:
        return _checked(environ["HOLMES_JOIN_TOKEN"].strip(), "HOLMES_JOIN_TOKEN")
    if path := environ.get("HOLMES_JOIN_TOKEN_FILE"):
        return _read(Path(path), "HOLMES_JOIN_TOKEN_FILE: ")
    if port and (kept := kept_file(environ, port)).exists():
        return _read(kept)
    raise HolmesError(
        "a joined job needs the run's token: set HOLMES_JOIN_TOKEN, or HOLMES_JOIN_TOKEN_FILE to the file "
        "that `holmes join serve` names"
    )


def served_token(environ: Mapping[str, str], port: int) -> tuple[str, Path | None]:
    """The token, and its file (None: the environment has it). What is not there is drawn and kept."""
    if "HOLMES_JOIN_TOKEN" in environ:
        return token_from(environ), None
    path = Path(environ.get("HOLMES_JOIN_TOKEN_FILE") or kept_file(environ, port))
    if not path.exists():
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    """Where `serve` keeps the token of a port."""
    state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME", "/")) / ".local" / "state"
    return Path(state) / "holmes_ext" / f"join-{port}.token"


def warning_of(token: str) -> str:
    """One line where the token can be guessed; "" where it cannot."""
    if len(token) * math.log2(max(2, len(set(token)))) >= _SAFE_BITS:
        return ""
    return "the token can be guessed by trying; let `holmes join serve` draw one, or: openssl rand -base64 18"


def exposure_of(path: Path) -> str:
    """One line where others on this host can read the file; "" where they cannot."""
    mode = stat.S_IMODE(path.stat().st_mode)
    return (
        f"others on this host can read {path} (mode {mode:o}): chmod 600 {path}"
        if mode & 0o077
        else ""
    )


def _read(path: Path, source: str = "") -> str:
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
    if len(token) < LEAST:
        what = f"has {len(token)} characters" if token else "is empty"
        raise HolmesError(
            f"{source}: the token {what}, it needs {LEAST} at least; let `holmes join serve` draw one"
        )
    if len(token) > _MOST_BYTES or not token.isprintable():
        raise HolmesError(
            f"{source}: the token is one line of at most {_MOST_BYTES} characters that can be printed"
        )
    return token

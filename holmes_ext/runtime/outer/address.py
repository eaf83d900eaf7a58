"""What stands after --holmes-join, and the token of the run. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holmes_ext.errors import HolmesError

#: Where `holmes join serve` listens when nothing else is said.
PORT = 29600


@dataclass(frozen=True)
class JoinAddress:
    """NAME@HOST:PORT: this job's name in the run, and where the coordinator is."""

    job: str
    host: str
    port: int


def parse_address(text: str) -> JoinAddress:
    """HolmesError when it is not NAME@HOST or NAME@HOST:PORT."""
    job, at, where = text.partition("@")
    host, colon, port = where.rpartition(":") if ":" in where else (where, "", str(PORT))
    if (
        not at
        or not host
        or not job
        or not all(c.isalnum() or c in "-_." for c in job)
        or not port.isdecimal()
        or not 0 < int(port) < 65536
    ):
        raise HolmesError(f"--holmes-join: {text!r} is not NAME@HOST:PORT, such as east@10.0.0.1:{PORT}")
    return JoinAddress(job, host, int(port))


def token_from(environ: Mapping[str, str]) -> str:
    """HOLMES_JOIN_TOKEN, or the content of the file that HOLMES_JOIN_TOKEN_FILE names; HolmesError when there is
    neither."""
    if token := environ.get("HOLMES_JOIN_TOKEN", "").strip():
        return token
    if path := environ.get("HOLMES_JOIN_TOKEN_FILE"):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        except OSError as error:
            raise HolmesError(f"HOLMES_JOIN_TOKEN_FILE: {path} cannot be read ({error.strerror})") from None
    raise HolmesError(
        "a joined job needs the run's token: set HOLMES_JOIN_TOKEN to the one that `holmes join serve` was"
        " given or printed"
    )

"""What jobs tell the coordinator, checked when it comes: a report that could mislead is refused with a
HolmesError, and its job is dropped. Needs no torch.

    hello      who joins, with what         heartbeat   that it lives, and how fast it is
    ready      a pseudo-gradient can go     done        whose came, and who sent what he should not have
    checked    what came, as salted sums; by what factors to add it up
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.document import Table
from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.address import is_name
from holmes_ext.runtime.sockets.addresses import split_address
from holmes_ext.runtime.sockets.handshake import printable

#: Of whole numbers (versions, rounds, elements): what no run reaches.
MOST = 2**60
_MOST_TOKENS, _MOST_NORM = 1e18, 1e30
#: Of all that a job says about its model and settings.
_DEEPEST, _LONGEST_TEXT = 4, 2**16
#: Of a line for the log.
_LINE = 300
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Claim:
    """The round of its last outer step, and a checksum ("": not told)."""

    version: int
    checksum: str = ""


@dataclass(frozen=True)
class Hello:
    """agreed: the same in all jobs. maps: by position, (start, stop, rank) of who exchanges what. addresses:
    by rank, HOST:PORT or "". round: the last it knows of; entered: it is in the run; peers: jobs that it
    knows."""

    agreed: Mapping[str, Any]
    maps: Mapping[str, tuple[int, ...]]
    addresses: tuple[str, ...]
    claims: tuple[Claim, ...]
    min: int
    timeout: float
    round: int = 0
    entered: bool = False
    peers: tuple[str, ...] = ()

    @property
    def totals(self) -> dict[str, int]:
        """Elements of each position."""
        return {position: ranges[-2] for position, ranges in self.maps.items()}


@dataclass(frozen=True)
class ReadyReport:
    """norm: of the pseudo-gradient as it will be sent; None: it does not count, and `why`. salted: the
    fragment's checksum with the salt of `salt_round`."""

    round: int
    fragment: int
    claims: tuple[Claim, ...]
    tokens: float
    norm: float | None = None
    why: str = ""
    salted: str = ""
    salt_round: int = 0


@dataclass(frozen=True)
class Offer:
    """Of rounds=async: a pseudo-gradient that waits for a round. slack_s: seconds until its sum would be
    applied; the rest: as of ReadyReport."""

    fragment: int
    tokens: float
    norm: float | None = None
    why: str = ""
    slack_s: float = 0.0


@dataclass(frozen=True)
class NextReport:
    """Of rounds=async: what a job has, and what it offers, by fragment."""

    claims: tuple[Claim, ...]
    offers: Mapping[int, Offer] = field(default_factory=dict)


@dataclass(frozen=True)
class DoneReport:
    """unreached: jobs with which the exchange failed; faults: jobs whose data cannot be used, and why."""

    round: int
    attempt: int
    unreached: tuple[str, ...] = ()
    faults: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckedReport:
    """digests: salted sums of what came, by job; factors: of each job's pseudo-gradient in the aggregate."""

    round: int
    attempt: int
    check: int
    digests: Mapping[str, str]
    factors: Mapping[str, float]
    gap: float = 1.0


#: What `holmes join status` shows of a heartbeat.
TELEMETRY = ("round", "step", "steps_per_second", "bits_per_second", "drift")


def hello_from(document: dict[str, Any]) -> Hello:
    told = Table(document, "the hello of a job")
    addresses = told.list("addresses", str)
    if not addresses:
        raise HolmesError(f"{told.at('addresses')} is empty")
    for address in filter(None, addresses):
        try:
            split_address(address)
        except ValueError as error:
            raise HolmesError(f"{told.at('addresses')}: {error}") from None
    maps = told.table("maps")
    made = {
        position: _ranges(maps, position, len(addresses))
        for position in maps.values
        if _is_line(position, maps)
    }
    if not made:
        raise HolmesError(f"{told.at('maps')} is empty")
    peers = told.list("peers", str, ())
    if not all(map(is_name, peers)):
        raise HolmesError(f"{told.at('peers')}: names of jobs are letters, digits, '-', '_' and '.'")
    return Hello(
        agreed=_plain(told.table("agreed").values, told.at("agreed")),
        maps=made,
        addresses=addresses,
        claims=_claims(told),
        min=_number(told, "min", 1, 64),
        timeout=_real(told, "timeout", 86400.0),
        round=_number(told, "round", 0, MOST, 0),
        entered=told.take("entered", bool, False),
        peers=peers[:64],
    )


def ready_from(document: dict[str, Any], fragments: int) -> ReadyReport:
    """fragments: that the run has."""
    told = Table(document, "the report of a job that is ready")
    claims = _claims(told)
    if len(claims) != fragments:
        raise HolmesError(f"{told.at('versions')}: {len(claims)} fragments, but the run has {fragments}")
    norm = None
    if "norm" in document:
        norm = _real(told, "norm", _MOST_NORM)
    return ReadyReport(
        round=_number(told, "round", 1, MOST),
        fragment=_number(told, "fragment", 0, fragments - 1),
        claims=claims,
        tokens=_real(told, "tokens", _MOST_TOKENS),
        norm=norm,
        why=printable(told.take("why", str, ""), _LINE),
        salted=_checksum(told, "salted"),
        salt_round=_number(told, "salt_round", 0, MOST, 0),
    )


def next_from(document: dict[str, Any], fragments: int) -> NextReport:
    """fragments: that the run has."""
    told = Table(document, "the report of a job that asks for its next round")
    claims = _claims(told)
    if len(claims) != fragments:
        raise HolmesError(f"{told.at('versions')}: {len(claims)} fragments, but the run has {fragments}")
    offers = [_offer(one, fragments) for one in (told.tables("offers") or ())]
    return NextReport(claims, {one.fragment: one for one in offers})


def _offer(told: Table, fragments: int) -> Offer:
    return Offer(
        fragment=_number(told, "fragment", 0, fragments - 1),
        tokens=_real(told, "tokens", _MOST_TOKENS),
        norm=_real(told, "norm", _MOST_NORM) if "norm" in told.values else None,
        why=printable(told.take("why", str, ""), _LINE),
        slack_s=_real(told, "slack_s", 86400.0, 0.0),
    )


def done_from(document: dict[str, Any]) -> DoneReport:
    told = Table(document, "the report of a job that is done")
    faults = told.table("faults", {})
    return DoneReport(
        round=_number(told, "round", 1, MOST),
        attempt=_number(told, "attempt", 0, MOST),
        unreached=told.list("unreached", str, ()),
        faults={name: printable(faults.take(name, str), _LINE) for name in faults.values},
    )


def checked_from(document: dict[str, Any]) -> CheckedReport:
    told = Table(document, "the report of a job that has checked")
    digests, factors = told.table("digests", {}), told.table("factors", {})
    return CheckedReport(
        round=_number(told, "round", 1, MOST),
        attempt=_number(told, "attempt", 0, MOST),
        check=_number(told, "check", 0, MOST),
        digests={name: _checksum(digests, name) for name in digests.values},
        factors={name: float(factors.take(name, float)) for name in factors.values},
        gap=max(1.0, _real(told, "gap", 1e30, 1.0)),
    )


def telemetry_from(document: dict[str, Any]) -> dict[str, float]:
    """What of a heartbeat is shown; everything else is left."""
    told = Table(document, "the heartbeat of a job")
    given = [name for name in TELEMETRY if document.get(name) is not None]
    return {name: told.take(name, float) for name in given}


def _claims(told: Table) -> tuple[Claim, ...]:
    versions, checksums = told.list("versions", int), told.list("checksums", str)
    if len(versions) != len(checksums) or not versions:
        raise HolmesError(f"{told.at('versions')}: {len(versions)} of them, and {len(checksums)} checksums")
    if not all(0 <= version <= MOST for version in versions):
        raise HolmesError(f"{told.at('versions')}: not all are rounds that can exist")
    if not all(not text or _CHECKSUM.fullmatch(text) for text in checksums):
        raise HolmesError(f"{told.at('checksums')}: not all are 16 hexadecimal digits")
    return tuple(map(Claim, versions, checksums))


def _ranges(maps: Table, position: str, ranks: int) -> tuple[int, ...]:
    """(start, stop, rank), ...: one after the other from element 0, with no hole."""
    flat, at = maps.list(position, int), 0
    if not flat or len(flat) % 3:
        raise HolmesError(f"{maps.at(position)}: not (start, stop, rank) of ranges")
    for start, stop, rank in zip(flat[::3], flat[1::3], flat[2::3]):
        if not (start == at < stop <= MOST and 0 <= rank < ranks):
            why = f"elements {start} to {stop} of rank {rank} follow element {at} of {ranks} ranks' share"
            raise HolmesError(f"{maps.at(position)}: {why}")
        at = stop
    return flat


def _is_line(text: str, told: Table) -> bool:
    if len(text) > _LINE or not text.isprintable():
        raise HolmesError(f"{told.source}: a position of its maps has no name that can be shown")
    return True


def _plain(value: Any, at: str, depth: int = 0) -> Any:
    """The value, if it is made of texts, numbers and tables that are not deep."""
    if isinstance(value, dict) and depth < _DEEPEST:
        return {printable(key, _LINE): _plain(item, at, depth + 1) for key, item in value.items()}
    if isinstance(value, list) and depth < _DEEPEST:
        return [_plain(item, at, depth + 1) for item in value]
    if isinstance(value, str):
        return printable(value, _LONGEST_TEXT)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise HolmesError(f"{at} is nested deeper than {_DEEPEST} tables")


def _number(told: Table, key: str, least: int, most: int, default: int | None = None) -> int:
    value: int = told.take(key, int) if default is None else told.take(key, int, default)
    if not least <= value <= most:
        raise HolmesError(f"{told.at(key)}: {value} is not {least} to {most}")
    return value


def _real(told: Table, key: str, most: float, default: float | None = None) -> float:
    value = float(told.take(key, float) if default is None else told.take(key, float, default))
    if not 0 <= value <= most:
        raise HolmesError(f"{told.at(key)}: {value:g} is not 0 to {most:g}")
    return value


def _checksum(told: Table, key: str) -> str:
    text: str = told.take(key, str, "")
    if text and not _CHECKSUM.fullmatch(text):
        raise HolmesError(f"{told.at(key)}: {text!r:.40} is not 16 hexadecimal digits")
    return text

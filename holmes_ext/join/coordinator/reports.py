"""What jobs tell the coordinator, checked when it comes: a report that could mislead is refused with a
HolmesError, and its job is dropped. Needs no torch.

    hello      who joins, with what         heartbeat   that it lives, and how fast it is
    ready      a pseudo-gradient can go     done        whose came, and who sent what he should not have
    checked    what came, as salted sums; by what factors to add it up
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from holmes_ext.document import Table
from holmes_ext.errors import HolmesError
from holmes_ext.join.address import is_name
from holmes_ext.join.sockets.handshake import printable
from holmes_ext.runtime.sockets import split_address

T = TypeVar("T")
#: Of whole numbers (versions, rounds, elements): what no run reaches.
MOST = 2**60
_MOST_TOKENS, _MOST_NORM = 1e18, 1e30
#: Of all that a job says about its model and settings.
_DEEPEST, _LONGEST_TEXT = 4, 2**16
#: Of a line for the log.
_LINE = 300
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


def _told(read: Callable[..., Any], *limits: Any, **given: Any) -> Any:
    """A field that read(table, key, *limits) takes from a document; given: of dataclasses.field()."""
    return field(metadata={"read": read, "limits": limits}, **given)


def _read(cls: type[T], table: Table, **made: Any) -> T:
    """A report of `table`: what is not `made` is read as its field says, or has its default."""
    for item in fields(cls):  # type: ignore[arg-type]
        needed = item.default is MISSING and item.default_factory is MISSING
        if item.name not in made and (needed or item.name in table.values):
            made[item.name] = item.metadata["read"](table, item.name, *item.metadata["limits"])
    return cls(**made)


def _number(table: Table, key: str, least: int, most: int) -> int:
    value: int = table.take(key, int)
    if not least <= value <= most:
        raise HolmesError(f"{table.at(key)}: {value} is not {least} to {most}")
    return value


def _real(table: Table, key: str, most: float) -> float:
    value = float(table.take(key, float))
    if not 0 <= value <= most:
        raise HolmesError(f"{table.at(key)}: {value:g} is not 0 to {most:g}")
    return value


def _line(table: Table, key: str) -> str:
    return printable(table.take(key, str), _LINE)


def _checksum(table: Table, key: str) -> str:
    text: str = table.take(key, str)
    if text and not _CHECKSUM.fullmatch(text):
        raise HolmesError(f"{table.at(key)}: {text!r:.40} is not 16 hexadecimal digits")
    return text


def _by_job(table: Table, key: str, read: Callable[[Table, str], Any]) -> dict[str, Any]:
    values = table.table(key)
    return {name: read(values, name) for name in values.values}


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
    min: int = _told(_number, 1, 64)
    timeout: float = _told(_real, 86400.0)
    round: int = _told(_number, 0, MOST, default=0)
    entered: bool = _told(Table.take, bool, default=False)
    peers: tuple[str, ...] = ()

    @property
    def totals(self) -> dict[str, int]:
        """Elements of each position."""
        return {position: ranges[-2] for position, ranges in self.maps.items()}


@dataclass(frozen=True)
class ReadyReport:
    """norm: of the pseudo-gradient as it will be sent; None: it does not count, and `why`. salted: the
    fragment's checksum with the salt of `salt_round`."""

    fragment: int
    claims: tuple[Claim, ...]
    round: int = _told(_number, 1, MOST)
    tokens: float = _told(_real, _MOST_TOKENS)
    norm: float | None = _told(_real, _MOST_NORM, default=None)
    why: str = _told(_line, default="")
    salted: str = _told(_checksum, default="")
    salt_round: int = _told(_number, 0, MOST, default=0)


@dataclass(frozen=True)
class Offer:
    """Of rounds=async: a pseudo-gradient that waits for a round. slack_s: seconds until its sum would be
    applied; the rest: as of ReadyReport."""

    fragment: int
    tokens: float = _told(_real, _MOST_TOKENS)
    norm: float | None = _told(_real, _MOST_NORM, default=None)
    why: str = _told(_line, default="")
    slack_s: float = _told(_real, 86400.0, default=0.0)


@dataclass(frozen=True)
class NextReport:
    """Of rounds=async: what a job has, and what it offers, by fragment."""

    claims: tuple[Claim, ...]
    offers: Mapping[int, Offer] = field(default_factory=dict)


@dataclass(frozen=True)
class DoneReport:
    """unreached: jobs with which the exchange failed; faults: jobs whose data cannot be used, and why."""

    round: int = _told(_number, 1, MOST)
    attempt: int = _told(_number, 0, MOST)
    unreached: tuple[str, ...] = _told(Table.list, str, default=())
    faults: Mapping[str, str] = _told(_by_job, _line, default_factory=dict)


@dataclass(frozen=True)
class CheckedReport:
    """digests: salted sums of what came, by job; factors: of each job's pseudo-gradient in the aggregate."""

    round: int = _told(_number, 1, MOST)
    attempt: int = _told(_number, 0, MOST)
    check: int = _told(_number, 0, MOST)
    digests: Mapping[str, str] = _told(_by_job, _checksum, default_factory=dict)
    factors: Mapping[str, float] = _told(
        _by_job, lambda table, key: float(table.take(key, float)), default_factory=dict
    )
    gap: float = _told(lambda table, key: max(1.0, _real(table, key, 1e30)), default=1.0)


#: What `holmes join status` shows of a heartbeat.
TELEMETRY = ("round", "step", "steps_per_second", "bits_per_second", "drift")


def hello_from(document: dict[str, Any]) -> Hello:
    hello = Table(document, "the hello of a job")
    addresses = hello.list("addresses", str)
    if not addresses:
        raise HolmesError(f"{hello.at('addresses')} is empty")
    for address in filter(None, addresses):
        try:
            split_address(address)
        except ValueError as error:
            raise HolmesError(f"{hello.at('addresses')}: {error}") from None
    maps = hello.table("maps")
    ranges = {
        position: _ranges(maps, position, len(addresses))
        for position in maps.values
        if _is_line(position, maps)
    }
    if not ranges:
        raise HolmesError(f"{hello.at('maps')} is empty")
    peers = hello.list("peers", str, ())
    if not all(map(is_name, peers)):
        raise HolmesError(
            f"{hello.at('peers')}: names of jobs are letters, digits, '-', '_' and '.'"
        )
    agreed = _plain(hello.table("agreed").values, hello.at("agreed"))
    return _read(
        Hello,
        hello,
        agreed=agreed,
        maps=ranges,
        addresses=addresses,
        claims=_claims(hello),
        peers=peers[:64],
    )


def ready_from(document: dict[str, Any], fragments: int) -> ReadyReport:
    """fragments: that the run has."""
    report = Table(document, "the report of a job that is ready")
    claims = _claims(report, fragments)
    return _read(
        ReadyReport, report, claims=claims, fragment=_number(report, "fragment", 0, fragments - 1)
    )


def next_from(document: dict[str, Any], fragments: int) -> NextReport:
    """fragments: that the run has."""
    report = Table(document, "the report of a job that asks for its next round")
    claims = _claims(report, fragments)
    offers = [
        _read(Offer, offer, fragment=_number(offer, "fragment", 0, fragments - 1))
        for offer in report.tables("offers")
    ]
    return NextReport(claims, {offer.fragment: offer for offer in offers})


def done_from(document: dict[str, Any]) -> DoneReport:
    return _read(DoneReport, Table(document, "the report of a job that is done"))


def checked_from(document: dict[str, Any]) -> CheckedReport:
    return _read(CheckedReport, Table(document, "the report of a job that has checked"))


def telemetry_from(document: dict[str, Any]) -> dict[str, float]:
    """What of a heartbeat is shown; everything else is left."""
    heartbeat = Table(document, "the heartbeat of a job")
    given = [name for name in TELEMETRY if document.get(name) is not None]
    return {name: heartbeat.take(name, float) for name in given}


def _claims(table: Table, fragments: int = 0) -> tuple[Claim, ...]:
    """fragments: that there must be; 0: any number."""
    versions, checksums = table.list("versions", int), table.list("checksums", str)
    if len(versions) != len(checksums) or not versions:
        raise HolmesError(
            f"{table.at('versions')}: {len(versions)} of them, and {len(checksums)} checksums"
        )
    if not all(0 <= version <= MOST for version in versions):
        raise HolmesError(f"{table.at('versions')}: not all are rounds that can exist")
    if not all(not text or _CHECKSUM.fullmatch(text) for text in checksums):
        raise HolmesError(f"{table.at('checksums')}: not all are 16 hexadecimal digits")
    if fragments and len(versions) != fragments:
        raise HolmesError(
            f"{table.at('versions')}: {len(versions)} fragments, but the run has {fragments}"
        )
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


def _is_line(text: str, table: Table) -> bool:
    if len(text) > _LINE or not text.isprintable():
        raise HolmesError(f"{table.source}: a position of its maps has no name that can be shown")
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

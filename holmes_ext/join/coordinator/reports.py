"""Reports that jobs send to the coordinator, and their validation. Needs no torch.

A report that is malformed or implausible raises HolmesError, and the coordinator drops its job.

    hello       the job that joins: model, shards, settings, versions of its fragments
    heartbeat   the job is alive; telemetry
    ready       (rounds=sync) the job has a pseudo-gradient for the next round
    next        (rounds=async) the job asks for any round, and lists all pseudo-gradients it offers
    done        the exchange has ended; jobs that could not be reached or sent unusable data
    checked     salted digests of the received data, and factors for its sum
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from holmes_ext.document import Table
from holmes_ext.errors import HolmesError
from holmes_ext.join.address import is_name
from holmes_ext.join.sockets.documents import pack, parsed_bytes
from holmes_ext.join.sockets.handshake import printable
from holmes_ext.runtime.sockets import split_address
from holmes_ext.words import counted

T = TypeVar("T")
#: Upper limit of whole numbers (versions, rounds, elements); no run reaches it.
MOST = 2**60
#: Upper limit of the tokens of a pseudo-gradient.
_MOST_TOKENS = 1e18
#: Upper limit of a norm, and of the gap.
_MOST_NORM = 1e30
#: Upper limit of a duration, in seconds.
_MOST_SECONDS = 86400.0
#: Jobs that a job may wait for, and jobs that a report may name.
_MOST_JOBS = 64
#: Ranks of a job, and fragments of a model.
_MOST_RANKS = 2**16
_MOST_FRAGMENTS = 2**12
#: Memory of an address or claim of a job, in bytes.
_BYTES_PER_ENTRY = 192
#: Levels of nested tables in the settings of a job.
_DEEPEST = 4
#: Characters of a text in the settings of a job.
_LONGEST_TEXT = 2**16
#: Characters of a line for the log.
_LINE = 300
#: Numbers that describe a range in a shard map: start, stop, rank.
_RANGE_NUMBERS = 3
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


def _report_field(read: Callable[..., Any], *limits: Any, **field_arguments: Any) -> Any:
    """Declare a field of a report, and how `_read_report` reads it from the report's JSON document.

    Args:
        read: Function that reads and validates the value; it is called as read(table, key,
            *limits).
        limits: Further arguments of `read`, such as the least and the largest number.
        field_arguments: Arguments of dataclasses.field, such as `default`.

    Returns:
        The dataclass field.
    """
    return field(metadata={"read": read, "limits": limits}, **field_arguments)


def _read_report(cls: type[T], table: Table, **known_values: Any) -> T:
    """Return a report of class `cls` with the values of a parsed JSON table.

    Each field is read with the function that its definition in the class names (see
    `_report_field`). Fields with a default may be missing.

    Args:
        cls: Dataclass of the report.
        table: The JSON document of the report.
        known_values: Fields that the caller has read itself.

    Raises:
        HolmesError: A value is missing, has another type or exceeds its limits.
    """
    values = dict(known_values)
    for item in fields(cls):  # type: ignore[arg-type]
        if item.name in known_values:
            continue
        is_required = item.default is MISSING and item.default_factory is MISSING
        if is_required or item.name in table.values:
            read = item.metadata["read"]
            values[item.name] = read(table, item.name, *item.metadata["limits"])
    return cls(**values)


def _number(table: Table, key: str, least: int, most: int) -> int:
    """Return the whole number at `key`; raise HolmesError if it is not from `least` to `most`."""
    value: int = table.take(key, int)
    if not least <= value <= most:
        raise HolmesError(f"{table.at(key)}: {value} is not {least} to {most}")
    return value


def _real(table: Table, key: str, most: float) -> float:
    """Return the number at `key`; raise HolmesError if it is not from 0 to `most`."""
    value = float(table.take(key, float))
    if not 0 <= value <= most:
        raise HolmesError(f"{table.at(key)}: {value:g} is not 0 to {most:g}")
    return value


def _gap(table: Table, key: str) -> float:
    return max(1.0, _real(table, key, _MOST_NORM))


def _factor(table: Table, key: str) -> float:
    return float(table.take(key, float))


def _line(table: Table, key: str) -> str:
    """Return the text at `key`, cut to _LINE characters, with control characters replaced by "?"."""
    return printable(table.take(key, str), _LINE)


def _checksum(table: Table, key: str) -> str:
    """Return the checksum at `key`; "" if the job has computed none. HolmesError for any other text."""
    text: str = table.take(key, str)
    if text and not _CHECKSUM.fullmatch(text):
        raise HolmesError(f"{table.at(key)}: {text!r:.40} is not 16 hexadecimal digits")
    return text


def _by_job(table: Table, key: str, read: Callable[[Table, str], Any]) -> dict[str, Any]:
    """Return the table at `key` as a dict: name of a job -> its value, read by `read(table, name)`."""
    values = table.table(key)
    _require_at_most(len(values.values), _MOST_JOBS, table.at(key))
    return {name: read(values, name) for name in values.values}


def _jobs(table: Table, key: str) -> tuple[str, ...]:
    """Return the names of jobs at `key`; raise HolmesError if a run cannot have so many jobs."""
    names = table.list(key, str)
    _require_at_most(len(names), _MOST_JOBS, table.at(key))
    return names


def _require_at_most(count: int, most: int, location: str) -> None:
    """Raise HolmesError (a message that begins with `location`) if `count` is greater than `most`."""
    if count > most:
        raise HolmesError(f"{location} has {count} entries, more than {most}")


@dataclass(frozen=True, slots=True)
class Claim:
    """Version and checksum that a job reports for its copy of a fragment.

    A fragment is a part of the model. The coordinator compares the claims of all jobs to find jobs
    with outdated or wrong weights.
    """

    version: int  # round of the fragment's last outer step
    checksum: str = ""  # of the fragment's weights, 16 hexadecimal digits; "": not computed


@dataclass(frozen=True)
class Hello:
    """A job's description of itself, sent to the coordinator when the job joins or reconnects.

    The hello has the facts and settings that must be equal in all jobs, the elements and addresses of
    each rank, and the version of each fragment (part of the model).
    """

    #: Settings and facts about the model that must be equal in all jobs.
    agreed: Mapping[str, Any]
    #: Position in the model-parallel grid -> start, stop, rank, start, stop, rank, ...: the ranges of
    #: flat parameter elements there, and the rank that exchanges each range. An array takes a fifth of
    #: the memory of a tuple.
    maps: Mapping[str, Sequence[int]]
    #: HOST:PORT of each rank; "": the rank cannot be called.
    addresses: tuple[str, ...]
    #: Versions of the job's fragments.
    claims: tuple[Claim, ...]
    #: Jobs that must take part in a round (setting `min`).
    min: int = _report_field(_number, 1, _MOST_JOBS)
    #: Seconds that the job waits for other jobs.
    timeout: float = _report_field(_real, _MOST_SECONDS)
    #: Last round in which the job has trained or been.
    round: int = _report_field(_number, 0, MOST, default=0)
    #: The job already trains in this run: it reconnects.
    entered: bool = _report_field(Table.take, bool, default=False)
    #: Names of the other jobs of the run that this job knows.
    peers: tuple[str, ...] = ()
    memory_bytes: int = 0  # approximate memory of this object, without `agreed`
    agreed_bytes: int = 0  # approximate memory of `agreed`

    @property
    def totals(self) -> dict[str, int]:
        """Return the number of elements at each position of the model-parallel grid."""
        # A map is start, stop, rank, start, stop, rank, ...: the second last number is the last stop.
        return {position: ranges[-2] for position, ranges in self.maps.items()}


@dataclass(frozen=True)
class ReadyReport:
    """Report to the coordinator that a pseudo-gradient is ready to be sent (rounds=sync).

    The report has round, fragment (part of the model), norm and number of tokens, and the versions of
    all fragments. The tensor itself goes directly from job to job.
    """

    fragment: int
    #: Versions of all the job's fragments.
    claims: tuple[Claim, ...]
    round: int = _report_field(_number, 1, MOST)
    #: Tokens that the job has processed for this pseudo-gradient.
    tokens: float = _report_field(_real, _MOST_TOKENS)
    #: Euclidean norm of the pseudo-gradient as it will be sent; None: it must not count.
    norm: float | None = _report_field(_real, _MOST_NORM, default=None)
    #: Reason why the pseudo-gradient must not count.
    why: str = _report_field(_line, default="")
    #: Checksum of the fragment's weights with the coordinator's salt of round `salt_round`.
    salted: str = _report_field(_checksum, default="")
    salt_round: int = _report_field(_number, 0, MOST, default=0)


@dataclass(frozen=True)
class Offer:
    """Offer of a job to contribute the pseudo-gradient of a part of the model to a round (rounds=async).

    The tensor itself is not part of the offer, only its norm, its tokens and the time left until the
    job would apply the aggregate.
    """

    fragment: int
    #: Tokens that the job has processed for this pseudo-gradient.
    tokens: float = _report_field(_real, _MOST_TOKENS)
    #: Euclidean norm of the pseudo-gradient as it will be sent; None: it must not count.
    norm: float | None = _report_field(_real, _MOST_NORM, default=None)
    #: Reason why the pseudo-gradient must not count.
    why: str = _report_field(_line, default="")
    #: Seconds until the job would apply the sum.
    slack_s: float = _report_field(_real, _MOST_SECONDS, default=0.0)


@dataclass(frozen=True)
class NextReport:
    """Report of a job that asks the coordinator for its next round (rounds=async).

    The report has the versions of all fragments (parts of the model), and the job's offers: norm and
    tokens of the pseudo-gradients that it could send.
    """

    #: Versions of all the job's fragments.
    claims: tuple[Claim, ...]
    #: Fragment -> pseudo-gradient that waits for a round.
    offers: Mapping[int, Offer] = field(default_factory=dict)


@dataclass(frozen=True)
class DoneReport:
    """Report that a job has finished an exchange of pseudo-gradients with the other jobs.

    It names the jobs that could not be reached, and those that sent unusable data.
    """

    round: int = _report_field(_number, 1, MOST)
    #: Number of the exchange within the round.
    attempt: int = _report_field(_number, 0, MOST)
    #: Jobs with which the exchange failed.
    unreached: tuple[str, ...] = _report_field(_jobs, default=())
    #: Job -> reason why its data cannot be used.
    faults: Mapping[str, str] = _report_field(_by_job, _line, default_factory=dict)


@dataclass(frozen=True)
class CheckedReport:
    """Digests of the data that a job received from each other job in an exchange.

    The coordinator compares these reports: all jobs must have received the same data. A report also
    has the factors with which the job would add up the pseudo-gradients.
    """

    round: int = _report_field(_number, 1, MOST)
    #: Number of the exchange within the round.
    attempt: int = _report_field(_number, 0, MOST)
    #: Number of the comparison within the attempt.
    check: int = _report_field(_number, 0, MOST)
    #: Sending job -> salted digest of the received data.
    digests: Mapping[str, str] = _report_field(_by_job, _checksum, default_factory=dict)
    #: Job -> factor of its pseudo-gradient in the aggregate.
    factors: Mapping[str, float] = _report_field(_by_job, _factor, default_factory=dict)
    #: Divisor of the aggregate because it is stale (CO2), as this job computed it; 1: it counts in full.
    gap: float = _report_field(_gap, default=1.0)


#: Keys of a heartbeat that `holmes join status` shows.
TELEMETRY = ("round", "step", "steps_per_second", "bits_per_second", "drift")


def hello_from(document: dict[str, Any]) -> Hello:
    """Return the validated `hello` of a job: its description when it joins or reconnects.

    The document has the addresses of the job's ranks, the ranges of elements that each rank
    exchanges ("maps"), the settings and facts that must be equal in all jobs ("agreed"), the names
    of the jobs with which this job has trained ("peers"), and the versions and checksums of its
    fragments (claims).

    Raises:
        HolmesError: The document is malformed.
    """
    hello = Table(document, "the hello of a job")
    addresses = hello.list("addresses", str)  # HOST:PORT of each rank, "" if it cannot be called
    if not addresses:
        raise HolmesError(f"{hello.at('addresses')} is empty")
    _require_at_most(len(addresses), _MOST_RANKS, hello.at("addresses"))
    for address in filter(None, addresses):
        try:
            split_address(address)
        except ValueError as error:
            raise HolmesError(f"{hello.at('addresses')}: {error}") from None
    maps = hello.table("maps")
    # Position in the model-parallel grid -> [start, stop, rank, start, stop, rank, ...], as on the
    # wire: the elements from start to stop - 1 are exchanged by this rank.
    ranges = {}
    for position in maps.values:
        _require_printable(position, maps)
        ranges[position] = _validated_ranges(maps, position, ranks=len(addresses))
    if not ranges:
        raise HolmesError(f"{hello.at('maps')} is empty")
    peers = hello.list("peers", str, ())
    if not all(map(is_name, peers)):
        raise HolmesError(
            f"{hello.at('peers')}: names of jobs are letters, digits, '-', '_' and '.'"
        )
    agreed = _printable_json(hello.table("agreed").values, location=hello.at("agreed"))
    agreed_text = pack(agreed)
    claims = _claims(hello)
    map_bytes = sum(len(numbers) * numbers.itemsize for numbers in ranges.values())
    entries = len(ranges) + len(addresses) + len(claims)
    return _read_report(
        Hello,
        hello,
        agreed=agreed,
        maps=ranges,
        addresses=addresses,
        claims=claims,
        peers=peers[:_MOST_JOBS],
        memory_bytes=map_bytes + entries * _BYTES_PER_ENTRY,
        agreed_bytes=len(agreed_text) + parsed_bytes(agreed_text),
    )


def ready_from(document: dict[str, Any], fragments: int) -> ReadyReport:
    """Return a job's validated report "ready" (for a round); raise HolmesError if it is malformed.

    Args:
        document: The report, as parsed JSON. Its claims are the version and checksum of the job's
            copy of each fragment (part of the model).
        fragments: Number of fragments (parts of the model) in the run.
    """
    report = Table(document, "the report of a job that is ready")
    # The two values whose limits depend on the run are read here, all others by _read_report().
    return _read_report(
        ReadyReport,
        report,
        claims=_claims(report, fragments),
        fragment=_number(report, "fragment", least=0, most=fragments - 1),
    )


def next_from(document: dict[str, Any], fragments: int) -> NextReport:
    """Return a job's validated report "next" (for any round); raise HolmesError if it is malformed.

    Args:
        document: The report, as parsed JSON: version and checksum of the job's copy of each fragment
            (claims), and a list of pseudo-gradients that the job could send ("offers").
        fragments: Number of fragments (parts of the model) in the run.
    """
    report = Table(document, "the report of a job that asks for its next round")
    claims = _claims(report, fragments)
    offers: dict[int, Offer] = {}
    for offer in report.tables("offers"):  # one JSON object for each offered fragment
        # The limit of this value depends on the run; _read_report() reads the others.
        fragment = _number(offer, "fragment", least=0, most=fragments - 1)
        offers[fragment] = _read_report(Offer, offer, fragment=fragment)
    return NextReport(claims, offers)


def done_from(document: dict[str, Any]) -> DoneReport:
    """Return a job's report "done" (it has ended an exchange); raise HolmesError if it is malformed."""
    return _read_report(DoneReport, Table(document, "the report of a job that is done"))


def checked_from(document: dict[str, Any]) -> CheckedReport:
    """Return a job's report "checked" (digests of received data); raise HolmesError if it is malformed."""
    return _read_report(CheckedReport, Table(document, "the report of a job that has checked"))


def telemetry_from(document: dict[str, Any]) -> dict[str, float]:
    """Return the telemetry in a heartbeat, without unknown keys.

    Raises:
        HolmesError: A value is not a number.
    """
    heartbeat = Table(document, "the heartbeat of a job")
    present = [name for name in TELEMETRY if document.get(name) is not None]
    return {name: heartbeat.take(name, float) for name in present}


def _claims(table: Table, fragments: int | None = None) -> tuple[Claim, ...]:
    """Return the versions and checksums that a job claims for its fragments (parts of the model).

    The version of a fragment is the round of its last outer step.

    Args:
        table: Report with the lists `versions` and `checksums`, with an entry for each fragment.
        fragments: Number of claims that there must be; None: any number.

    Raises:
        HolmesError: The lists are malformed, have different lengths, or contain impossible values.
    """
    versions = table.list("versions", int)
    checksums = table.list("checksums", str)
    _require_at_most(len(versions), _MOST_FRAGMENTS, table.at("versions"))
    if len(versions) != len(checksums) or not versions:
        raise HolmesError(
            f"{table.at('versions')}: {len(versions)} of them, and {len(checksums)} checksums"
        )
    if not all(0 <= version <= MOST for version in versions):
        raise HolmesError(f"{table.at('versions')}: not all are rounds that can exist")
    if not all(not text or _CHECKSUM.fullmatch(text) for text in checksums):
        raise HolmesError(f"{table.at('checksums')}: not all are 16 hexadecimal digits")
    if fragments is not None and len(versions) != fragments:
        raise HolmesError(
            f"{table.at('versions')}: {counted(len(versions), 'fragment')}, but the run has {fragments}"
        )
    return tuple(map(Claim, versions, checksums))


def _validated_ranges(maps: Table, position: str, ranks: int) -> array[int]:
    """Return the validated shard map of a position: start, stop, rank, start, stop, rank, ...

    Each triple names a range of flat parameter elements, and the rank that exchanges it with other jobs.

    Args:
        maps: Position in the model-parallel grid -> list of triples, as received.
        position: The position to validate, a key of `maps`.
        ranks: Number of ranks of the job.

    Raises:
        HolmesError: The ranges overlap or have holes, or name a rank that does not exist.
    """
    flat = maps.list(position, int)
    if not flat or len(flat) % _RANGE_NUMBERS:
        raise HolmesError(f"{maps.at(position)}: not (start, stop, rank) of ranges")
    expected_start = 0
    starts, stops, owner_ranks = flat[::3], flat[1::3], flat[2::3]
    for start, stop, rank in zip(starts, stops, owner_ranks):
        # Each range must begin at the end of the previous range (no holes, no overlaps), must not be
        # empty, and its rank must exist.
        if not (start == expected_start < stop <= MOST and 0 <= rank < ranks):
            raise HolmesError(
                f"{maps.at(position)}: the range from {start} to {stop} of rank {rank} is invalid; it must "
                f"start at {expected_start}, must not be empty, and its rank must be below {ranks}"
            )
        expected_start = stop
    return array("q", flat)


def _require_printable(position: str, table: Table) -> None:
    """Raise HolmesError if a name of a position in the model-parallel grid cannot be shown in a log."""
    if len(position) > _LINE or not position.isprintable():
        raise HolmesError(f"{table.source}: a position of its maps has no name that can be shown")


def _printable_json(value: Any, location: str, depth: int = 0) -> Any:
    """Return a JSON value with unprintable characters replaced by "?", and long texts cut.

    Args:
        value: The value, as the JSON parser returns it.
        location: Position of the value in the document, for the error message.
        depth: Number of tables and lists around the value.

    Raises:
        HolmesError: Tables and lists are nested too deeply.
    """
    if isinstance(value, dict) and depth < _DEEPEST:
        return {
            printable(key, _LINE): _printable_json(item, location, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list) and depth < _DEEPEST:
        return [_printable_json(item, location, depth + 1) for item in value]
    if isinstance(value, str):
        return printable(value, _LONGEST_TEXT)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise HolmesError(f"{location} is nested deeper than {_DEEPEST} tables")

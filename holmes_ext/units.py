"""Parses and formats values that users write, such as "200Gb/s", "16GB", "50us" and "127.0.0.1:9400"."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from holmes_ext.errors import HolmesError

_RATE = re.compile(r"\s*([0-9.]+)\s*([kMGT]?)(?:b/s|bps|bit/s|bit)\s*")
_SIZE = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kMGT]?i?)B\s*")
_TIME = re.compile(r"\s*([0-9.]+)\s*(s|ms|us|ns)\s*")
#: Prefix or unit -> its factor.
_SCALE = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "s": 1,
    "ms": 1e-3,
    "us": 1e-6,
    "ns": 1e-9,
    "i": 1,
    "ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
#: Larger numbers in a text are rejected, before their prefix is applied.
_LARGEST = 1e15
_PORTS = 2**16  # number of TCP ports


_LEAST_WATCHDOG_FACTOR = 1.5
_WATCHDOG_SECONDS = 10.0  # if the user gives only a factor
_MOST_SECONDS = 1e6


class WatchdogLimits(NamedTuple):
    """Step time above which the watchdog explains a slow step: it must exceed both limits."""

    factor: float  # in median step times
    seconds: float


class Address(NamedTuple):
    """Address of a server."""

    host: str
    port: int


def _parse(value: object, where: str, pattern: re.Pattern[str], wanted: str) -> float:
    """Return the number in a text, multiplied by the factor of its prefix or unit.

    Args:
        value: The text.
        where: File and key of the value, for errors.
        pattern: Matches the number (group 1) and the prefix or unit (group 2).
        wanted: Description of the expected text, for errors.

    Raises:
        HolmesError: the value is not such a text, or the number is too large.
    """
    match = pattern.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise HolmesError(f"{where}: {value!r:.80} is not {wanted}")
    try:
        number = float(match[1])
    except ValueError:
        raise HolmesError(f"{where}: {value!r:.80} has no readable number") from None
    if number > _LARGEST:
        raise HolmesError(f"{where}: {value!r:.80} is beyond any rate or time")
    return number * _SCALE[match[2]]  # factor of the prefix or unit


def parse_rate(value: object, where: str) -> int:
    """Return a rate such as "25Gb/s" in bits/s. Prefixes are decimal.

    Args:
        value: The text.
        where: File and key of the value, for errors.
    """
    wanted = 'a rate; write for example "25Gb/s" or "250Mb/s" (bits)'
    rate = round(_parse(value, where, _RATE, wanted))
    if rate <= 0:
        raise HolmesError(f"{where}: a rate must be above 0, not {value!r}")
    return rate


def parse_size(value: object, where: str) -> int:
    """Return a size such as "16GB" or "16GiB" in bytes; errors name the file and key `where`."""
    return round(_parse(value, where, _SIZE, 'a size; write for example "16GB"'))


def parse_seconds(value: object, where: str) -> float:
    """Return a time such as "50us" in seconds; errors name the file and key `where`."""
    return _parse(value, where, _TIME, 'a time; write for example "50us" or "1ms"')


def parse_decimal(text: str) -> float:
    """Return a number that is written without sign and exponent; nan for any other text."""
    return float(text) if text.replace(".", "", 1).isdecimal() else float("nan")


def parse_count(text: str, digits: int = 5) -> int:
    """Return the whole number in a text of at most `digits` digits; 0 for any other text."""
    return int(text) if text.isdecimal() and len(text) <= digits else 0


def parse_watchdog_limits(text: str) -> WatchdogLimits | None:
    """Return the limits of --holmes-watchdog, a text "K" or "K,SECONDS"; None for any other text.

    A step counts as too long if it takes more than K times the median step and more than SECONDS.
    """
    factor_text, comma, seconds_text = text.replace(" ", "").partition(",")
    factor = parse_decimal(factor_text)
    seconds = parse_decimal(seconds_text) if comma else _WATCHDOG_SECONDS
    if not _LEAST_WATCHDOG_FACTOR <= factor <= _MOST_SECONDS:
        return None
    if not 1 <= seconds <= _MOST_SECONDS:
        return None
    return WatchdogLimits(factor, seconds)


def parse_address(text: str) -> Address:
    """Return the address in "HOST:PORT", or in "PORT" (host 127.0.0.1); the port is 0 if it is no number."""
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]") or "127.0.0.1", parse_count(port))


def metrics_problem(destination: str) -> str:
    """Return why metrics cannot be exported to a destination, in words that follow it; "" if they can.

    A destination is PORT (of 127.0.0.1), HOST:PORT or FILE.prom.
    """
    is_address = 0 < parse_address(destination).port < _PORTS
    if is_address or destination.endswith(".prom"):
        return ""
    return "is neither PORT nor HOST:PORT (1 to 65535) nor FILE.prom"


def format_rate(bits_per_second: float, digits: int = 4) -> str:
    """Return a rate as text, such as "25 Gb/s", with a number of significant digits."""
    return _with_prefix(bits_per_second, "b/s", digits)


def format_bytes(count: float, digits: int = 3) -> str:
    """Return a size as text, such as "34.9 GB", with a number of significant digits."""
    return _with_prefix(count, "B", digits)


def format_seconds(seconds: float) -> str:
    """Return a time as text, such as "20 ms", with three significant digits."""
    unit = "us" if seconds else "s"
    for larger_unit in ("s", "ms", "us"):
        if seconds >= _SCALE[larger_unit]:
            unit = larger_unit
            break
    return f"{seconds / _SCALE[unit]:.3g} {unit}"


def _with_prefix(value: float, unit: str, digits: int) -> str:
    """Return a value with the largest decimal prefix (k, M, ...) that leaves a number of 1 or more."""
    prefix = next((prefix for prefix in "TGMk" if value >= _SCALE[prefix]), "")
    return f"{value / _SCALE[prefix]:.{digits}g} {prefix}{unit}"


def union_s(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the total time that is covered by at least one interval, in seconds.

    Args:
        intervals: (start, end) of each interval, in seconds.
    """
    total = 0.0
    covered_until = float("-inf")
    for start, end in sorted(intervals):
        if end > covered_until:
            total += end - max(start, covered_until)  # the part that is not covered yet
            covered_until = end
    return total

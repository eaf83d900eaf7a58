"""Rates, times and sizes as people write them ("200Gb/s", "50us"), and back; seconds of intervals."""

import re
from collections.abc import Sequence

from holmes_ext.errors import HolmesError

_RATE = re.compile(r"\s*([0-9.]+)\s*([kMGT]?)(?:b/s|bps|bit/s|bit)\s*")
_SIZE = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kMGT]?i?)B\s*")
_TIME = re.compile(r"\s*([0-9.]+)\s*(s|ms|us|ns)\s*")
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


def _parse(value: object, where: str, pattern: re.Pattern[str], wanted: str) -> float:
    match = pattern.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise HolmesError(f"{where}: {value!r:.80} is not {wanted}")
    try:
        number = float(match[1])
    except ValueError:
        raise HolmesError(f"{where}: {value!r:.80} has no readable number") from None
    if number > 1e15:
        raise HolmesError(f"{where}: {value!r:.80} is beyond any rate or time")
    return number * _SCALE[match[2]]


def parse_rate(value: object, where: str) -> int:
    """Bits/s of `value`, such as "25Gb/s" (decimal prefixes). where: file and key, for the error."""
    rate = round(
        _parse(value, where, _RATE, 'a rate; write for example "25Gb/s" or "250Mb/s" (bits)')
    )
    if rate <= 0:
        raise HolmesError(f"{where}: a rate must be above 0, not {value!r}")
    return rate


def parse_size(value: object, where: str) -> int:
    """Bytes of `value`, such as "16GB" or "16GiB"."""
    return round(_parse(value, where, _SIZE, 'a size; write for example "16GB"'))


def parse_seconds(value: object, where: str) -> float:
    """Seconds of `value`, such as "50us"."""
    return _parse(value, where, _TIME, 'a time; write for example "50us" or "1ms"')


def format_rate(bits_per_second: float, digits: int = 4) -> str:
    """ "25 Gb/s" from 25e9, to `digits` significant digits."""
    return _with_prefix(bits_per_second, "b/s", digits)


def format_bytes(count: float, digits: int = 3) -> str:
    """ "34.9 GB" from 34.9e9, to `digits` significant digits."""
    return _with_prefix(count, "B", digits)


def format_seconds(seconds: float) -> str:
    """ "20 ms" from 0.02, to three significant digits."""
    unit = next(
        (unit for unit in ("s", "ms", "us") if seconds >= _SCALE[unit]), "us" if seconds else "s"
    )
    return f"{seconds / _SCALE[unit]:.3g} {unit}"


def _with_prefix(value: float, unit: str, digits: int) -> str:
    prefix = next((prefix for prefix in "TGMk" if value >= _SCALE[prefix]), "")
    return f"{value / _SCALE[prefix]:.{digits}g} {prefix}{unit}"


def union_s(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total

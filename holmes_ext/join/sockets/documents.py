"""JSON documents that cross a network, with strict limits.

unpack() raises ValueError for NaN and infinities (they are not JSON), numbers beyond the range of float64,
whole numbers of more than 20 digits, lone surrogates in texts, nesting that exhausts the parser, and more
values than any document here has (each takes tens of bytes of memory, but perhaps two bytes of text).
"""

from __future__ import annotations

import json
import math
from array import array
from typing import Any

#: Digits of a whole number: 2^64 has 20.
_DIGITS = 20
#: Values of a document: a shard map of 100,000 ranges has 300,000.
MOST_VALUES = 2**20
#: Memory of a parsed value, in bytes: its object, and the reference to it.
_BYTES_PER_VALUE = 64


def pack(document: dict[str, Any]) -> bytes:
    """Return a document as compact JSON. An array of numbers becomes a list."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, default=_list_of)
    return text.encode()


def _list_of(value: object) -> list[Any]:
    """Convert an array.array of numbers to a list.

    json.dumps() calls this for each value that it cannot encode itself (its parameter `default`).

    Raises:
        TypeError: The value is not an array.
    """
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def parsed_bytes(data: bytes | bytearray) -> int:
    """Return about how many bytes of memory the values of a JSON text take when it is parsed.

    The characters of strings are not included, because callers count the JSON text itself, too. At most
    MOST_VALUES values are counted, because unpack() parses no text with more.
    """
    return _BYTES_PER_VALUE * min(_most_values(data), MOST_VALUES)


def _most_values(data: bytes | bytearray) -> int:
    """Return an upper bound on the number of values of a JSON text."""
    return sum(map(data.count, (b",", b"[", b"{")))


def unpack(data: bytes | bytearray) -> dict[str, Any]:
    """Parse bytes from an untrusted process as a JSON object.

    Raises:
        ValueError: They are no JSON object, are nested too deeply, have too many values, or contain
            numbers or characters that are not allowed.
    """
    # An upper bound on the number of values, before any of them takes memory.
    if _most_values(data) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")
    try:
        text = data.decode("utf-8")
        document = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_refuse)
        if "\\ud" in text.lower():  # an escape that may be a lone surrogate
            _check_text(document)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    return document


def _whole(text: str) -> int:
    """Convert the text of a whole number, as the JSON parser passes it; at most 20 digits are allowed.

    Raises:
        ValueError: The number has more digits.
    """
    if len(text.lstrip("-")) > _DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    """Convert the text of a number; raise ValueError if it exceeds the range of float64."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:30]} is not finite")
    return value


def _refuse(name: str) -> float:
    """Raise ValueError for NaN, Infinity or -Infinity."""
    raise ValueError(f"{name} is not JSON")


def _check_text(value: Any) -> None:
    """Raise UnicodeEncodeError (a ValueError) if a text in the value contains a lone surrogate."""
    if isinstance(value, str):
        value.encode("utf-8")
    elif isinstance(value, dict):
        for key, item in value.items():
            key.encode("utf-8")
            _check_text(item)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)

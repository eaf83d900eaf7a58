"""JSON objects that cross a network: what nobody should send is refused with a ValueError.

Not taken: NaN and infinities (JSON has none), numbers that only look finite, whole numbers of more than 20
digits, text that is not Unicode (lone surrogates), nesting that exhausts the parser, more values than any
document here has (each takes tens of bytes of memory for two of the text).
"""

from __future__ import annotations

import json
import math
from typing import Any

#: Of a whole number: 2^64 has 20.
_DIGITS = 20
#: Of a document: a map of 100,000 ranges has 300,000.
MOST_VALUES = 2**22


def pack(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def unpack(data: bytes) -> dict[str, Any]:
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")
    try:
        text = data.decode("utf-8")
        document = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_refuse)
        if "\\ud" in text.lower():
            _check_text(document)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    return document


def _whole(text: str) -> int:
    if len(text.lstrip("-")) > _DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:30]} is not finite")
    return value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _check_text(value: Any) -> None:
    """UnicodeEncodeError (a ValueError) for lone surrogates."""
    if isinstance(value, str):
        value.encode("utf-8")
    elif isinstance(value, dict):
        for key, item in value.items():
            key.encode("utf-8")
            _check_text(item)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)

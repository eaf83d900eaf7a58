"""A table of a TOML or JSON document that remembers where it is and which keys were read, so that errors name the key."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.units import parse_rate, parse_seconds

_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
_REQUIRED = object()


class Table:
    """`values` at key `path` of file `source`; every reader raises HolmesError that names file and key."""

    def __init__(self, values: dict[str, Any], source: str, path: str = ""):
        self.values, self.source, self.path = values, source, path
        self.read: set[str] = set()

    def at(self, key: str) -> str:
        return f"{self.source}: key '{self.path}.{key}'" if self.path else f"{self.source}: key '{key}'"

    def take(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value of `key`, of type `kind` (float takes whole numbers too, and is finite)."""
        self.read.add(key)
        if key not in self.values:
            if default is _REQUIRED:
                raise HolmesError(f"{self.at(key)} is missing" + self._near(key))
            return default
        value = self.values[key]
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise HolmesError(f"{self.at(key)}: {value!r:.80} is not {_KINDS[kind]}")
        if kind is float and not -1e300 < value < 1e300:  # whole numbers can be too large for math.isfinite
            raise HolmesError(f"{self.at(key)}: {value!r:.80} is not a finite number")
        return value

    def rate(self, key: str, required: bool = True) -> int:
        """Bits/s; 0 when it may be and is left out."""
        if key not in self.values and not required:
            self.read.add(key)
            return 0
        return parse_rate(self.take(key, str), self.at(key))

    def seconds(self, key: str, default: float) -> float:
        self.read.add(key)
        return parse_seconds(self.values[key], self.at(key)) if key in self.values else default

    def list(self, key: str, kind: type, default: tuple | None = None) -> tuple:
        """A tuple of values of type `kind`."""
        self.read.add(key)
        if key not in self.values and default is not None:
            return tuple(default)
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(i, kind) and not isinstance(i, bool) for i in value):
            state = f"{value!r:.80} is not a list, each item {_KINDS[kind]}" if key in self.values else "is missing"
            raise HolmesError(f"{self.at(key)}: {state}" + ("" if key in self.values else self._near(key)))
        return tuple(value)

    def table(self, key: str, default: dict | None = None) -> Table:
        self.read.add(key)
        value = self.values.get(key, default)
        if not isinstance(value, dict):
            state = "is missing" if value is None else "is not a table"
            raise HolmesError(f"{self.at(key)} {state}" + self._near(key))
        return Table(value, self.source, f"{self.path}.{key}" if self.path else key)

    def tables(self, key: str) -> list[Table]:
        self.read.add(key)
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise HolmesError(f"{self.at(key)} is not a list of tables; in TOML write [[{key}]]")
        path = f"{self.path}.{key}" if self.path else key
        return [Table(item, self.source, f"{path}[{index}]") for index, item in enumerate(value)]

    def done(self) -> None:
        """Refuse keys that nobody read."""
        for key in self.values:
            if key not in self.read:
                near = difflib.get_close_matches(key, self.read, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(sorted(self.read))}"
                raise HolmesError(f"{self.at(key)} is not known{hint}")

    def _near(self, key: str) -> str:
        near = difflib.get_close_matches(key, set(self.values) - self.read, 1)
        return f"; is {near[0]!r} a misspelling of it?" if near else ""


def write_whole(path: str | Path, text: str) -> None:
    """Write the file whole or leave what is there; raises OSError, and nothing half-written stays behind."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise

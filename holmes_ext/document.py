"""Reads TOML and JSON files, with errors that name the file, the key and a way out.

A Table knows its place in the file and which keys were read. Read single keys and reject all others:

    top = load_toml("cluster.toml", "name a cluster.toml")
    top.version(1)
    name = top.take("name", str)
    rate_bps = top.rate("rate")
    top.done()                            # rejects keys that were not read

or read a whole dataclass by the names, types and checks (checks.py) of its fields:

    port = top.table("port").into(Port)

All readers raise HolmesError. They have limits of size, of values, of levels, and of the wait for a pipe.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import select
import stat
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from holmes_ext import words
from holmes_ext.checks import FieldError
from holmes_ext.errors import HolmesError
from holmes_ext.units import parse_rate, parse_seconds
from holmes_ext.words import nearest, why

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
#: Type of a value -> its name in messages.
_TYPE_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
}
_REQUIRED = object()
_PIPE_S = 5.0  # longest wait for the next byte of a pipe that is read as a file
_MOST_BYTES = 2**28  # of a file
_MIB = 2**20
_MOST_VALUES = 2**24  # of a JSON text
_MOST_LEVELS = 100  # of lists and tables in a file
#: Least magnitude that counts as infinite. (math.isfinite fails for larger whole numbers than any float.)
_INFINITE = 1e300


class _Field(NamedTuple):
    """Field of a dataclass."""

    name: str
    annotation: Any
    is_required: bool  # it has no default


class Table:
    """Table of a TOML or JSON file. All readers raise a HolmesError that names the file and the key."""

    def __init__(self, values: dict[str, Any], source: str, path: str = ""):
        """Wrap a table of a file, of which no key was read yet.

        Args:
            values: Key -> value.
            source: Name of the file.
            path: Dotted key of the table in the file; "" for the top table.
        """
        self.values = values
        self.source = source
        self.path = path
        #: Keys that were read.
        self.read: set[str] = set()

    def at(self, key: str) -> str:
        """Return the file and the full key, to begin an error message."""
        return f"{self.source}: key '{self._full_key(key):.200}'"

    def _full_key(self, key: str) -> str:
        """Return a key of this table as a dotted key of the file."""
        return f"{self.path}.{key}" if self.path else key

    def _mark_read(self, key: str) -> bool:
        """Mark a key as read; return whether the table has it."""
        self.read.add(key)
        return key in self.values

    def _missing(self, key: str) -> HolmesError:
        """Return the error that a key is missing, with a similar key as a hint."""
        similar = nearest(key, set(self.values) - self.read)
        hint = f"; is {similar!r} a misspelling of it?" if similar else ""
        return HolmesError(f"{self.at(key)} is missing{hint}")

    def version(self, current: int, upgrade: str = "") -> None:
        """Raise an error if the key `version` of the file is not the version that this holmes_ext reads.

        Args:
            current: The version that this holmes_ext reads.
            upgrade: Advice for the user of an older file, the end of the message.

        Raises:
            HolmesError: the version is another one, or the key is missing or not a whole number.
        """
        version = self.take("version", int)
        if version == current:
            return
        message = f"{self.at('version')} is {version}; this holmes_ext reads version {current}"
        if upgrade and version < current:
            message += f"; {upgrade}"
        raise HolmesError(message)

    def take(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Return the value of a key.

        Args:
            key: The key.
            kind: Type of the value. A float may be written as a whole number, and must be finite.
            default: Returned if the key is missing; without a default, a missing key is an error.

        Raises:
            HolmesError: the key is missing, or its value has another type.
        """
        if not self._mark_read(key):  # the table does not have the key
            if default is _REQUIRED:
                raise self._missing(key)
            return default
        value = self.values[key]
        if not _has_type(value, kind):
            raise HolmesError(f"{self.at(key)}: {value!r:.80} is not {_TYPE_NAMES[kind]}")
        if kind is float and not -_INFINITE < value < _INFINITE:
            raise HolmesError(f"{self.at(key)}: {value!r:.80} is not a finite number")
        return value

    def rate(self, key: str, required: bool = True) -> int:
        """Return the rate at a key, such as "25Gb/s", in bits/s.

        Args:
            key: The key.
            required: Whether a missing key is an error. Otherwise the rate is 0 then.
        """
        if not self._mark_read(key) and not required:
            return 0
        return parse_rate(self.take(key, str), self.at(key))

    def seconds(self, key: str, default: float) -> float:
        """Return the time at a key, such as "50us", in seconds; `default` if the key is missing."""
        if not self._mark_read(key):
            return default
        return parse_seconds(self.values[key], self.at(key))

    def list(self, key: str, kind: type, default: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """Return the list at a key as a tuple.

        Args:
            key: The key.
            kind: Type of the items.
            default: Returned if the key is missing; without a default, a missing key is an error.

        Raises:
            HolmesError: the key is missing, or its value is no list of such items.
        """
        if not self._mark_read(key):  # the table does not have the key
            if default is None:
                raise self._missing(key)
            return tuple(default)
        value = self.values[key]
        is_list = isinstance(value, (list, tuple))
        if not is_list or not all(_has_type(item, kind) for item in value):
            raise HolmesError(
                f"{self.at(key)}: {value!r:.80} is not a list, each item {_TYPE_NAMES[kind]}"
            )
        return tuple(value)

    def table(self, key: str, default: dict[str, Any] | None = None) -> Table:
        """Return the table at a key; a table of `default` if the key is missing."""
        if not self._mark_read(key) and default is None:
            raise self._missing(key)
        value = self.values.get(key, default)
        if not isinstance(value, dict):
            raise HolmesError(f"{self.at(key)} is not a table")
        return Table(value, self.source, self._full_key(key))

    def tables(self, key: str) -> tuple[Table, ...]:
        """Return the list of tables at a key; () if the key is missing."""
        value = self.values[key] if self._mark_read(key) else ()
        is_list = isinstance(value, (list, tuple))
        if not is_list or not all(isinstance(item, dict) for item in value):
            raise HolmesError(f"{self.at(key)} is not a list of tables; in TOML write [[{key}]]")
        return tuple(
            Table(item, self.source, f"{self._full_key(key)}[{index}]")
            for index, item in enumerate(value)
        )

    def done(self) -> None:
        """Raise HolmesError if the table has a key that was not read, with a similar key as a hint.

        Call this after all keys that the table may have were read: any other key is an error of the user.
        """
        for key in self.values:
            if key in self.read:
                continue
            new_name = words.RENAMED_PLAN_KEYS.get(key)
            similar = nearest(key, self.read)
            if new_name in self.read:
                hint = f"it is called {new_name!r} now"
            elif similar:
                hint = f"did you mean {similar!r}?"
            else:
                hint = f"known here: {', '.join(sorted(self.read))}"
            raise HolmesError(f"{self.at(key)} is not known; {hint}")

    def into(self, cls: type[T], **given: Any) -> T:
        """Return an instance of a dataclass, each of whose fields has a key of the same name.

        The type of a field may be str, a number, bool, a dataclass, a tuple or dict of these, or any of them
        `| None`. Its annotation may restrict the values (checks.py). Other keys are rejected.

        Args:
            cls: The dataclass.
            given: Values of fields that are not read from the table.

        Raises:
            HolmesError: a value is missing, unknown or not allowed. If `cls` itself refuses a value
                (FieldError), the message names the file and the full key, as for all others.
        """
        values = dict(given)
        all_fields: tuple[_Field, ...] = _fields_of(cls)  # type: ignore[arg-type]
        fields_to_read = [item for item in all_fields if item.name not in given]
        # done() accepts these keys, also those that the table does not have.
        self.read.update(item.name for item in fields_to_read)
        for name, annotation, is_required in fields_to_read:
            if not is_required and name not in self.values:
                continue
            value = self.values.get(name)
            # A fast path for values of exactly the annotated type, such as str: the reports of
            # thousands of nodes consist of them. _value() converts and checks all other values. A
            # float must also be finite.
            has_exact_type = type(value) is annotation
            if has_exact_type and annotation is not float:
                values[name] = value
            else:
                values[name] = self._value(name, annotation)
        self.done()
        try:
            return cls(**values)
        except FieldError as error:
            raise HolmesError(f"{self.at(error.problem.field)} {error.problem}") from None
        except HolmesError as error:
            place = f"key {self.path!r}: " if self.path else ""
            raise HolmesError(f"{self.source}: {place}{error}") from None

    def _value(self, key: str, annotation: Any) -> Any:
        """Return the value of a key as a type annotation demands.

        A dataclass is read from a sub-table, a tuple from a list, and a dict from a table with any keys.

        Args:
            key: The key.
            annotation: The type: str, a number, bool, a dataclass, a tuple or dict of them, or "T | None".

        Raises:
            HolmesError: the key is missing, or its value has another type.
        """
        if not self._mark_read(key):
            raise self._missing(key)
        if isinstance(annotation, UnionType):  # such as "int | None"
            if self.values[key] is None:
                return None
            (annotation,) = set(get_args(annotation)) - {NoneType}  # the type that is left
        if isinstance(annotation, type) and is_dataclass(annotation):
            return self.table(key).into(annotation)
        if get_origin(annotation) is dict:
            table = self.table(key)
            _, value_type = get_args(annotation)
            return {name: table._value(name, value_type) for name in table.values}
        if get_origin(annotation) is tuple:
            item_type: type = get_args(annotation)[0]  # T of tuple[T, ...]
            if is_dataclass(item_type):
                return tuple(table.into(item_type) for table in self.tables(key))
            return self.list(key, item_type)
        return self.take(key, annotation)


def _has_type(value: object, kind: type) -> bool:
    """Return whether a value read from a file has a type; a bool is no number, an int counts as float."""
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float))
    if kind is list:
        return isinstance(value, (list, tuple))
    return isinstance(value, kind)


@cache
def _fields_of(cls: Any) -> tuple[_Field, ...]:
    """Return the fields of a dataclass with their resolved type annotations."""
    annotations = get_type_hints(cls)
    found = []
    for item in fields(cls):
        has_default = item.default is not MISSING or item.default_factory is not MISSING
        found.append(_Field(item.name, annotations[item.name], is_required=not has_default))
    return tuple(found)


def load_toml(path: str | Path, advice: str) -> Table:
    """Return the top table of a TOML file.

    Args:
        path: The file.
        advice: End of the error message if the file cannot be read.
    """
    return parse_toml(read_text(path, advice), str(path))


def parse_toml(text: str, source: str) -> Table:
    """Return the top table of a TOML text; errors name `source`."""
    try:
        values = tomllib.loads(text)
        _require_shallow(values)
        return Table(values, source)
    except (ValueError, RecursionError) as error:
        # ValueError: TOMLDecodeError, and whole numbers of thousands of digits.
        raise HolmesError(f"{source}: not valid TOML: {error}") from None


def load_json(path: str | Path, advice: str) -> Table:
    """Return the object in a JSON file as a table.

    Args:
        path: The file.
        advice: End of the error message if the file cannot be read or has no valid object.
    """
    return parse_json(read_text(path, advice), str(path), advice)


def parse_json(text: str, source: str, advice: str) -> Table:
    """Return the object in a JSON text. Errors begin with `source` and end with `advice`, the way out."""
    value = parse_json_value(text, source, advice)
    if isinstance(value, dict):
        return Table(value, source)
    raise HolmesError(f"{source}: not a JSON object; {advice}")


def _refuse_constant(name: str) -> float:
    """Raise an error for NaN or Infinity, which are Python's extensions of JSON."""
    raise ValueError(f"{name} is no number of JSON")


def parse_json_value(
    text: str, source: str, advice: str, parse_constant: Callable[[str], float] = _refuse_constant
) -> Any:
    """Return the value of a JSON text: an object, a list, a text, a number, a boolean or None.

    Args:
        text: The JSON text.
        source: Name of the file, with which error messages begin.
        advice: Way out for the user, with which error messages end.
        parse_constant: Returns the value of NaN, Infinity and -Infinity, which JSON does not have.
    """
    try:
        # An upper bound on the number of values, before any of them takes memory.
        if sum(map(text.count, ",[{")) > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES} values")
        value = json.loads(text, parse_constant=parse_constant)
        _require_shallow(value)
        if "\\ud" in text.lower():  # JSON writes a surrogate as such an escape
            # A lone surrogate could not be printed later: encode() raises an error for one.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise HolmesError(f"{source}: not valid JSON: {str(error)[:200]}; {advice}") from None
    return value


def _require_shallow(value: Any) -> None:
    """Raise ValueError if lists and tables have so many levels that recursive functions would fail."""
    level: list[Any] = [[value]]  # the lists and tables at one depth
    for _ in range(_MOST_LEVELS):
        items = [node.values() if isinstance(node, dict) else node for node in level]
        level = [item for item in chain.from_iterable(items) if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels")


def digest_of(content: Any) -> str:
    """Return the sha256 (hex) of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_digest(content: dict[str, Any]) -> str:
    """Return the JSON text of a dict, with a last key "digest" that has the digest of the other keys."""
    return json.dumps({**content, "digest": digest_of(content)}, indent=1) + "\n"


def quoted(text: str) -> str:
    """Return a text as a basic string of TOML, in quotation marks."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def read_text(path: str | Path, advice: str, errors: str = "strict") -> str:
    """Return the text of a file (see decode_text()).

    Args:
        path: The file.
        advice: End of the error message if the file cannot be read.
        errors: What becomes of bytes that are not UTF-8: "strict" (an error), "replace".
    """
    try:
        return decode_text(_read(path), errors)
    except (OSError, ValueError) as error:  # not UTF-8, or a NUL in the path
        raise HolmesError(f"{path}: cannot be read ({why(error)}); {advice}") from None


def read_bytes(path: str | Path, advice: str) -> bytes:
    """Return the content of a file; if it cannot be read, the error message ends with `advice`."""
    try:
        return _read(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise HolmesError(f"{path}: cannot be read ({why(error)}); {advice}") from None


def read_standard_input(advice: str) -> str:
    """Return the text of standard input; if it cannot be read, the error message ends with `advice`."""
    try:
        text = sys.stdin.read(_MOST_BYTES + 1)  # one more, to notice a text that is too large
        _require_size(len(text))
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise HolmesError(f"standard input cannot be read ({why(error)}); {advice}") from None
    return text.removeprefix("\ufeff")


def decode_text(data: bytes, errors: str = "strict") -> str:
    """Return the text of bytes in UTF-8, or in UTF-16 with a byte order mark, without the mark.

    PowerShell's `>` writes such UTF-16. Other bytes raise UnicodeDecodeError, if `errors` is "strict".
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors)
    return data.decode("utf-8-sig", errors)


def _read(path: str | Path) -> bytes:
    """Return the content of a file or a pipe.

    Raises:
        OSError: it cannot be read, is larger than _MOST_BYTES, or is a pipe that is silent for _PIPE_S.
    """
    # O_NONBLOCK: opening a pipe without a writer must not wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        mode = os.fstat(descriptor).st_mode
        # Reading a directory raises IsADirectoryError, an OSError with the right message.
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            data = file.read(_MOST_BYTES + 1)  # one more, to notice a file that is too large
        else:
            data = _read_pipe(file)
        _require_size(len(data))
        return data


def _require_size(size: int) -> None:
    """Raise OSError if a file's content has more bytes, or characters, than _MOST_BYTES."""
    if size > _MOST_BYTES:
        raise OSError(f"it has more than {_MOST_BYTES // _MIB} MiB")


def _read_pipe(file: Any) -> bytes:
    """Return all bytes of a pipe or device until its end, or a little more than _MOST_BYTES.

    Raises:
        TimeoutError: no byte came for _PIPE_S seconds.
    """
    data = bytearray()
    while len(data) <= _MOST_BYTES:
        readable, _, _ = select.select([file], [], [], _PIPE_S)
        if not readable:
            raise TimeoutError(f"nothing comes out of it for {_PIPE_S:.0f} s")
        part = file.read(_MIB)
        if not part:  # the end
            break
        data += part
    return bytes(data)

"""Reads and writes TOML and JSON files, with errors that name the file, the key and a way out.

A Table knows its place in the file and which keys were read. Read single keys and reject all others:

    top = load_toml("cluster.toml", "name a cluster.toml")
    top.version(1)
    name = top.take("name", str)
    rate_bps = top.rate("rate")
    top.done()                            # rejects keys that were not read

or read a whole dataclass by the names, types and checks (checks.py) of its fields:

    port = top.table("port").into(Port)

All readers raise HolmesError.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import os
import select
import stat
import sys
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
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
#: Longest wait for the next byte of a pipe that is read as a file, in seconds.
_PIPE_S = 5.0
#: Largest size of a file.
_MOST_BYTES = 2**28
_MIB = 2**20
#: Least magnitude that counts as infinite. (math.isfinite fails for whole numbers that are too
#: large for a float.)
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
    """Return whether a value of a file has a type. A bool is no number, and a whole number is a float."""
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
        return Table(tomllib.loads(text), source)
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
    """Return the object in a JSON text as a table.

    Args:
        text: The JSON text.
        source: Name of the file, with which error messages begin.
        advice: Way out for the user, with which error messages end.

    Raises:
        HolmesError: the text is not valid JSON, or no object.
    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():  # JSON writes a surrogate as such an escape
            # A lone surrogate could not be printed later: encode() raises an error for one.
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise HolmesError(f"{source}: not valid JSON: {str(error)[:200]}; {advice}") from None
    if not isinstance(document, dict):
        raise HolmesError(f"{source}: not a JSON object; {advice}")
    return Table(document, source)


def _refuse_constant(name: str) -> float:
    """Raise an error for NaN or Infinity, which are Python's extensions of JSON."""
    raise ValueError(f"{name} is no number of JSON")


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


def read_text(path: str | Path, advice: str) -> str:
    """Return the text of a file (see decode_text()).

    Args:
        path: The file.
        advice: End of the error message if the file cannot be read.
    """
    try:
        return decode_text(_read(path))
    except (OSError, ValueError) as error:  # not UTF-8, or a NUL in the path
        raise HolmesError(f"{path}: cannot be read ({why(error)}); {advice}") from None


def decode_text(data: bytes) -> str:
    """Return the text of bytes in UTF-8, or in UTF-16 with a byte order mark, without the mark.

    PowerShell's `>` writes such UTF-16. Other bytes raise UnicodeDecodeError.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16")
    return data.decode("utf-8-sig")


def _read(path: str | Path) -> bytes:
    """Return the content of a file or a pipe.

    Raises:
        OSError: the file cannot be read or has more than _MOST_BYTES, or a pipe is silent for _PIPE_S
            seconds.
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
        if len(data) > _MOST_BYTES:
            raise OSError(f"it has more than {_MOST_BYTES // _MIB} MiB")
        return data


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


def save(path: str | Path, text: str, what: str) -> None:
    """Replace the content of a file that the user named; after an error the file is unchanged.

    Args:
        path: The file.
        text: Its new content.
        what: Noun for the content in the error message, such as "the plan".

    Raises:
        HolmesError: the file cannot be written.
    """
    try:
        write_whole(path, text)
    except (OSError, ValueError) as error:
        raise HolmesError(
            f"{path}: {what} cannot be written ({why(error)}); name another place"
        ) from None


def write_whole(path: str | Path, text: str) -> None:
    """Replace the content of a file, or leave the file unchanged if that fails.

    The file keeps its permissions, and a link is followed. A pipe or a device such as /dev/stdout is written
    to instead of replaced. The text is written to a temporary file in the same folder, which then replaces
    the file.

    Raises:
        OSError: the file cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):  # the file is new
            partial.chmod(stat.S_IMODE(target.stat().st_mode))
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise

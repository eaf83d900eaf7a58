"""Reading and writing files: a table of a TOML or JSON document that remembers where it is and which keys
were read.

    top = load_toml("cluster.toml", "name a cluster.toml")       every reader raises
                                                                 HolmesError: file, key, way out
    top.version(1)
    name, rate = top.take("name", str), top.rate("rate")         one key at a time, then
    top.done()                                                   keys that nobody read are refused
    top.table("port").into(Port)                                 or a whole dataclass by its
                                                                 fields' names, types and
                                                                 checks (checks.py)
"""

from __future__ import annotations

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
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

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
_KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
}
_REQUIRED = object()
#: Seconds without a byte until a pipe is given up that was named instead of a file.
_PIPE_S = 5.0
#: Of a file that is read as a document.
_MOST_BYTES = 2**28


class Table:
    """`values` at key `path` of file `source`; every reader raises HolmesError that names file and key."""

    def __init__(self, values: dict[str, Any], source: str, path: str = ""):
        self.values, self.source, self.path = values, source, path
        self.read: set[str] = set()

    def at(self, key: str) -> str:
        return f"{self.source}: key '{self._below(key):.200}'"

    def _below(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _present(self, key: str) -> bool:
        self.read.add(key)
        return key in self.values

    def _missing(self, key: str) -> HolmesError:
        near = nearest(key, set(self.values) - self.read)
        what = f"; is {near!r} a misspelling of it?" if near else ""
        return HolmesError(f"{self.at(key)} is missing{what}")

    def version(self, current: int, upgrade: str = "") -> None:
        """Refuse a document whose key `version` is not the version that this holmes_ext reads.

        Args:
            current: The version that is read.
            upgrade: What the user can do about an older version. It ends the message about one.

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
        """The value of `key`, of type `kind` (float takes whole numbers too, and is finite)."""
        if not self._present(key):
            if default is _REQUIRED:
                raise self._missing(key)
            return default
        value = self.values[key]
        if not _is(value, kind):
            raise HolmesError(f"{self.at(key)}: {value!r:.80} is not {_KINDS[kind]}")
        if (
            kind is float and not -1e300 < value < 1e300
        ):  # whole numbers can be too large for math.isfinite
            raise HolmesError(f"{self.at(key)}: {value!r:.80} is not a finite number")
        return value

    def rate(self, key: str, required: bool = True) -> int:
        """Bits/s; 0 when it may be and is left out."""
        return (
            parse_rate(self.take(key, str), self.at(key)) if self._present(key) or required else 0
        )

    def seconds(self, key: str, default: float) -> float:
        return parse_seconds(self.values[key], self.at(key)) if self._present(key) else default

    def list(self, key: str, kind: type, default: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """A tuple of values of type `kind`."""
        if not self._present(key):
            if default is None:
                raise self._missing(key)
            return tuple(default)
        value = self.values[key]
        if not isinstance(value, (list, tuple)) or not all(_is(item, kind) for item in value):
            raise HolmesError(
                f"{self.at(key)}: {value!r:.80} is not a list, each item {_KINDS[kind]}"
            )
        return tuple(value)

    def table(self, key: str, default: dict[str, Any] | None = None) -> Table:
        if not self._present(key) and default is None:
            raise self._missing(key)
        value = self.values.get(key, default)
        if not isinstance(value, dict):
            raise HolmesError(f"{self.at(key)} is not a table")
        return Table(value, self.source, self._below(key))

    def tables(self, key: str) -> tuple[Table, ...]:
        """None where the key is left out."""
        value = self.values[key] if self._present(key) else ()
        if not isinstance(value, (list, tuple)) or not all(
            isinstance(item, dict) for item in value
        ):
            raise HolmesError(f"{self.at(key)} is not a list of tables; in TOML write [[{key}]]")
        return tuple(
            Table(item, self.source, f"{self._below(key)}[{index}]")
            for index, item in enumerate(value)
        )

    def done(self) -> None:
        """Refuse keys that nobody read."""
        for key in self.values:
            if key not in self.read:
                near = nearest(key, self.read)
                if words.RENAMED_PLAN_KEYS.get(key) in self.read:
                    hint = f"it is called {words.RENAMED_PLAN_KEYS[key]!r} now"
                elif near:
                    hint = f"did you mean {near!r}?"
                else:
                    hint = f"known here: {', '.join(sorted(self.read))}"
                raise HolmesError(f"{self.at(key)} is not known; {hint}")

    def into(self, cls: type[T], **given: Any) -> T:
        """The dataclass `cls` of this table: a key for each field that is not `given`, no others.

        A field is a text, a number, a truth value, a dataclass, a tuple or dict of these, or `... | None`.
        Its annotation may say which values are allowed (checks.py). A HolmesError of `cls` itself is raised
        with the table's place in front.
        """
        values = dict(given)
        every: tuple[tuple[str, Any, bool], ...] = _fields_of(cls)  # type: ignore[arg-type]
        self.read.update(name for name, _, _ in every if name not in given)
        for name, kind, required in every:
            if name not in given and (required or name in self.values):
                value = self.values.get(name)
                plain = (
                    type(value) is kind is not float
                )  # most are, in the reports of thousands of nodes
                values[name] = value if plain else self._value(name, kind)
        self.done()
        try:
            return cls(**values)
        except FieldError as error:
            raise HolmesError(f"{self.at(error.problem.field)} {error.problem}") from None
        except HolmesError as error:
            raise HolmesError(
                f"{self.source}: {f'key {self.path!r}: ' * bool(self.path)}{error}"
            ) from None

    def _value(self, key: str, kind: Any) -> Any:
        """The value of `key` as the type annotation `kind` says."""
        if not self._present(key):
            raise self._missing(key)
        if isinstance(kind, UnionType):
            if self.values[key] is None:
                return None
            (kind,) = set(get_args(kind)) - {NoneType}
        if isinstance(kind, type) and is_dataclass(kind):
            return self.table(key).into(kind)
        if get_origin(kind) is dict:
            table = self.table(key)
            return {name: table._value(name, get_args(kind)[1]) for name in table.values}
        if get_origin(kind) is not tuple:
            return self.take(key, kind)
        item: type = get_args(kind)[0]
        return (
            tuple(table.into(item) for table in self.tables(key))
            if is_dataclass(item)
            else self.list(key, item)
        )


def _is(value: object, kind: type) -> bool:
    accepted = (int, float) if kind is float else (list, tuple) if kind is list else kind
    return isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))


@cache
def _fields_of(cls: Any) -> tuple[tuple[str, Any, bool], ...]:
    """(name, type, whether it has no default) of each field."""
    kinds = get_type_hints(cls)
    return tuple(
        (f.name, kinds[f.name], f.default is MISSING and f.default_factory is MISSING)
        for f in fields(cls)
    )


def load_toml(path: str | Path, advice: str) -> Table:
    """The top table of a TOML file; HolmesError ends with `advice` where the file cannot be read."""
    return parse_toml(read_text(path, advice), str(path))


def parse_toml(text: str, source: str) -> Table:
    try:
        return Table(tomllib.loads(text), source)
    except (
        ValueError,
        RecursionError,
    ) as error:  # TOMLDecodeError, and whole numbers of thousands of digits
        raise HolmesError(f"{source}: not valid TOML: {error}") from None


def load_json(path: str | Path, advice: str) -> Table:
    """The object in a JSON file; HolmesError ends with `advice` where there is none to read."""
    return parse_json(read_text(path, advice), str(path), advice)


def parse_json(text: str, source: str, advice: str) -> Table:
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():
            json.dumps(
                document, ensure_ascii=False
            ).encode()  # a lone surrogate, which nothing could print
    except (ValueError, RecursionError) as error:
        raise HolmesError(f"{source}: not valid JSON: {str(error)[:200]}; {advice}") from None
    if not isinstance(document, dict):
        raise HolmesError(f"{source}: not a JSON object; {advice}")
    return Table(document, source)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def digest_of(content: Any) -> str:
    """sha256 (hex) of what JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_digest(content: dict[str, Any]) -> str:
    """The JSON text, which ends with the digest of all else."""
    return json.dumps({**content, "digest": digest_of(content)}, indent=1) + "\n"


def quoted(text: str) -> str:
    """A text as TOML writes it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def read_text(path: str | Path, advice: str) -> str:
    """The text of a file; HolmesError ends with `advice` where it cannot be read."""
    try:
        return _read(path).decode()
    except (OSError, ValueError) as error:  # not UTF-8, or a NUL in the path
        raise HolmesError(f"{path}: cannot be read ({why(error)}); {advice}") from None


def _read(path: str | Path) -> bytes:
    """All of a file of at most _MOST_BYTES; a pipe until its end, or _PIPE_S of silence. OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) or stat.S_ISDIR(os.fstat(descriptor).st_mode):
            parts = [file.read(_MOST_BYTES + 1)]
        else:
            parts = [b""]
            while len(parts) < 2 or parts[-1]:
                if not select.select([file], [], [], _PIPE_S)[0]:
                    raise TimeoutError(f"nothing comes out of it for {_PIPE_S:.0f} s")
                parts.append(file.read(2**20) or b"")
                if len(parts) > 2 + (_MOST_BYTES >> 20):
                    break
        data = b"".join(parts)
        if len(data) > _MOST_BYTES:
            raise OSError(f"it has more than {_MOST_BYTES >> 20} MiB")
        return data


def save(path: str | Path, text: str, what: str) -> None:
    """write_whole() to a place that the user named; HolmesError where `what` ("the plan") cannot go."""
    try:
        write_whole(path, text)
    except (OSError, ValueError) as error:
        raise HolmesError(
            f"{path}: {what} cannot be written ({why(error)}); name another place"
        ) from None


def write_whole(path: str | Path, text: str) -> None:
    """Write the file whole, with the permissions it had, or leave it as it is (OSError). A link is followed;
    what is no regular file (/dev/stdout, a pipe) is written to, not replaced."""
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
        with contextlib.suppress(FileNotFoundError):
            partial.chmod(stat.S_IMODE(target.stat().st_mode))
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise

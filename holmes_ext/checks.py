"""Checks of dataclass fields: the type annotation of a field says which values are allowed.

    @dataclass(frozen=True)
    class Port:
        number: Annotated[int, InRange(0, 255)]
        state: Annotated[str, OneOf(("up", "down"))] = "down"
        seconds: Annotated[float | None, InRange(0)] = None    None is allowed if the type has it

        def __post_init__(self) -> None:
            check_fields(self, "the port")

    Port(300)             HolmesError "the port: key 'number' must be 0 to 255, not 300"
    table.into(Port)      HolmesError "f.toml: key 'port.number' must be 0 to 255, not 300" (document.py)

Table.into() checks the types. A condition on several fields is code in __post_init__.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Annotated, Any, NamedTuple, Protocol, get_args, get_origin, get_type_hints

from holmes_ext.errors import HolmesError

#: From here on, an upper bound only keeps nonsense out.
_IMPLAUSIBLE = 10**12


class Check(Protocol):
    """Condition on a value, whose type was checked before."""

    @property
    def allowed(self) -> str:
        """Description of the allowed values: the end of a message that begins with "must be"."""

    def accepts(self, value: Any) -> object:
        """Return something true if the value is allowed."""


@dataclass(frozen=True)
class InRange:
    """Check that a finite number is between two bounds, which are allowed themselves."""

    least: float
    most: float = inf  # not mentioned in messages from _IMPLAUSIBLE on
    noun: str = ""  # description of the number for messages: "a port number"

    @property
    def allowed(self) -> str:
        """Description of the allowed numbers."""
        numbers = f"{_written(self.least)} or more"
        if self.most < _IMPLAUSIBLE:
            numbers = f"{_written(self.least)} to {_written(self.most)}"
        return f"{self.noun} ({numbers})" if self.noun else numbers

    def accepts(self, value: float) -> bool:
        """Return whether a number is allowed."""
        return self.least <= value <= self.most and value != inf


@dataclass(frozen=True)
class OneOf:
    """Check that a value is in a collection."""

    values: Collection[object]  # the keys of a dict are allowed, also those that are added later

    @property
    def allowed(self) -> str:
        """Description of the values of this check, for messages: "one of a, b"."""
        return f"one of {', '.join(map(str, self.values))}"

    def accepts(self, value: object) -> bool:
        """Return whether a value is allowed."""
        return value in self.values


@dataclass(frozen=True)
class Matches:
    """Check that a regular expression matches the whole of a text."""

    pattern: re.Pattern[str]
    noun: str  # description of such texts for messages: "a device name"
    may_be_empty: bool = False

    @property
    def allowed(self) -> str:
        """Description of the allowed texts."""
        return f"{self.noun} or ''" if self.may_be_empty else self.noun

    def accepts(self, value: str) -> bool:
        """Return whether a text is allowed."""
        if not value and self.may_be_empty:
            return True
        return self.pattern.fullmatch(value) is not None


@dataclass(frozen=True)
class Satisfies:
    """Check that a given function accepts the value, for conditions without a class of their own.

    It is written into the annotation of a dataclass field, like the other checks here:
    Annotated[int, Satisfies(is_even, "an even number")].
    """

    accepts: Callable[[Any], object]  # returns something true if the value is allowed
    allowed: str  # description of the allowed values


@dataclass(frozen=True)
class Each:
    """Check that all items of a tuple pass another check."""

    item: Check
    allowed: str  # description of the allowed tuples: "a list of device names"

    def accepts(self, value: Iterable[Any]) -> bool:
        """Return whether all items are allowed."""
        return all(map(self.item.accepts, value))


class Problem(NamedTuple):
    """Field of a dataclass whose value is not allowed, with the value and the allowed values."""

    field: str
    value: Any
    allowed: str  # description of the allowed values

    def __str__(self) -> str:
        return f"must be {self.allowed}, not {self.value!a:.80}"


class FieldError(HolmesError):
    """Error about a field of a dataclass instance.

    Table.into() replaces it by an error that names the file and the full key.
    """

    def __init__(self, subject: str, problem: Problem):
        super().__init__(f"{subject}: key '{problem.field}' {problem}")
        self.problem = problem


def check_fields(instance: Any, subject: str) -> None:
    """Raise an error if a field of a dataclass instance has a value that its annotation does not allow.

    Args:
        instance: The dataclass instance.
        subject: Noun for the instance in the message: "NIC 'mlx5_0'".

    Raises:
        FieldError: names the first such field, the allowed values and the value.
    """
    for problem in problems_in(instance):  # the first one, if any
        raise FieldError(subject, problem)


def problems_in(instance: Any) -> Iterator[Problem]:
    """Yield the fields of a dataclass instance whose values are not allowed, in the order of the fields."""
    cls = type(instance)
    for field, check in _checks_of(cls):  # type: ignore[arg-type]
        value = getattr(instance, field)
        if value is not None and not check.accepts(value):
            yield Problem(field, value, check.allowed)


@cache
def _checks_of(cls: Any) -> tuple[tuple[str, Check], ...]:
    """Return the checks of a dataclass as (field, check) pairs.

    The checks of a field are the metadata of its type, as in Annotated[int, Satisfies(...)]. Those of an
    inner type, as in list[Annotated[...]], do not count.
    """
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for name, hint in hints.items():
        if get_origin(hint) is Annotated:
            _, *checks = get_args(hint)
            found += [(name, check) for check in checks]
    return tuple(found)


def _written(number: float) -> str:
    """Return a number as text, without a needless ".0"."""
    return str(number) if isinstance(number, int) else f"{number:g}"

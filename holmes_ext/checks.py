"""Checks of dataclass fields: the type annotation of a field says which values are allowed.

    @dataclass(frozen=True)
    class Port:
        number: Annotated[int, Between(0, 255)]
        state: Annotated[str, OneOf(("up", "down"))] = "down"
        seconds: Annotated[float | None, Between(0)] = None    None is allowed if the type has it

        def __post_init__(self) -> None:
            check_fields(self, "the port")

    Port(300)             HolmesError "the port: key 'number' must be 0 to 255, not 300"
    table.into(Port)      HolmesError "f.toml: key 'port.number' must be 0 to 255, not 300" (document.py)

Table.into() checks the types. A condition on several fields is code in __post_init__.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Annotated, Any, NamedTuple, Protocol, get_args, get_origin, get_type_hints

from holmes_ext.errors import HolmesError


class Check(Protocol):
    """A condition on one value, whose type is right already."""

    @property
    def allowed(self) -> str:
        """The allowed values, in words that follow "must be"."""

    def accepts(self, value: Any) -> object:
        """Return something true if the value is allowed."""


@dataclass(frozen=True)
class Between:
    """A number from `least` to `most`, both included. It is finite."""

    least: float
    most: float = inf
    noun: str = ""  # what the number is, for messages: "a port number"

    @property
    def allowed(self) -> str:
        numbers = f"{_written(self.least)} or more"
        if self.most < inf:
            numbers = f"{_written(self.least)} to {_written(self.most)}"
        return f"{self.noun} ({numbers})" if self.noun else numbers

    def accepts(self, value: float) -> bool:
        return self.least <= value <= self.most and value != inf


@dataclass(frozen=True)
class OneOf:
    """One of a few values."""

    values: tuple[object, ...]

    @property
    def allowed(self) -> str:
        return f"one of {', '.join(map(str, self.values))}"

    def accepts(self, value: object) -> bool:
        return value in self.values


@dataclass(frozen=True)
class Matches:
    """A text that a regular expression matches from its first to its last character."""

    pattern: re.Pattern[str]
    noun: str  # what the pattern describes, for messages: "a device name"
    may_be_empty: bool = False

    @property
    def allowed(self) -> str:
        return f"{self.noun} or ''" if self.may_be_empty else self.noun

    def accepts(self, value: str) -> bool:
        if not value and self.may_be_empty:
            return True
        return self.pattern.fullmatch(value) is not None


@dataclass(frozen=True)
class Satisfies:
    """A value for which a function returns something true."""

    accepts: Callable[[Any], object]
    allowed: str


@dataclass(frozen=True)
class Each:
    """A tuple whose items all pass another check."""

    item: Check
    allowed: str  # in the plural: "a list of device names"

    def accepts(self, value: Iterable[Any]) -> bool:
        return all(map(self.item.accepts, value))


class Problem(NamedTuple):
    """A field's value that is not allowed."""

    field: str
    value: Any
    allowed: str

    def __str__(self) -> str:
        return f"must be {self.allowed}, not {self.value!a:.80}"


class FieldError(HolmesError):
    """An error about one field of a dataclass instance. Table.into() puts the place in the file in front."""

    def __init__(self, subject: str, problem: Problem):
        super().__init__(f"{subject}: key '{problem.field}' {problem}")
        self.problem = problem


def check_fields(instance: Any, subject: str) -> None:
    """Raise an error if a field of a dataclass instance has a value that its annotation does not allow.

    Args:
        subject: What the instance describes, for the message: "NIC 'mlx5_0'".

    Raises:
        FieldError: names the first such field, the allowed values and the value.
    """
    for problem in problems_in(instance):
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
    """Return the pairs (field, check) of a dataclass. Only an outermost Annotated has checks."""
    hints = get_type_hints(cls, include_extras=True)
    checked = {name: hint for name, hint in hints.items() if get_origin(hint) is Annotated}
    return tuple((name, check) for name, hint in checked.items() for check in get_args(hint)[1:])


def _written(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"

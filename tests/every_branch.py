"""Runs functions on every branch, without the objects, modules and processes that they need.

`Branches.clone` copies a function. In the copy all modules, classes and other functions are an `Anything`,
whose attributes, items and results are Anything again. Each time the copy asks whether an Anything is true,
equal, less, ..., the branch decides; `explore` runs a function once for every sequence of such decisions.

Functions of the same module run, too (as copies), if they receive what `must_run` names.
"""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

MOST_BRANCHES = 2000
MOST_REPEATS = 20  # of one decision in a loop, which then turns over so that the loop ends


class Branch:
    """One run, and what it decided. A decision at one place in the code stays the same in a run."""

    def __init__(self, first: tuple[bool, ...] = ()):
        self.first = first  # decisions that are given
        self.decisions: list[bool] = []
        self._at: dict[tuple[CodeType, int], bool] = {}
        self._repeats: Counter[tuple[CodeType, int]] = Counter()

    def decide(self) -> bool:
        frame = sys._getframe(2)  # what asks an Anything
        place = (frame.f_code, frame.f_lasti)
        if place not in self._at:
            number = len(self.decisions)
            self._at[place] = self.first[number] if number < len(self.first) else True
            self.decisions.append(self._at[place])
        self._repeats[place] += 1
        decision = self._at[place]
        return decision if self._repeats[place] <= MOST_REPEATS else not decision


def explore(run: Callable[[Branch], None]) -> int:
    """Call `run` once for every sequence of decisions; return how many there are."""
    count = 0
    pending: list[tuple[bool, ...]] = [()]
    while pending:
        branch = Branch(pending.pop())
        run(branch)
        count += 1
        assert count < MOST_BRANCHES, "too many branches: split the function"
        for number in range(len(branch.first), len(branch.decisions)):
            pending.append((*branch.decisions[:number], not branch.decisions[number]))
    return count


class Anything(Exception):  # may be raised, too
    """Stands for any object."""

    def __init__(self, branch: Branch, label: str = "", on_given: Callable[[Any], None] | None = None):
        super().__init__()
        self.__dict__.update(branch=branch, label=label, on_given=on_given, other=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__qualname__", "__name__", "__version__"):
            raise AttributeError(name)
        return self._other()

    def _other(self, *_: Any, **__: Any) -> Anything:
        if self.other is None:
            self.__dict__["other"] = Anything(self.branch, on_given=self.on_given) if self.label else self
        return self.other

    def __call__(self, *args: Any, **kwargs: Any) -> Anything:
        for value in (*args, *kwargs.values()):
            self._give(value)
        return self._other()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._give(value)

    def _give(self, value: Any) -> None:
        if self.on_given is not None:
            self.on_given(value)

    def _decide(self, *_: Any) -> bool:
        return self.branch.decide()

    def __iter__(self) -> Iterator[Anything]:
        return iter((self._other(), self._other()))

    def __exit__(self, *_: Any) -> bool:
        return False

    __bool__ = __contains__ = __instancecheck__ = __subclasscheck__ = _decide
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _decide
    __hash__ = Exception.__hash__
    __enter__ = __getitem__ = __next__ = __neg__ = __invert__ = __abs__ = _other
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __or__ = __and__ = __pow__ = _other
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __ror__ = __rand__ = _other

    def __delitem__(self, key: Any) -> None:
        pass

    def __delattr__(self, name: str) -> None:
        pass

    def __len__(self) -> int:
        return 2

    def __index__(self) -> int:
        return 1

    __int__ = __index__

    def __float__(self) -> float:
        return 1.0

    def __str__(self) -> str:
        return "anything"

    def __format__(self, spec: str) -> str:
        return "anything"


class _Pattern:
    """A regular expression, of which Anything may or may not be a match."""

    def __init__(self, pattern: re.Pattern[str], anything: Anything):
        self._pattern = pattern
        self._anything = anything

    def fullmatch(self, text: Any) -> Any:
        return self._anything if isinstance(text, Anything) else self._pattern.fullmatch(text)

    def match(self, text: Any) -> Any:
        return self._anything if isinstance(text, Anything) else self._pattern.match(text)


class Branches:
    """Copies of functions for one branch, which share the copies of their modules' variables."""

    def __init__(
        self,
        anything: Anything,
        given: dict[str, Any],
        keep_none: bool,
        must_run: Callable[[Any], bool],
    ):
        self.anything = anything
        self.must_run = must_run
        self.given = given  # values of module variables, by name
        self.keep_none = keep_none  # of module variables; else those are Anything as well
        self._modules: dict[int, dict[str, Any]] = {}

    def clone(self, function: FunctionType) -> FunctionType:
        variables = self._variables(function.__globals__)
        cells = tuple(CellType(self._replace(cell.cell_contents)) for cell in function.__closure__ or ())
        copy = FunctionType(
            function.__code__, variables, function.__name__, function.__defaults__, cells
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        copy.__qualname__ = function.__qualname__
        return copy

    def _variables(self, module: dict[str, Any]) -> dict[str, Any]:
        if id(module) in self._modules:
            return self._modules[id(module)]
        variables = self._modules[id(module)] = {"__builtins__": self._builtins()}
        for name, value in module.items():
            if name in self.given:
                variables[name] = self.given[name]
            elif inspect.isfunction(value) and value.__globals__ is module:
                variables[name] = self._helper(value)
            elif name != "__builtins__":
                variables[name] = self._replace(value, of_other_modules=False)
        return variables

    def _helper(self, function: FunctionType) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(map(self.must_run, (*args, *kwargs.values()))):
                return self.clone(function)(*args, **kwargs)
            return self.anything

        return call

    def _replace(self, value: Any, of_other_modules: bool = True) -> Any:
        if value is None:
            return None if self.keep_none else self.anything
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        if is_error or isinstance(value, (str, bytes, int, float, tuple)):
            return value
        if isinstance(value, re.Pattern):
            return _Pattern(value, self.anything)
        if of_other_modules and inspect.isfunction(value):
            return self._helper(value)
        return self.anything

    def _builtins(self) -> dict[str, Any]:
        def type_of(value: Any, *more: Any) -> Any:
            return self.anything if isinstance(value, Anything) and not more else type(value, *more)

        def is_instance(value: Any, kind: Any) -> bool:
            return value.branch.decide() if isinstance(value, Anything) else isinstance(value, kind)

        return {
            **vars(builtins),
            "__import__": lambda *_: self.anything,
            "type": type_of,
            "isinstance": is_instance,
        }

"""Runs a function along every path through its code, without the objects and processes that it needs.

1. `IsolatedCopies.copy` copies the function. In the copy, every module, class and function that the original
   uses is a mock object (`Mock`): its attributes, its items and the results of its calls are mocks as well.
2. Where the copy tests a mock (`if mock`, `mock == 3`, `isinstance(mock, ...)`), the `ExecutionPath` decides
   whether the test is true. Tests of other values have their real results.
3. `run_every_path` runs the copy once for each sequence of such decisions: first with every decision true,
   then with one decision of an earlier run inverted, until no sequence is left.

A helper function of the same module is copied and run, too, if it receives an argument that matters to the
test (`must_run`). A call of any other helper returns a mock.
"""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

MAX_PATHS = 2000  # of one function; more of them would take too long
MAX_REPEATS = 20  # times that one test in a loop has the same result; then it is inverted to end the loop


class CodeLocation(NamedTuple):
    """An instruction of a function."""

    code: CodeType
    instruction: int


class ExecutionPath:
    """Decisions of one run: the results of all tests of mocks.

    A test at one location in the code has the same result for the whole run, so that code which tests
    a condition twice sees no contradiction.
    """

    def __init__(self, prescribed: tuple[bool, ...] = ()):
        self.prescribed = prescribed  # the first decisions; all later ones are True
        self.decisions: list[bool] = []
        self._decision_at: dict[CodeLocation, bool] = {}
        self._repeats_at: Counter[CodeLocation] = Counter()

    def decide(self) -> bool:
        """Return the result of a test. To be called from the method or function that the test invokes."""
        frame = sys._getframe(2)  # 0 is decide(), 1 the method that the test invokes, 2 the tested code
        location = CodeLocation(frame.f_code, frame.f_lasti)
        if location not in self._decision_at:
            self._decision_at[location] = self._next_decision()
        decision = self._decision_at[location]
        self._repeats_at[location] += 1
        if self._repeats_at[location] > MAX_REPEATS:
            return not decision
        return decision

    def _next_decision(self) -> bool:
        number = len(self.decisions)
        decision = self.prescribed[number] if number < len(self.prescribed) else True
        self.decisions.append(decision)
        return decision


def run_every_path(run: Callable[[ExecutionPath], None]) -> int:
    """Call `run` once for every sequence of decisions, and return the number of calls.

    Each run makes decisions beyond those that were prescribed for it. For each of these, one more run is
    needed: with the same decisions before it, and this one inverted.
    """
    count = 0
    pending: list[tuple[bool, ...]] = [()]
    while pending:
        path = ExecutionPath(pending.pop())
        run(path)
        count += 1
        assert count < MAX_PATHS, "too many branches: split the function"
        for number in range(len(path.prescribed), len(path.decisions)):
            inverted = not path.decisions[number]
            pending.append((*path.decisions[:number], inverted))
    return count


class Mock(Exception):
    """Object that stands for any other one: it has every attribute, can be called, compared and iterated.

    It is an exception, so that code can raise it, too. What is derived from a mock (attributes, items,
    results) is one and the same mock without a label.
    """

    def __init__(
        self,
        path: ExecutionPath,
        label: str = "",
        on_receive: Callable[[Any], None] | None = None,
    ):
        """Create a mock.

        Args:
            path: Decides the tests of this mock.
            label: The name of the parameter whose argument this mock is; "" for all other mocks.
            on_receive: Called with every value that is passed to the mock: as an argument, or as an item.
        """
        super().__init__()
        # Not by assignment: a subclass may define __setattr__.
        self.__dict__.update(path=path, label=label, on_receive=on_receive, derived=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__qualname__", "__name__", "__version__"):
            raise AttributeError(name)
        return self._derive()

    def _derive(self, *_: Any, **__: Any) -> Mock:
        """Return the mock for attributes, items and results of this one."""
        if not self.label:
            return self
        if self.derived is None:
            self.__dict__["derived"] = Mock(self.path, on_receive=self.on_receive)
        return self.derived

    def __call__(self, *args: Any, **kwargs: Any) -> Mock:
        for value in (*args, *kwargs.values()):
            self._receive(value)
        return self._derive()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._receive(value)

    def _receive(self, value: Any) -> None:
        if self.on_receive is not None:
            self.on_receive(value)

    def _decide(self, *_: Any) -> bool:
        return self.path.decide()

    def __iter__(self) -> Iterator[Mock]:
        return iter((self._derive(), self._derive()))

    def __exit__(self, *_: Any) -> bool:
        return False

    # Tests: the path decides their result.
    __bool__ = __contains__ = __instancecheck__ = __subclasscheck__ = _decide
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _decide
    __hash__ = Exception.__hash__

    # Operations: their result is a mock.
    __enter__ = __getitem__ = __next__ = __neg__ = __invert__ = __abs__ = _derive
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = _derive
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = _derive
    __mod__ = __or__ = __and__ = __pow__ = _derive
    __rmod__ = __ror__ = __rand__ = _derive

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


class _PatternOfMocks:
    """Regular expression that accepts mocks: a mock matches, and the path decides tests of the match."""

    def __init__(self, pattern: re.Pattern[str], mock: Mock):
        self._pattern = pattern
        self._mock = mock

    def fullmatch(self, text: Any) -> Any:
        if isinstance(text, Mock):
            return self._mock
        return self._pattern.fullmatch(text)

    def match(self, text: Any) -> Any:
        if isinstance(text, Mock):
            return self._mock
        return self._pattern.match(text)


class IsolatedCopies:
    """Copies of functions for one execution path. Copies of functions of one module share their variables."""

    def __init__(
        self,
        mock: Mock,
        replacements: dict[str, Any],
        keep_none: bool,
        must_run: Callable[[Any], bool],
    ):
        """Prepare for copying functions.

        Args:
            mock: Replaces modules, classes and objects.
            replacements: Values of module variables, by name, that are used instead of mocks.
            keep_none: Whether module variables that are None stay None; else they become mocks.
            must_run: Returns whether a helper function runs because it receives this argument.
        """
        self.mock = mock
        self.must_run = must_run
        self.replacements = replacements
        self.keep_none = keep_none
        self._variables_of: dict[int, dict[str, Any]] = {}  # id of a module's dict -> its isolated copy

    def copy(self, function: FunctionType) -> FunctionType:
        """Return a copy of the function whose module variables and closure contain mocks."""
        isolated = FunctionType(
            function.__code__,
            self._isolated_variables(function.__globals__),
            function.__name__,
            function.__defaults__,
            tuple(CellType(self._isolate(cell.cell_contents)) for cell in function.__closure__ or ()),
        )
        isolated.__kwdefaults__ = function.__kwdefaults__
        isolated.__qualname__ = function.__qualname__
        return isolated

    def _isolated_variables(self, module: dict[str, Any]) -> dict[str, Any]:
        if id(module) in self._variables_of:
            return self._variables_of[id(module)]
        variables: dict[str, Any] = {"__builtins__": self._builtins()}
        self._variables_of[id(module)] = variables
        for name, value in module.items():
            if name in self.replacements:
                variables[name] = self.replacements[name]
            elif name == "__builtins__":
                continue  # set above
            elif inspect.isfunction(value) and value.__globals__ is module:
                variables[name] = self._isolated_helper(value)
            elif inspect.isfunction(value):
                variables[name] = self.mock  # a function that is imported from another module
            else:
                variables[name] = self._isolate(value)
        return variables

    def _isolated_helper(self, function: FunctionType) -> Callable[..., Any]:
        """Return a function that runs a copy of the helper if an argument demands it, else returns a mock."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if any(self.must_run(argument) for argument in (*args, *kwargs.values())):
                return self.copy(function)(*args, **kwargs)
            return self.mock

        return call

    def _isolate(self, value: Any) -> Any:
        """Return the value itself if it is a constant or an exception class, else what replaces it."""
        if value is None:
            return None if self.keep_none else self.mock
        if isinstance(value, type) and issubclass(value, BaseException):
            return value
        if isinstance(value, (str, bytes, int, float, tuple)):
            return value
        if isinstance(value, re.Pattern):
            return _PatternOfMocks(value, self.mock)
        if inspect.isfunction(value):
            return self._isolated_helper(value)
        return self.mock

    def _builtins(self) -> dict[str, Any]:
        """Return Python's built-in functions, of which `import`, type() and isinstance() handle mocks."""

        def type_of(value: Any, *arguments: Any) -> Any:
            if isinstance(value, Mock) and not arguments:
                return self.mock
            return type(value, *arguments)

        def is_instance(value: Any, classes: Any) -> bool:
            if isinstance(value, Mock):
                return value.path.decide()
            return isinstance(value, classes)

        return {
            **vars(builtins),
            "__import__": lambda *_: self.mock,
            "type": type_of,
            "isinstance": is_instance,
        }

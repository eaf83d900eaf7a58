"""Runs a function along every path through its code, with mock objects in place of all that it uses.

    Mock              object with every attribute, which can be called, compared and iterated; the results
                      are mocks as well
    IsolatedCopies    copies functions; the modules, classes and functions that a copy uses are mocks
    ExecutionPath     decides, in one run of a copy, whether each test of a mock (`if mock`) is true
    run_every_path    runs a copy once for each possible sequence of such decisions

In the first run, all tests of mocks are true. Each further run inverts one decision of an earlier run. Tests
of other values than mocks have their real results.

A copy calls mocks instead of other functions, with one exception: the caller of this module can choose which
helper functions of the same module run, too (`must_run`).
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

MAX_PATHS = 2000  # of one function; more paths would take too long
MAX_REPEATS = (
    20  # times that a test in a loop has the same result; then it is inverted, to end the loop
)


class CodeLocation(NamedTuple):
    """Position of an instruction in the bytecode of a function."""

    code: CodeType
    instruction: int  # offset in bytes


class ExecutionPath:
    """Decides the results of all tests of mock objects, such as `if mock`, in one run of a function.

    A test that is executed several times, for example in a loop, has the same result each time. After
    MAX_REPEATS executions its result is inverted, so that the loop ends.
    """

    def __init__(self, prescribed: tuple[bool, ...] = ()):
        self.prescribed = prescribed  # the first decisions; all later ones are True
        self.decisions: list[bool] = []
        self._decision_at: dict[CodeLocation, bool] = {}
        self._repeats_at: Counter[CodeLocation] = Counter()

    def decide(self) -> bool:
        """Return the result of the test of a mock object that is being executed.

        To be called from the method that Python calls for the test, such as Mock.__bool__. The code that
        contains the test is identified by the call stack: it is the caller of that method.
        """
        frame = sys._getframe(
            2
        )  # 0 is decide(), 1 a method such as __bool__, 2 the code with the test
        location = CodeLocation(frame.f_code, frame.f_lasti)
        # A test that is executed again, as in a loop, has the same result as the first time.
        if location not in self._decision_at:
            self._decision_at[location] = self._next_decision()
        decision = self._decision_at[location]
        self._repeats_at[location] += 1
        if self._repeats_at[location] > MAX_REPEATS:
            return not decision  # ends a loop that would run forever
        return decision

    def _next_decision(self) -> bool:
        number = len(self.decisions)
        decision = self.prescribed[number] if number < len(self.prescribed) else True
        self.decisions.append(decision)
        return decision


def run_every_path(run: Callable[[ExecutionPath], None]) -> int:
    """Call `run` once for every path through the function that it runs, and return the number of calls.

    A path is a sequence of decisions: whether the first test of a mock object is true, whether the second is,
    and so on.

    Args:
        run: Runs the function along one path. The ExecutionPath decides the tests.
    """
    count = 0
    pending: list[tuple[bool, ...]] = [()]  # beginnings of paths that have not been run
    while pending:
        path = ExecutionPath(prescribed=pending.pop())
        run(path)  # the path's list `decisions` has all decisions of this run afterwards
        count += 1
        assert count < MAX_PATHS, "too many branches: split the function"
        # The run made further decisions, which were not prescribed. Each of them begins another path: the
        # decisions before it stay, and it is inverted.
        for number in range(len(path.prescribed), len(path.decisions)):
            inverted = not path.decisions[number]
            pending.append((*path.decisions[:number], inverted))
    return count


class Mock(Exception):
    """Object that stands for any other object: it has every attribute, can be called, compared and iterated.

    Its attributes, its items and the results of its calls are mocks as well. Whether a test of the mock, such
    as `if mock`, is true depends on the ExecutionPath. The mock is an exception because the tested code may
    raise it.
    """

    def __init__(
        self,
        path: ExecutionPath,
        label: str = "",
        on_receive: Callable[[Any], None] | None = None,
    ):
        """Create a mock.

        Args:
            path: Decides whether a test of this mock, such as `if mock`, is true.
            label: If the mock is the argument of a function: the name of the parameter. Else "".
            on_receive: Is called with every value that code passes to the mock: as an argument of a call, or
                by `mock[key] = value`.
        """
        super().__init__()
        # Not by assignment: a subclass may define __setattr__.
        self.__dict__.update(
            path=path,
            label=label,
            on_receive=on_receive,
            derived=None,  # the mock that attributes and calls of this mock return; made when it is needed
        )

    def __getattr__(self, name: str) -> Any:
        # A library that asks for a special method, e.g. __array__, must not find it.
        if name.startswith("__") and name not in ("__qualname__", "__name__", "__version__"):
            raise AttributeError(name)
        return self._derive()

    def _derive(self, *_: Any, **__: Any) -> Mock:
        """Return the mock that is used for all attributes, items and results of this mock.

        It has no label. A mock without a label returns itself.
        """
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
    """Regular expression that also accepts mock objects instead of strings.

    The result for a mock object is a mock object. Strings are matched as usual.
    """

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
    """Makes copies of functions which use mock objects in place of modules, classes and other functions.

    Copies of functions from one module share their module variables.
    """

    def __init__(
        self,
        mock: Mock,
        replacements: dict[str, Any],
        keep_none: bool,
        must_run: Callable[[Any], bool],
    ):
        """Prepare for copying functions.

        Args:
            mock: Replaces the modules, classes and objects that a copy uses.
            replacements: Module variables that are replaced by other values than `mock`: name -> value.
            keep_none: Whether variables that are None stay None; else they are replaced by `mock`.
            must_run: Is called with each argument that a copy passes to a helper function of the same
                module. If it returns True, a copy of the helper runs; else the helper returns `mock`.
        """
        self.mock = mock
        self.must_run = must_run
        self.replacements = replacements
        self.keep_none = keep_none
        self._variables_of: dict[
            int, dict[str, Any]
        ] = {}  # id of a module's dict -> its isolated copy

    def copy(self, function: FunctionType) -> FunctionType:
        """Return a copy of the function in which module and closure variables are replaced by mock objects.

        Constants and exception classes are not replaced.
        """
        # _isolate() and _isolated_variables() replace values by mock objects.
        cells = function.__closure__ or ()  # the variables of enclosing functions
        isolated_cells = tuple(CellType(self._isolate(cell.cell_contents)) for cell in cells)
        isolated = FunctionType(
            code=function.__code__,
            globals=self._isolated_variables(function.__globals__),
            name=function.__name__,
            argdefs=function.__defaults__,
            closure=isolated_cells,
        )
        isolated.__kwdefaults__ = function.__kwdefaults__
        isolated.__qualname__ = function.__qualname__
        return isolated

    def _isolated_variables(self, module: dict[str, Any]) -> dict[str, Any]:
        """Return the variables of a module (its __dict__) with mock objects in place of most values.

        All copies of functions from that module share the returned dict.
        """
        if id(module) in self._variables_of:
            return self._variables_of[id(module)]
        variables: dict[str, Any] = {
            "__builtins__": self._builtins()
        }  # type() and others handle mocks
        self._variables_of[id(module)] = variables
        for name, value in module.items():
            if name in self.replacements:
                variables[name] = self.replacements[name]
            elif name == "__builtins__":
                continue  # set above
            elif inspect.isfunction(value) and value.__globals__ is module:
                variables[name] = self._isolated_helper(value)  # a function of this module
            elif inspect.isfunction(value):
                variables[name] = self.mock  # a function that is imported from another module
            else:
                variables[name] = self._isolate(value)
        return variables

    def _isolated_helper(self, function: FunctionType) -> Callable[..., Any]:
        """Return a function that copied functions call in place of a helper function of their module.

        It runs a copy of the helper if must_run() is true for one of the arguments. Otherwise it returns a
        mock object, and the helper does not run.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = (*args, *kwargs.values())
            if any(self.must_run(argument) for argument in arguments):
                isolated_helper = self.copy(function)
                return isolated_helper(*args, **kwargs)
            return self.mock

        return call

    def _isolate(self, value: Any) -> Any:
        """Return what a copied function sees in place of this value of a module or closure variable.

        Constants and exception classes stay. Functions and regular expressions are replaced by stand-ins that
        handle mock objects, and everything else by a mock object.
        """
        if value is None:  # e.g. a variable that is set later, in a session
            return None if self.keep_none else self.mock
        if isinstance(value, type) and issubclass(value, BaseException):
            return value
        if isinstance(value, (str, bytes, int, float, tuple)):
            return value  # a constant
        if isinstance(value, re.Pattern):
            return _PatternOfMocks(value, self.mock)
        if inspect.isfunction(value):
            return self._isolated_helper(value)
        return self.mock

    def _builtins(self) -> dict[str, Any]:
        """Return Python's built-in functions, of which three handle mock objects.

        `import` and type() return a mock. For isinstance(mock, ...), the ExecutionPath decides the result.
        """

        def type_of(value: Any, *arguments: Any) -> Any:
            """Return the type of a value. With three arguments, make a class, as type() does."""
            if isinstance(value, Mock) and not arguments:
                return self.mock
            return type(value, *arguments)

        def is_instance(value: Any, classes: Any) -> bool:
            """Return whether a value is an instance of `classes`. For a mock, its path decides."""
            if isinstance(value, Mock):
                return value.path.decide()
            return isinstance(value, classes)

        return {
            **vars(builtins),
            "__import__": lambda *_: self.mock,  # executes `import` statements
            "type": type_of,
            "isinstance": is_instance,
        }

"""A program's call of a patched function: reads arguments by name, and passes all of them on.

The names and positions are those of the function that is installed. A parameter that a new release of the
framework adds, at the end or in the middle, therefore changes neither what a wrapper reads nor what the
function receives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from holmes_ext.errors import HolmesError

_MISSING = object()


@dataclass(frozen=True)
class Parameters:
    """The parameters of one function, without `self`."""

    positions: dict[str, int]  # of those that may be given by position, in their order
    defaults: dict[str, Any]
    names: frozenset[str]  # all but *args and **kwargs
    positional_only: frozenset[str]
    required: frozenset[str]
    signature: inspect.Signature


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, also behind a decorator that hides it.

    A decorator without functools.wraps (deepspeed.comm's timed_op) shows (*args, **kwargs). The signature is
    then that of the function in the decorator's closure, if there is exactly one.

    Raises:
        ValueError, TypeError: the function has none, as methods of extension modules.
    """
    signature = inspect.signature(function)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if tuple(parameter.kind for parameter in signature.parameters.values()) != variadic:
        return signature
    cells = getattr(inspect.unwrap(function), "__closure__", None) or ()
    hidden = [cell.cell_contents for cell in cells if inspect.isfunction(cell.cell_contents)]
    return inspect.signature(hidden[0]) if len(hidden) == 1 else signature


def parameters_of(target: Callable[..., Any]) -> Parameters:
    """Return the parameters of a function or bound method.

    Raises:
        ValueError, TypeError: the function has no signature.
    """
    function = getattr(target, "__func__", None)
    if function is None:
        return _read_parameters(target, bound=False)
    return _read_parameters(function, bound=True)


@lru_cache(maxsize=1024)  # reading a signature takes some 20 us, and p2p.send is called for every micro-batch
def _read_parameters(function: Callable[..., Any], bound: bool) -> Parameters:
    signature = signature_of(function)
    if bound:
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    named = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    positional = [parameter.name for parameter in named if parameter.kind != parameter.KEYWORD_ONLY]
    return Parameters(
        positions={name: position for position, name in enumerate(positional)},
        defaults={
            parameter.name: parameter.default
            for parameter in named
            if parameter.default is not parameter.empty
        },
        names=frozenset(parameter.name for parameter in named),
        positional_only=frozenset(
            parameter.name for parameter in named if parameter.kind == parameter.POSITIONAL_ONLY
        ),
        required=frozenset(
            parameter.name for parameter in named if parameter.default is parameter.empty
        ),
        signature=signature,
    )


class Call:
    """One call of a patched function. `call()` calls the function with the arguments of the program."""

    __slots__ = ("target", "args", "kwargs", "_known")

    def __init__(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        known: Sequence[str] = (),
    ):
        self.target = target  # the function, or the bound method
        self.args = args  # as the program gave them
        self.kwargs = kwargs
        self._known = known  # parameters that the wrapper names

    def __call__(self, /, **changed: Any) -> Any:
        """Call the target with the arguments of the program, those in `changed` replaced."""
        if not changed:
            return self.target(*self.args, **self.kwargs)
        parameters = parameters_of(self.target)
        args = list(self.args)
        kwargs = dict(self.kwargs)
        for name, value in changed.items():
            position = parameters.positions.get(name)
            if position is None or name in kwargs:
                kwargs[name] = value
            elif position < len(args):
                args[position] = value
            elif name in parameters.positional_only:
                between = list(parameters.positions)[len(args) : position]
                args += [*(parameters.defaults[other] for other in between), value]
            else:
                kwargs[name] = value
        return self.target(*args, **kwargs)

    def values(self, names: Sequence[str], fallbacks: Mapping[str, Any]) -> list[Any]:
        """Return the values of the named arguments: those given, else the target's defaults.

        Args:
            fallbacks: Values of parameters that this version of the target may lack.

        Raises:
            TypeError: the program left out a required argument.
        """
        parameters = parameters_of(self.target)
        given = len(self.args)
        values = []
        for name in names:
            position = parameters.positions.get(name, given)
            if position < given:
                values.append(self.args[position])
            elif name in self.kwargs:
                values.append(self.kwargs[name])
            elif name in parameters.defaults:
                values.append(parameters.defaults[name])
            elif name in fallbacks and name not in parameters.names:
                values.append(fallbacks[name])
            else:
                parameters.signature.bind(*self.args, **self.kwargs)  # raises with Python's own words
                raise TypeError(f"{_name_of(self.target)} has no parameter {name!r}")
        return values

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name, with the target's defaults."""
        return arguments_of(self.target, self.args, self.kwargs)

    def given(self) -> dict[str, Any]:
        """Return the arguments that the program gave, by name.

        Raises:
            TypeError: the program left out a required argument.
        """
        return _given(self.target, self.args, self.kwargs)

    def accepts(self, name: str) -> bool:
        """Return whether this version of the target has the parameter."""
        return name in parameters_of(self.target).names

    def unknown(self) -> list[str]:
        """Return the arguments that the wrapper does not name and that differ from the target's defaults.

        A wrapper that does the target's work itself cannot pass them on.
        """
        if not self.args and not self.kwargs:
            return []
        parameters = parameters_of(self.target)
        names = []
        for position, value in enumerate(self.args[len(parameters.positions) :]):
            names.append(f"argument {position + len(parameters.positions)}: {value!r}")
        for name, value in self.given().items():
            if name not in self._known and not _is_same(value, parameters.defaults.get(name, _MISSING)):
                names.append(name)
        return names

    def refuse_unknown(self) -> None:
        """Raise if there are unknown arguments, in a wrapper that cannot leave the work to the target.

        Raises:
            HolmesError: names the arguments.
        """
        if names := self.unknown():
            raise HolmesError(
                f"{_name_of(self.target)} was called with {', '.join(names)}, which holmes does not handle; "
                "switch the feature off that patches it (HOLMES_DISABLE; `holmes patches` lists them)"
            )


def arguments_of(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, with the target's defaults.

    Raises:
        TypeError: a required argument is missing.
    """
    return {**parameters_of(target).defaults, **_given(target, args, kwargs)}


def _given(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    parameters = parameters_of(target)
    given = {**dict(zip(parameters.positions, args)), **kwargs}
    if not parameters.required <= given.keys():
        parameters.signature.bind(*args, **kwargs)  # raises with Python's own words
    return given


def _is_same(value: Any, default: Any) -> bool:
    """Return whether an argument is the default; of tensors and the like only if it is the same object."""
    return value is default or isinstance(value, (bool, int, float, str)) and value == default


def _name_of(target: Callable[..., Any]) -> str:
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"

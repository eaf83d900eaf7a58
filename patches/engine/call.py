"""Reads the arguments of a program's call of a patched function by name, and passes all of them on.

A program may pass an argument by position or by keyword, and releases of a framework differ in their
parameters. `Call` therefore finds arguments by the signature of the installed function. If a new release adds
a parameter, even before others, a wrapper still reads the right arguments, and the function still receives
all that the program gave.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from holmes_ext.errors import HolmesError

_NO_DEFAULT = object()  # differs from every argument


@dataclass(frozen=True)
class Parameters:
    """Parameters of one function, without `self`, `*args` and `**kwargs`."""

    positions: dict[str, int]  # name -> position, of those that may be given by position; sorted
    defaults: dict[str, Any]
    names: frozenset[str]
    positional_only: frozenset[str]
    required: frozenset[str]
    signature: inspect.Signature


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, or of the one that a decorator without functools.wraps hides.

    Such a decorator (e.g. timed_op of deepspeed.comm) replaces a function by one with the parameters
    (*args, **kwargs), whose closure refers to the original. If the closure of a function with just these
    parameters refers to exactly one function, that one's signature is returned.

    Raises:
        ValueError, TypeError: the function has no signature, e.g. a method of an extension module.
    """
    signature = inspect.signature(function)
    only_variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if tuple(parameter.kind for parameter in signature.parameters.values()) != only_variadic:
        return signature
    cells = getattr(inspect.unwrap(function), "__closure__", None) or ()
    decorated = [cell.cell_contents for cell in cells if inspect.isfunction(cell.cell_contents)]
    if len(decorated) != 1:
        return signature
    return inspect.signature(decorated[0])


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
    """A program's call of a patched function, which a wrapper receives and makes (or not) as `call()`."""

    __slots__ = ("target", "args", "kwargs", "_read_names")

    def __init__(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        read_names: Sequence[str] = (),
    ):
        self.target = target  # the patched function, or the bound method
        self.args = args  # the program's positional arguments, without `self`
        self.kwargs = kwargs  # the program's keyword arguments
        self._read_names = read_names  # parameters that the wrapper reads

    def __call__(self, /, **changed: Any) -> Any:
        """Call the target with the program's arguments, except for those in `changed`.

        A changed argument is passed in the way in which the program passed it. One that the program left out
        is passed by keyword, or, if it is positional-only, by position after the defaults of the parameters
        before it.
        """
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
                omitted = list(parameters.positions)[len(args) : position]
                args += [parameters.defaults[other] for other in omitted]
                args.append(value)
            else:
                kwargs[name] = value
        return self.target(*args, **kwargs)

    def values(self, names: Sequence[str], fallbacks: Mapping[str, Any]) -> list[Any]:
        """Return the named arguments in order: the program's, or else the target's defaults.

        Args:
            names: Parameters of the target.
            fallbacks: Name -> value, of parameters that this version of the target may lack.

        Raises:
            TypeError: the program left out a required argument.
        """
        parameters = parameters_of(self.target)
        given_count = len(self.args)
        values = []
        for name in names:
            position = parameters.positions.get(name, given_count)
            if position < given_count:
                values.append(self.args[position])
            elif name in self.kwargs:
                values.append(self.kwargs[name])
            elif name in parameters.defaults:
                values.append(parameters.defaults[name])
            elif name in fallbacks and name not in parameters.names:
                values.append(fallbacks[name])
            else:
                parameters.signature.bind(*self.args, **self.kwargs)  # raises Python's own TypeError
                raise TypeError(f"{_name_of(self.target)} has no parameter {name!r}")
        return values

    def arguments(self) -> dict[str, Any]:
        """Return the value of every parameter by name: the program's argument, or the target's default."""
        return arguments_of(self.target, self.args, self.kwargs)

    def given(self) -> dict[str, Any]:
        """Return by name the arguments that the program gave, without defaults.

        Raises:
            TypeError: the program left out a required argument.
        """
        return _given(self.target, self.args, self.kwargs)

    def accepts(self, name: str) -> bool:
        """Return whether the installed version of the target has this parameter."""
        return name in parameters_of(self.target).names

    def unknown(self) -> list[str]:
        """Return in words the arguments that the wrapper does not read and that differ from their defaults.

        A wrapper that does the target's work itself would ignore them.
        """
        if not self.args and not self.kwargs:
            return []
        parameters = parameters_of(self.target)
        unread = []
        named_count = len(parameters.positions)  # positional arguments after these go to *args
        for position, value in enumerate(self.args[named_count:], start=named_count):
            unread.append(f"argument {position}: {value!r}")
        for name, value in self.given().items():
            default = parameters.defaults.get(name, _NO_DEFAULT)
            if name not in self._read_names and not _is_default(value, default):
                unread.append(name)
        return unread

    def refuse_unknown(self) -> None:
        """End the job if the wrapper, which does the target's work itself, would ignore an argument.

        Raises:
            HolmesError: there are unknown() arguments. The message lists them.
        """
        if names := self.unknown():
            raise HolmesError(
                f"{_name_of(self.target)} was called with {', '.join(names)}, which holmes does not handle; "
                "switch the feature off that patches it (HOLMES_DISABLE; `holmes patches` lists them)"
            )


def arguments_of(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the value of every parameter of a call by name: the given argument, or the target's default.

    Raises:
        TypeError: a required argument is missing.
    """
    return {**parameters_of(target).defaults, **_given(target, args, kwargs)}


def _given(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    parameters = parameters_of(target)
    given = {**dict(zip(parameters.positions, args)), **kwargs}
    if not parameters.required <= given.keys():
        parameters.signature.bind(*args, **kwargs)  # raises Python's own TypeError
    return given


def _is_default(value: Any, default: Any) -> bool:
    """Return whether an argument is the default.

    Only numbers and strings are compared by value: `==` of two tensors is a tensor.
    """
    if value is default:
        return True
    return isinstance(value, (bool, int, float, str)) and value == default


def _name_of(target: Callable[..., Any]) -> str:
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"

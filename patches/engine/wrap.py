"""Wrappers that run instead of a framework's functions, and the calls that they intercept.

holmes replaces functions of a framework (torch, DeepSpeed, ...) at run time. Terms:

    target     the framework's own function that was replaced
    wrapper    the function of holmes that runs instead of the target, and usually calls the target
    `Call`     one call of the target by the training program, as the wrapper receives it

A wrapper names the parameters of the target that it reads, and calls the target by `call()`:

    @by_name
    def split_layers(call, instance, method):      # `method` is a parameter of the target
        if method == "uniform":
            return call()                          # call the target with the program's arguments
        return call(method="parameters")           # the same, but with another value of `method`

    @with_session
    @by_name
    def report_split(current, call, instance):     # `current` is the session: this process's job under holmes
        ...                                        # without a session, only the target runs

`instance` is the object whose method was called. `call()` passes all of the program's arguments on, including
those that a later release of the framework adds.

A program may pass an argument by position or by keyword, and releases of a framework differ in their
parameters. So a `Call` finds each argument by the signature of the installed target. A new release may add a
parameter, even before others: the wrapper still reads the right arguments, and the target still receives all
arguments of the program.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session

_NO_DEFAULT = object()  # differs from every argument


@dataclass(frozen=True)
class Parameters:
    """Parameters of a function by the ways to pass them, without `self`, `*args` and `**kwargs`."""

    #: Name -> position of each parameter that may be passed by position, in the order of the positions.
    positions: dict[str, int]
    defaults: dict[str, Any]  # name -> default, of parameters that have a default
    names: frozenset[str]  # names of all parameters
    positional_only: frozenset[str]  # names of the parameters that cannot be passed by keyword
    required: frozenset[str]  # names of the parameters without a default
    signature: inspect.Signature


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, also if a decorator without functools.wraps hides it.

    Such a decorator (e.g. timed_op of deepspeed.comm) replaces the function by `decorated(*args, **kwargs)`,
    whose closure holds the original function. The original's signature is returned if the closure holds no
    other function.

    Raises:
        ValueError, TypeError: the function has no signature, e.g. a method of an extension module.
    """
    signature = inspect.signature(function)
    kinds = tuple(parameter.kind for parameter in signature.parameters.values())
    is_variadic_only = kinds == (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if not is_variadic_only:
        return signature  # no decorator hides it
    # The decorator's closure holds the original function. A closure stores each outer variable in a cell.
    cells = getattr(inspect.unwrap(function), "__closure__", None) or ()
    functions_in_closure = [
        cell.cell_contents for cell in cells if inspect.isfunction(cell.cell_contents)
    ]
    if len(functions_in_closure) != 1:
        return signature  # not a decorator, or the function that it calls is not certain
    return inspect.signature(functions_in_closure[0])


def parameters_of(target: Callable[..., Any]) -> Parameters:
    """Return the parameters of a function, or of a bound method (without `self`).

    Raises:
        ValueError, TypeError: the function has no signature.
    """
    function = getattr(target, "__func__", None)
    if function is None:
        return _read_parameters(target, is_method=False)
    return _read_parameters(function, is_method=True)


# Cached: reading a signature takes some 20 us, and p2p.send is called for every micro-batch.
@lru_cache(maxsize=1024)
def _read_parameters(function: Callable[..., Any], is_method: bool) -> Parameters:
    """Return the parameters of a function, or of a method without its first one, `self`.

    Args:
        function: The function, not bound to an instance.
        is_method: Whether its first parameter is `self`. If so, it is left out.
    """
    signature = signature_of(function)
    if is_method:
        without_self = list(signature.parameters.values())[1:]
        signature = signature.replace(parameters=without_self)
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
    """A call of a framework function by the training program, intercepted by holmes.

    A wrapper of holmes receives the Call instead of the framework function (the target). The wrapper may run
    the target by `call()`, with the program's arguments or with changed ones, or do the target's work itself.
    """

    __slots__ = ("target", "args", "kwargs", "_read_names")

    def __init__(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        read_names: Sequence[str] = (),
    ):
        self.target = target  # the framework's own function, or the bound method
        self.args = args  # the program's positional arguments, without `self`
        self.kwargs = kwargs  # the program's keyword arguments
        self._read_names = read_names  # parameters that the wrapper reads

    def __call__(self, /, **changed: Any) -> Any:
        """Call the target (the framework's own function) with the program's arguments.

        Args:
            changed: Arguments that replace the program's, by name. An argument that the program passed by
                position is also replaced by position. An argument that the program did not pass is passed by
                keyword, or by position if it is positional-only.

        Returns:
            The target's result.
        """
        if not changed:
            return self.target(*self.args, **self.kwargs)
        parameters = parameters_of(self.target)
        args = list(self.args)
        kwargs = dict(self.kwargs)
        for name, value in changed.items():
            position = parameters.positions.get(name)  # None: it can be passed by keyword only
            if position is None or name in kwargs:
                kwargs[name] = value
            elif position < len(args):  # the program passed it by position
                args[position] = value
            elif name in parameters.positional_only:
                # It must be passed by position, so the omitted parameters before it get their defaults.
                omitted = list(parameters.positions)[len(args) : position]
                args += [parameters.defaults[other] for other in omitted]
                args.append(value)
            else:  # the program did not pass it
                kwargs[name] = value
        return self.target(*args, **kwargs)

    def values(self, names: Sequence[str], fallbacks: Mapping[str, Any]) -> list[Any]:
        """Return the values that some parameters of the framework's function (the target) have in this call.

        A parameter's value is the program's argument, or the target's default if the program passed none.

        Args:
            names: Names of the parameters. The values are returned in this order.
            fallbacks: Name -> value of a parameter that the installed version of the target lacks.

        Raises:
            TypeError: the program left out a required argument.
        """
        parameters = parameters_of(self.target)
        given_count = len(self.args)
        values = []
        for name in names:
            position = parameters.positions.get(name)  # None: it cannot be passed by position
            is_lacking = name not in parameters.names  # in the installed version of the target
            if position is not None and position < given_count:  # the program passed it by position
                values.append(self.args[position])
            elif name in self.kwargs:
                values.append(self.kwargs[name])
            elif name in parameters.defaults:
                values.append(parameters.defaults[name])
            elif is_lacking and name in fallbacks:
                values.append(fallbacks[name])
            else:
                # The program left out a required argument: bind() raises Python's own TypeError.
                parameters.signature.bind(*self.args, **self.kwargs)
                # bind() found no error: the target lacks the parameter, and there is no fallback for it.
                raise TypeError(f"{_name_of(self.target)} has no parameter {name!r}")
        return values

    def arguments(self) -> dict[str, Any]:
        """Return the value that every parameter of the framework's function (the target) has, by name.

        A parameter's value is the program's argument, or the target's default if the program passed none.
        """
        return arguments_of(self.target, self.args, self.kwargs)

    def given(self) -> dict[str, Any]:
        """Return the arguments that the program passed, by parameter name, without defaults.

        Raises:
            TypeError: the program left out a required argument.
        """
        return _given(self.target, self.args, self.kwargs)

    def accepts(self, name: str) -> bool:
        """Return whether the installed framework function has a parameter of this name."""
        return name in parameters_of(self.target).names

    def unread_arguments(self) -> list[str]:
        """Return the names of the arguments of this call that the wrapper does not read.

        A wrapper runs in place of a framework's function, and is called with the arguments that the
        training program passes to that function. Arguments that equal the default of their parameter are left
        out: to ignore them changes nothing. An argument for `*args` has no name, and is listed as
        "argument POSITION: VALUE".
        """
        if not self.args and not self.kwargs:
            return []
        parameters = parameters_of(self.target)
        unread = []  # the result
        named_count = len(parameters.positions)  # positional arguments after these go to *args
        for position, value in enumerate(self.args[named_count:], start=named_count):
            unread.append(f"argument {position}: {value!r}")
        for name, value in self.given().items():
            default = parameters.defaults.get(name, _NO_DEFAULT)
            is_read = name in self._read_names
            if not is_read and not _is_default(value, default):
                unread.append(name)
        return unread

    def refuse_unread_arguments(self) -> None:
        """Raise an error if the program passed an argument that the wrapper does not read.

        A wrapper that does the work of the framework function itself calls this first. Otherwise it would
        ignore such an argument without a message.

        Raises:
            HolmesError: there are such arguments. The message lists them.
        """
        names = self.unread_arguments()
        if names:
            raise HolmesError(
                f"{_name_of(self.target)} was called with {', '.join(names)}, which holmes does not handle; "
                "switch the feature off that patches it (HOLMES_DISABLE; `holmes patches` lists them)"
            )


def arguments_of(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the value of every parameter of a function for one call, by parameter name.

    A parameter's value is the argument in `args` or `kwargs`, or else the parameter's default.

    Raises:
        TypeError: a required argument is missing.
    """
    return {**parameters_of(target).defaults, **_given(target, args, kwargs)}


def _given(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of one call of a function, by parameter name, without defaults.

    Args:
        target: The function.
        args: Positional arguments of the call, without `self`.
        kwargs: Keyword arguments of the call.

    Raises:
        TypeError: a required argument is missing.
    """
    parameters = parameters_of(target)
    given = {**dict(zip(parameters.positions, args)), **kwargs}
    if not parameters.required <= given.keys():
        parameters.signature.bind(*args, **kwargs)  # raises Python's own TypeError
    return given


def _is_default(value: Any, default: Any) -> bool:
    """Return whether an argument is the default of its parameter.

    Only numbers and strings are compared by `==`: it would return a tensor for two tensors. Other arguments
    must be the same object as the default.
    """
    if value is default:
        return True
    return isinstance(value, (bool, int, float, str)) and value == default


def _name_of(target: Callable[..., Any]) -> str:
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def by_name(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a function with named parameters into a wrapper that a Patch can use.

    A wrapper runs instead of a framework's function, its target. Patch.wrap is called as (target,
    instance, args, kwargs). With by_name, a wrapper instead lists the target's parameters that it
    reads:

        @by_name
        def wrapper(call, instance, timeout):  # timeout: the program's argument
            return call(timeout=2 * timeout)  # runs the target with a changed argument

    Args:
        wrapper: A function (call, instance, ...), or (current, call, instance, ...) if with_session
            decorates the result. Each further parameter has the name of a parameter of the target.
            A default in the wrapper is used if the installed version of the target has no such
            parameter.

    Returns:
        The function for Patch.wrap. Its attribute `parameters` lists the parameters that the target
        must have: those without a default in the wrapper.

    Raises:
        TypeError: the wrapper has *args or **kwargs.
    """
    parameters = list(inspect.signature(wrapper).parameters.values())
    takes_session = parameters[0].name == "current"
    own_parameters = ["current", "call", "instance"] if takes_session else ["call", "instance"]
    target_parameters = parameters[len(own_parameters) :]
    for parameter in target_parameters:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise TypeError(
                f"{wrapper.__qualname__}: name the arguments that it reads; call() passes the others"
            )
    names = tuple(parameter.name for parameter in target_parameters)

    # Name -> value that the wrapper gets if the installed target has no such parameter.
    fallbacks = {
        parameter.name: parameter.default
        for parameter in target_parameters
        if parameter.default is not parameter.empty
    }

    @wraps(wrapper)
    def wrap(*arguments: Any) -> Any:
        """Call the function that by_name decorates (`wrapper`), with values for its parameters.

        A program has called a function of a framework, the target. For a wrapper (call, instance,
        timeout), the value of `timeout` is taken from that call.

        Args:
            arguments: Four values in this order:

                - target: the framework's function
                - instance: the object, if the target is a method; else None
                - args, kwargs: the arguments of the program's call

                If the patch also uses the decorator with_session, the session of holmes comes
                before these four.
        """
        *session_if_taken, target, instance, args, kwargs = arguments  # [session], or []
        # Call: the wrapper runs the target through this object.
        call = Call(target, args, kwargs, names)
        if not names:  # the wrapper reads no arguments of the program
            return wrapper(*session_if_taken, call, instance)
        # One value for each name. `fallbacks` has values for parameters that the target lacks.
        values = call.values(names, fallbacks)
        return wrapper(*session_if_taken, call, instance, *values)

    # The registry of patches switches a feature off if the target of its patch lacks one of these parameters.
    wrap.parameters = tuple(name for name in names if name not in fallbacks)  # type: ignore[attr-defined]
    return wrap


def with_session(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a wrapper so that it receives the session of holmes as its first argument.

    The session holds the plan and the state of this process's job. A wrapper runs instead of a framework's
    function. If no session is active, the wrapper does not run: only the framework's function is called.
    """

    @wraps(wrapper)
    def wrap(target: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Call the wrapper, or only the framework's function (`target`) if no session is active."""
        current = session.active()
        if current is None:
            return target(*args, **kwargs)
        return wrapper(current, target, instance, args, kwargs)

    return wrap


def inside(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """Return a wrapper that runs a framework's function inside a context manager.

    For example, the context can measure how long each call takes. The wrapper is for Patch.wrap.

    Args:
        context: Returns a new context manager; it is called for each call of the function.
    """

    @by_name
    def wrapper(call: Call, instance: Any) -> Any:
        """Call the framework's function within a new context."""
        with context():
            return call()

    return wrapper


class Running:
    """Wrapper of a framework's method that lists the objects whose method is running.

    Wrappers of other functions read the list `instances`. If it is not empty, they were called from within
    this method. For example, an all-reduce is one of gradients if it was called from within the method of
    DeepSpeed that averages a bucket of gradients.
    """

    def __init__(self) -> None:
        #: The objects whose method is running now. Of nested calls, the innermost is the last.
        self.instances: list[Any] = []

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Call the framework's method, and keep its object in `self.instances` until the method returns.

        Args:
            wrapped: The method, bound to `instance`.
        """
        with self.listed_as_running(instance):
            return wrapped(*args, **kwargs)

    @contextmanager
    def listed_as_running(self, instance: Any) -> Iterator[None]:
        """Keep an object in the list of running objects, `self.instances`, until the context ends.

        Wrappers of other functions read this list: the context stands for a running method of the object.
        """
        self.instances.append(instance)
        try:
            yield
        finally:
            self.instances.pop()

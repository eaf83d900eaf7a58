"""Decorators for wrappers: functions of holmes that run instead of a framework's function (the target).

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

`call` is a Call (call.py), and `instance` is the object whose method was called. `call()` passes all of the
program's arguments on, including those that a later release of the framework adds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from holmes_ext.patches.engine.call import Call
from holmes_ext.runtime import session


def by_name(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a wrapper with named parameters to a function (target, instance, args, kwargs) for Patch.wrap.

    A wrapper runs instead of a framework's function, its target.

    Args:
        wrapper: A function (call, instance, ...), or (current, call, instance, ...) if with_session decorates
            the result. Each further parameter has the name of a parameter of the target, and receives the
            value with which the program calls the target. A default in the wrapper is used if the installed
            version of the target has no such parameter.

    Returns:
        The function. Its attribute `parameters` lists the parameters that the target must have: those without
        a default in the wrapper.

    Raises:
        TypeError: the wrapper has *args or **kwargs.
    """
    parameters = list(inspect.signature(wrapper).parameters.values())
    takes_session = parameters[0].name == "current"
    read = parameters[3:] if takes_session else parameters[2:]  # without `current`, `call` and `instance`
    if any(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in read):
        raise TypeError(f"{wrapper.__qualname__}: name the arguments that it reads; call() passes the others")
    names = tuple(parameter.name for parameter in read)
    fallbacks = {
        parameter.name: parameter.default for parameter in read if parameter.default is not parameter.empty
    }

    @wraps(wrapper)
    def wrap(*arguments: Any) -> Any:
        """Call the wrapper with the values of the parameters that it names."""
        # Patch.wrap is called as (target, instance, args, kwargs). with_session adds the session as the first
        # argument: session_if_taken is then [session], and otherwise [].
        *session_if_taken, target, instance, args, kwargs = arguments
        call = Call(target, args, kwargs, names)  # the wrapper calls the target through it
        values = call.values(names, fallbacks) if names else ()
        return wrapper(*session_if_taken, call, instance, *values)

    # The registry of patches reads this. It switches a feature off if its target lacks one of these.
    wrap.parameters = tuple(name for name in names if name not in fallbacks)  # type: ignore[attr-defined]
    return wrap


def with_session(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a wrapper so that it receives the session of holmes (this process's job) as first argument.

    If no session is active, the wrapper does not run: only the framework's own function is called.
    """

    @wraps(wrapper)
    def wrap(target, instance, args, kwargs):
        """Call the wrapper with the session, or only the framework's function (`target`) without one."""
        current = session.active()
        if current is None:
            return target(*args, **kwargs)
        return wrapper(current, target, instance, args, kwargs)

    return wrap


def inside(context: Callable[[], AbstractContextManager]) -> Callable[..., Any]:
    """Return a wrapper of a framework's function that calls the function within `with context():`.

    The wrapper is for Patch.wrap.
    """

    @by_name
    def wrapper(call, instance):
        """Call the framework's function within a new context."""
        with context():
            return call()

    return wrapper


class Running:
    """Wrapper of a framework's method that lists the objects on which the method is running now.

    Another wrapper reads the list to find out whether it was called from within this method.
    """

    def __init__(self) -> None:
        self.instances: list[Any] = []  # the innermost running call is the last

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        with self.on(instance):
            return wrapped(*args, **kwargs)

    @contextmanager
    def on(self, instance: Any) -> Iterator[None]:
        """Add an object to the list `instances` until the context ends."""
        self.instances.append(instance)
        try:
            yield
        finally:
            self.instances.pop()

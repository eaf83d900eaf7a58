"""Decorators and classes that make wrappers of frameworks' functions, for Patch.wrap.

A wrapper runs instead of the patched function, the target. It has a parameter for each argument of the target
that it reads, of the same name, and calls the target through `call`:

    @by_name
    def split_layers(call, instance, method):      # `method` is a parameter of the target
        if method == "uniform":
            return call()                          # call the target with the program's arguments
        return call(method="parameters")           # call it with another `method`; the rest stays

    @with_session
    @by_name
    def report_split(current, call, instance):     # `current` is the active session of holmes;
        ...                                        # without one, only the target runs

The target receives all arguments that the wrapper does not name, including those that a later release of the
framework adds (call.py).
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
    """Convert wrapper(call, instance, ...) into a function that Patch.wrap accepts.

    Each further parameter of the wrapper has the name of a parameter of the target. It receives the program's
    argument, or the target's default if the program gave none.

    The target must have these parameters: the result lists them in `parameters`, and the engine switches the
    feature off if one is missing. Parameters with a default in the wrapper are exempt: they receive that
    default from a version of the target which lacks them.

    Args:
        wrapper: Its first parameter is `current` if with_session supplies the session, then come `call` (a
            Call) and `instance` (the object of a method; None for functions and static methods).

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
        *session_if_taken, target, instance, args, kwargs = arguments
        call = Call(target, args, kwargs, names)
        values = call.values(names, fallbacks) if names else ()
        return wrapper(*session_if_taken, call, instance, *values)

    wrap.parameters = tuple(name for name in names if name not in fallbacks)  # type: ignore[attr-defined]
    return wrap


def with_session(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Supply the active session as the wrapper's first argument; without a session, call only the target."""

    @wraps(wrapper)
    def wrap(wrapped, instance, args, kwargs):
        current = session.active()
        if current is None:
            return wrapped(*args, **kwargs)
        return wrapper(current, wrapped, instance, args, kwargs)

    return wrap


def inside(context: Callable[[], AbstractContextManager]) -> Callable[..., Any]:
    """Return a wrapper for Patch.wrap that calls the target within `with context():`."""

    @by_name
    def wrapper(call, instance):
        with context():
            return call()

    return wrapper


class Running:
    """Wrapper for Patch.wrap that lists the objects whose patched method is running now.

    Other wrappers look at the list to find out from where they are called: a patch of a function that several
    methods use may have to act only while one of these methods runs.
    """

    def __init__(self) -> None:
        self.instances: list[Any] = []  # the innermost running call is the last

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        with self.on(instance):
            return wrapped(*args, **kwargs)

    @contextmanager
    def on(self, instance: Any) -> Iterator[None]:
        """List the instance as running until the context ends."""
        self.instances.append(instance)
        try:
            yield
        finally:
            self.instances.pop()

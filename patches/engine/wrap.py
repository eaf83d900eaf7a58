"""Wrappers of frameworks' functions (Patch.wrap), which name the arguments that they read.

    @by_name
    def split_layers(call, instance, method):      # reads the target's argument `method`
        if method == "uniform":
            return call()                          # the target, called as the program called it
        return call(method="parameters")           # the same with another `method`

    @with_session
    @by_name
    def tell_split(current, call, instance): ...   # the same with the session; without one the target runs

All arguments that the wrapper does not name are passed on, those too that only a later release of the
framework has (call.py).
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
    """Make a Patch.wrap of wrapper(call, instance, ...), which receives the arguments that it names.

    The value of a parameter is the argument that the program gave, else the target's default. A parameter
    for which the wrapper has a default of its own may be missing in some versions of the target; all others
    become Patch.parameters, and a target without one of them switches the feature off.

    Raises:
        TypeError: the wrapper has *args or **kwargs.
    """
    parameters = list(inspect.signature(wrapper).parameters.values())
    supplied = 3 if parameters[0].name == "current" else 2  # (current,) call, instance
    declared = parameters[supplied:]
    if any(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in declared):
        raise TypeError(f"{wrapper.__qualname__}: name the arguments that it reads; call() passes the others")
    names = tuple(parameter.name for parameter in declared)
    optional = [parameter for parameter in declared if parameter.default is not parameter.empty]
    fallbacks = {parameter.name: parameter.default for parameter in optional}

    @wraps(wrapper)
    def outer(*arguments: Any) -> Any:
        *before, target, instance, args, kwargs = arguments
        call = Call(target, args, kwargs, names)
        values = call.values(names, fallbacks) if names else ()
        return wrapper(*before, call, instance, *values)

    outer.parameters = tuple(name for name in names if name not in fallbacks)  # type: ignore[attr-defined]
    return outer


def with_session(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Make a Patch.wrap of a by_name wrapper that takes the session first; without one the target runs."""

    @wraps(wrapper)
    def outer(wrapped, instance, args, kwargs):
        if (current := session.active()) is None:
            return wrapped(*args, **kwargs)
        return wrapper(current, wrapped, instance, args, kwargs)

    return outer


def inside(context: Callable[[], AbstractContextManager]) -> Callable[..., Any]:
    """Make a Patch.wrap that calls the target inside `context()`."""

    @by_name
    def wrapper(call, instance):
        with context():
            return call()

    return wrapper


class Running:
    """Patch.wrap that records on which objects a method runs: `instances`, the innermost call last."""

    def __init__(self) -> None:
        self.instances: list[Any] = []

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        with self.on(instance):
            return wrapped(*args, **kwargs)

    @contextmanager
    def on(self, instance: Any) -> Iterator[None]:
        """Record the instance while the context lasts."""
        self.instances.append(instance)
        try:
            yield
        finally:
            self.instances.pop()

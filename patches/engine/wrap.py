"""What wrappers of frameworks' functions have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from holmes_ext.runtime import session


def inside(context: Callable[[], AbstractContextManager]) -> Callable[..., Any]:
    """A wrapper (Patch.wrap) that calls the target inside `context()`."""

    def wrapper(wrapped, instance, args, kwargs):
        with context():
            return wrapped(*args, **kwargs)

    return wrapper


class Running:
    """A wrapper (Patch.wrap) that keeps whose method runs now: `instances`, the innermost call last."""

    def __init__(self) -> None:
        self.instances: list[Any] = []

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        self.instances.append(instance)
        try:
            return wrapped(*args, **kwargs)
        finally:
            self.instances.pop()


def by_name(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper (Patch.wrap) of one that has the target's first parameters as its own, after (wrapped,
    instance), in their order; *rest and **more take the others. Patch.parameters are their names."""

    @wraps(wrapper)
    def outer(*arguments):
        *before, args, kwargs = arguments
        return wrapper(*before, *args, **kwargs)

    supplied, named = ("current", "wrapped", "instance"), inspect.signature(wrapper).parameters.items()
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    outer.parameters = tuple(  # type: ignore[attr-defined]
        name for name, parameter in named if name not in supplied and parameter.kind not in variadic)
    return outer


def with_session(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper (Patch.wrap) of one that gets the session first; the target as it is where holmes is off."""

    @wraps(wrapper)
    def outer(wrapped, instance, args, kwargs):
        if (current := session.active()) is None:
            return wrapped(*args, **kwargs)
        return wrapper(current, wrapped, instance, args, kwargs)

    return outer


def whole(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> inspect.BoundArguments:
    """The arguments of a call, with the target's defaults."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound

"""What wrappers of frameworks' functions have in common."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def inside(context: Callable[[], AbstractContextManager]) -> Callable[..., Any]:
    """A wrapper (Patch.wrap) that calls the target inside `context()`."""

    def wrapper(wrapped, instance, args, kwargs):
        with context():
            return wrapped(*args, **kwargs)

    return wrapper

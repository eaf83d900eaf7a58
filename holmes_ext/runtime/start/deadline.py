"""An end for what has none: torch's store waits for ever for a server that is silent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from holmes_ext.errors import HolmesError


def within(seconds: float, late: str, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), or HolmesError `late` after so many seconds; its thread is left where it hangs."""
    outcome: list[tuple[bool, Any]] = []

    def call() -> None:
        try:
            outcome.append((True, function(*args)))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=call, name=f"holmes-{function.__name__}", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise HolmesError(late)
    good, value = outcome[0]
    if not good:
        raise value
    return value

"""Deadline of simulations, so that a command ends in time although a simulation may take seconds.

The simulations inside of `with simulations_until(end):` are given up at the moment `end`. The caller then
falls back to the closed form, a formula for the step time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf

#: Number of events (about a millisecond) after which a simulation reads the clock.
EVENTS_BETWEEN_CHECKS = 128

_end: ContextVar[float] = ContextVar("end of simulations", default=inf)


class TimeIsOver(Exception):  # noqa: N818
    """The deadline of a simulation has passed."""


@contextmanager
def simulations_until(end: float) -> Iterator[None]:
    """Make simulations inside the `with` block raise TimeIsOver once the moment `end` has passed.

    Args:
        end: Moment of time.monotonic().
    """
    token = _end.set(end)
    try:
        yield
    finally:
        _end.reset(token)


def check_deadline(number: int) -> None:
    """Raise TimeIsOver if the deadline has passed.

    Args:
        number: Number of events so far. The clock is read for some of them only.
    """
    if number % EVENTS_BETWEEN_CHECKS == 0 and time.monotonic() > _end.get():
        raise TimeIsOver

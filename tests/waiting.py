"""Waiting in tests for what other threads and processes do."""

import time
from collections.abc import Callable

from holmes_ext.runtime.deadline import Deadline


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline(seconds, "a test")


def await_(done: Callable[[], object], seconds: float = 30.0, what: str = "it") -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)

"""What is on its way when a process ends: a thread inside gloo's calls aborts the interpreter that ends under it
(status 134 in place of 0 or 1).

So at exit everything on its way is waited for: it arrives, or fails because the other end is gone.
"""

from __future__ import annotations

import atexit
import time
import weakref
from typing import Protocol

#: Seconds, for everything together: an end that neither answers nor goes away must not hold this one up for ever.
SETTLE_S = 20.0


class Settles(Protocol):
    def settle(self, seconds: float) -> None:
        """Return when it has arrived or failed, or after so long."""


_under_way: weakref.WeakSet[Settles] = weakref.WeakSet()


def under_way(what: Settles) -> None:
    """`what` is waited for if the process ends before it is done."""
    _under_way.add(what)


@atexit.register
def _settle() -> None:
    end = time.monotonic() + SETTLE_S
    for one in list(_under_way):
        one.settle(max(0.0, end - time.monotonic()))

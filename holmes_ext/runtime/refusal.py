"""Bad input that every rank meets at the same call: one rank tells it, the others only end.

    each rank   claims the message in the job's store; who comes first prints it, the others wait until it has
    the host    of the store waits for the others before it ends, or they would find no store

The line is out before any rank ends, because a launcher ends all ranks as soon as one has.
"""

from __future__ import annotations

import hashlib
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from holmes_ext.errors import RemoteError
from holmes_ext.runtime import session
from holmes_ext.runtime.deadline import Deadline

if TYPE_CHECKING:
    from holmes_ext.errors import HolmesError

#: How long ranks wait for each other, in seconds: some have perhaps nothing to refuse.
_WAIT = 10.0


def told_once(error: HolmesError, topic: str = "") -> HolmesError:
    """A RemoteError to raise instead of `error`: one rank has told the message by then. topic: where ranks
    word it differently. Without a store the error itself: told twice rather than never."""
    current = session.active()
    if current is None or current.store is None:
        return error
    process, store = current.process, current.store
    key = f"{current.round}/refusal/{hashlib.sha256((topic or str(error)).encode()).hexdigest()[:16]}"
    mine = str(process.rank)
    try:
        if store.compare_set(key, "", mine).decode() == mine:
            print(f"holmes: {error}", file=sys.__stderr__, flush=True)  # not sys.stderr: see job._one_line
            store.set(f"{key}/told", "yes")
        store.wait([f"{key}/told"], timedelta(seconds=_WAIT))
        seen = store.add(f"{key}/seen", 1)
        limit = Deadline(_WAIT)
        while process.rank == 0 and not process.agent_store and seen < process.world_size and limit.left > 0:
            time.sleep(0.02)
            seen = store.add(f"{key}/seen", 0)
    except (RuntimeError, ValueError):  # torch.distributed.DistError is a RuntimeError
        return error
    return RemoteError(str(error))

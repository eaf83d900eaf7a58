"""Restarts a job with other layers on its pipeline stages (--holmes-restart auto).

Layers can change only by a restart. The launcher restarts the job:

    1  training    all ranks vote for the restart (vote.py), rank 0 puts the layers into the store
    2  saved()     a checkpoint is complete on this rank
    3  leave()     at the beginning of the next step, each rank waits until all have called leave(),
                   and ends with STATUS. If a rank ended earlier, torchrun would stop all others, even
                   a rank that is still writing the file with the name of the newest checkpoint
    4  torchrun    its agents keep the store over restarts, and the job starts with the new layers

No rank waits for ever: leave() waits for at most ALL_S.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from holmes_ext.options import Options
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.start.store import append_entry, wait_for_value

#: Exit status "try again" (EX_TEMPFAIL of sysexits.h). torchrun restarts a job with any status but
#: 0.
STATUS = 75
#: Longest wait for the other ranks before the end, in seconds.
ALL_S = 60.0


class _Saved:
    """Number of checkpoints that the job has saved since this process started."""

    checkpoints = 0


def saved(*_: Any) -> None:
    """Count a checkpoint that is complete on this rank; called by a hook of the framework.

    The hook's arguments are not used.
    """
    _Saved.checkpoints += 1


def checkpoints() -> int:
    """Return the number of complete checkpoints; between two steps it is equal on all ranks."""
    return _Saved.checkpoints


def why_not(
    process: Process, options: Options, engine: EngineTraits, environ: Mapping[str, str]
) -> str:
    """Return the reason why a restart with other layers is not possible; "" if it is possible.

    Args:
        process: How the launcher started this process.
        options: Options of the job.
        engine: Abilities of the training framework.
        environ: Environment variables.
    """
    for name in ("plan", "partition"):  # options that fix the layers of the stages
        if name in options.given:
            return f"--holmes-{name} is given"
    if not engine.resplits:
        return f"checkpoints of {engine.name} do not load with other layers on a stage"
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    most_restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if process.launcher != "torchrun" or not process.agent_store or most_restarts == 0:
        return (
            "no launcher here would start the job again with it, as torchrun --max-restarts N does"
        )
    if restarts >= most_restarts:
        return f"torchrun has done its {most_restarts} restarts"
    return ""


def leave(store: Any, prefix: str, world: int) -> NoReturn:
    """End this process with status STATUS when all ranks are ready; torchrun then restarts the job.

    A rank is ready when it has called this function. This rank waits for at most ALL_S seconds, and
    then ends even if other ranks are not ready.

    Args:
        store: The job's store.
        prefix: Prefix of the store's keys; it differs for each start of the job.
        world: Number of ranks.
    """
    # Add an empty entry for this rank to the list "leaves" (the ranks that leave). The store counts
    # the entries; the last of `total` entries sets the key ".../all".
    append_entry(store, f"{prefix}/leaves", b"", count=1, total=world)
    wait_for_value(store, f"{prefix}/leaves/all", ALL_S)
    raise SystemExit(STATUS)

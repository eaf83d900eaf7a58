"""A restart by the launcher with what only a restart can change, layers of each stage: --holmes-restart auto.

training   all ranks have voted for it (adapt): rank 0 leaves the layers in the job's store
saved()    a checkpoint is whole, on this rank; the step that begins next is not trained any more
leave()    there every rank waits for the others (one may still write which checkpoint is the last), and
           ends with STATUS
start      torchrun's agents keep the store over their restarts: the job starts with those layers
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from holmes_ext.options import Options
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.start.store import append_entry, wait_for_value

#: "Try again" (EX_TEMPFAIL of sysexits.h): with any status but 0 torchrun starts the job again.
STATUS = 75
#: Seconds that a rank waits for the others where it ends.
ALL_S = 60.0


class _Saved:
    checkpoints = 0


def saved(*_: Any) -> None:
    """This rank has written its part of a checkpoint, and it is whole."""
    _Saved.checkpoints += 1


def checkpoints() -> int:
    """Written so far, the same on all ranks at a step's boundary."""
    return _Saved.checkpoints


def why_not(
    process: Process, options: Options, engine: EngineTraits, environ: Mapping[str, str]
) -> str:
    """Why the launcher will not start this rank again with other layers; "" where it will."""
    count, most = (
        environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    given = [f"--holmes-{name} is given" for name in ("plan", "partition") if name in options.given]
    reasons = {
        "".join(given[:1]): bool(given),
        f"checkpoints of {engine.name} do not load with other layers on a stage": not engine.resplits,
        "no launcher here would start the job again with it, as torchrun --max-restarts N does": (
            process.launcher != "torchrun" or not process.agent_store or not int(most)
        ),
        f"torchrun has done its {most} restarts": int(count) >= int(most),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def leave(store: Any, prefix: str, world: int) -> NoReturn:
    """Ends this rank once all `world` ranks are here, or after ALL_S. prefix: of this start's keys."""
    append_entry(store, f"{prefix}/leaves", b"", 1, world)
    wait_for_value(store, f"{prefix}/leaves/all", ALL_S)
    raise SystemExit(STATUS)

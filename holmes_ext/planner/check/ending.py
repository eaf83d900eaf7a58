"""Runs --holmes-check in every rank of a job, and ends all ranks with the same status.

    1. rank 0        prints the report, and puts the exit status into the job's store
    2. other ranks   wait for this status; they print nothing
    3. all ranks     wait until every rank has the status: the rank that hosts the store must not end earlier
    4. all ranks     end with this status

No rank waits for ever. A job of one process has no store, and ends after step 1.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from holmes_ext.errors import HolmesError
from holmes_ext.planner.check.findings import find
from holmes_ext.planner.check.prediction import SEARCH_S, predict
from holmes_ext.planner.check.report import show
from holmes_ext.runtime.start.store import append_entry, wait_for_value

if TYPE_CHECKING:
    from holmes_ext.options import Options
    from holmes_ext.runtime.session import Session

#: Longest time that ranks wait for rank 0's status, in seconds: simulations of large jobs take longer than
#: the search.
_STATUS_S = SEARCH_S + 300.0
#: Longest time that a rank waits until all others have the status, in seconds.
_ALL_S = 60.0
#: Exit status of bad input, as everywhere in holmes.
_BAD_INPUT = 2


def refuse_joined_jobs(options: Options) -> list[str]:
    """Raise HolmesError if a joined job is to be checked, because it would join the run.

    This is the hook on_options.

    Returns:
        No lines for the user.
    """
    if "join" in options.given:
        raise HolmesError(
            "--holmes-check cannot check a joined job; leave out --holmes-join, or use "
            "`holmes plan --joined`"
        )
    return []


def end_job(current: Session) -> NoReturn:
    """Report on the job and end this process before the training program begins.

    This is the hook on_ready. All ranks call it.

    Raises:
        SystemExit: always. The status is 0, 1 if a problem was found, or 2 if a file cannot be written.
        HolmesError: on a rank other than 0, if rank 0 gives no status.
    """
    status = _BAD_INPUT  # unless rank 0 has another status
    try:
        if current.rank == 0:
            status = _report(current)
    finally:  # also after an error of rank 0: the other ranks wait for its status
        if current.store is not None:
            status = _agree(current, status)
    sys.stdout.flush()
    raise SystemExit(status)


def _report(current: Session) -> int:
    """Print the report, or write it to a file, and return the exit status of the job."""
    try:
        findings = find(current)
        prediction = predict(current, sys.argv)
        show(current.options.value("check"), findings, prediction)
    except HolmesError as error:
        print(f"holmes: check: {error}", file=sys.stderr, flush=True)
        return _BAD_INPUT
    return findings.status


def _agree(current: Session, status: int) -> int:
    """Send rank 0's exit status to all ranks of the job, and return it.

    The rank that hosts the store returns when all ranks have the status, or after _ALL_S seconds.

    Args:
        current: The session of this process, with its store: keys and values that all ranks share.
        status: The exit status on rank 0; not used on the other ranks.

    Raises:
        HolmesError: rank 0 gave no status in time, or the store is lost.
    """
    prefix = f"{current.key_prefix}/check"
    status_key = f"{prefix}/status"
    process = current.process
    try:
        if current.rank == 0:
            current.store.set(status_key, str(status))
        stored = wait_for_value(current.store, status_key, _STATUS_S)
        # Each rank counts itself. With the last of them, append_entry() sets the key "ended/all".
        append_entry(current.store, f"{prefix}/ended", b"", count=1, total=process.world_size)
        # The launcher's rank 0 hosts the store. (Its ranks are process.rank; current.rank is the rank
        # that holmes has given to this process.) With agent_store, torchrun's agent hosts it instead;
        # the agent ends after all ranks.
        hosts_store = process.rank == 0 and not process.agent_store
        if hosts_store:
            wait_for_value(current.store, f"{prefix}/ended/all", _ALL_S)
    except RuntimeError:  # the store is lost: torch.distributed.DistError
        stored = b""
    if not stored:
        raise HolmesError(
            f"check: rank {current.rank} got no result from rank 0; its output has the reason"
        )
    return int(stored)

"""The job's own TCPStore, opened before init_process_group, with errors that name the rank and the address.

    launcher's rank 0 hosts the store (torchrun's agent already does) | every rank connects to
    MASTER_ADDR:MASTER_PORT

The host stays where the launcher put it, whatever ranks the processes get afterwards: the later env://
rendezvous finds this same server (torch.distributed.rendezvous._create_c10d_store; patches/torch/groups.py
sees to the hosting).

torchrun's agents keep the store while they start the job again (--holmes-restart auto). A job leaves in it
the layers of each stage for its next start.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.start.launcher import Process

#: Seconds that the store may take to answer a thread that looks on while the job trains, and in which such a
#: thread has ended once it is told to: one that came back from the store while the interpreter ends would
#: abort the process (status 134).
STORE_S = 10.0
ENDED_S = STORE_S + 5.0
#: Kept alive as long as the process: the store's server lives in this object on the launcher's rank 0.
_opened: list[Any] = []


def open_store(process: Process, timeout_s: float) -> Any:
    """Of `process`'s job, hosted or connected; HolmesError when it cannot be had in `timeout_s` seconds."""
    hosts = process.rank == 0 and not process.agent_store
    if not hosts:
        _await_listener(process, timeout_s)
    try:
        _opened.append(connect(process, timeout_s, hosts))
    except (RuntimeError, ValueError) as error:  # torch.distributed.DistError is a RuntimeError
        reason = str(error).splitlines()[0]
        role = "host" if hosts else "reach"
        raise HolmesError(
            f"rank {process.rank} on {socket.gethostname()} cannot {role} the job's store at"
            f" {process.master_addr}:{process.master_port} ({reason}); check MASTER_ADDR and MASTER_PORT"
        ) from None
    return _opened[-1]


def connect(process: Process, timeout_s: float, hosts: bool = False) -> Any:
    """A TCPStore for a thread that waits, which keeps others from its own. Raises what torch does."""
    import torch.distributed as dist

    limit = timedelta(seconds=timeout_s)
    where = process.master_addr, process.master_port, process.world_size
    return dist.TCPStore(
        *where, is_master=hosts, timeout=limit, wait_for_workers=False, multi_tenant=True
    )


@contextmanager
def until_gone(process: Process, store: Any) -> Iterator[None]:
    """Inside, the store that torch opened is dropped; behind, no rank can meet its server any more: its host
    drops it when all others have a connection to it, whose end tells them. An agent's server stays."""
    watch = None
    if process.rank > 0 and not process.agent_store:
        with suppress(OSError):  # the program has its store elsewhere
            watch = socket.create_connection(
                (process.master_addr, process.master_port), timeout=STORE_S
            )
        if store.add("holmes/leave", 1) == process.world_size - 1:
            store.set("holmes/leave/all", b"1")
    elif process.world_size > 1 and not process.agent_store:
        store.get("holmes/leave/all")
    del store
    yield
    if watch is not None:
        with watch, suppress(OSError):
            watch.recv(1)


def awaited(store: Any, key: str, seconds: float) -> bytes:
    """What stands under `key` as soon as it does, empty after so many seconds; one message less than wait and
    get (there are thousands of ranks). Raises what the store does when it is gone."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=seconds))
    try:
        value: bytes = store.get(key)
    except RuntimeError:
        value = store.get(key) if store.check([key]) else b""  # check raises when the store is gone
    finally:
        store.set_timeout(before)
    return value


def put_in(store: Any, key: str, entry: bytes, count: int, total: int) -> None:
    """Add `entry`, which stands for `count` of `total`, to what gathered() finds under `key`."""
    store.append(f"{key}/entries", len(entry).to_bytes(4, "big") + entry)
    if store.add(f"{key}/count", count) >= total:
        store.set(f"{key}/all", b"1")


def gathered(store: Any, key: str, seconds: float) -> list[bytes]:
    """All entries that put_in() added, once they are complete, or those there after so many seconds."""
    whole = awaited(store, f"{key}/all", max(0.1, seconds))
    kept = memoryview(
        store.get(f"{key}/entries") if whole or store.check([f"{key}/entries"]) else b""
    )
    entries = []
    while kept:
        end = 4 + int.from_bytes(kept[:4], "big")
        entries.append(bytes(kept[4:end]))
        kept = kept[end:]
    return entries


def _await_listener(process: Process, timeout_s: float) -> None:
    """Plain connects until somebody listens: TCPStore's errors are pages of C++ frames."""
    limit = Deadline(timeout_s)
    while True:
        try:
            socket.create_connection((process.master_addr, process.master_port), timeout=5).close()
            return
        except OSError as error:
            if limit.passed:
                raise HolmesError(
                    f"rank {process.rank} on {socket.gethostname()} cannot reach the job's store at"
                    f" {process.master_addr}:{process.master_port} within {timeout_s:g} s "
                    f"({error.strerror or error}); is rank 0 running with --holmes, and do MASTER_ADDR and "
                    f"MASTER_PORT name its host?"
                ) from None
            time.sleep(0.02)


_RESTART_KEY = "holmes/restart"


def leave_layers(store: Any, layers: str, sizes: Sizes) -> None:
    """Keep the layers of each stage for the next start of a job.

    Args:
        store: The job's store.
        layers: As --holmes-partition takes them, such as "5,3".
        sizes: The parallel sizes of the job.
    """
    store.set(_RESTART_KEY, json.dumps({"partition": layers, "sizes": asdict(sizes)}))


def left_layers(store: Any) -> tuple[str, Sizes | None]:
    """Return the layers and sizes that the previous start of the job has left; ("", None) if it left none."""
    if not store.check([_RESTART_KEY]):
        return "", None
    left = json.loads(store.get(_RESTART_KEY))
    return left["partition"], Sizes(**left["sizes"])

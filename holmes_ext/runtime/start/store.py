"""Opens the job's key-value store (torch's TCPStore) before init_process_group, and waits for its keys.

The launcher's rank 0 hosts the store, or torchrun's agent does. Every rank connects to
MASTER_ADDR:MASTER_PORT. Errors name the rank and the address.

The host stays where the launcher put it, even if holmes renumbers the ranks: torch's env:// rendezvous finds
the same server (torch.distributed.rendezvous._create_c10d_store; patches/torch/groups.py makes the right
process the host).

torchrun's agents keep the store when they start the job again. With --holmes-restart auto, a job whose
pipeline stages would be faster with other numbers of layers ends after a checkpoint and is started again. It
leaves the new numbers of layers in the store (leave_layers), and its next start uses them (left_layers).
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

#: Seconds that a thread that runs beside the training waits for an answer of the store.
STORE_S = 10.0
#: Seconds until such a thread has ended when it is stopped. It must end before the interpreter does: a
#: thread that returns from the store later would abort the process (status 134).
ENDED_S = STORE_S + 5.0
_CONNECT_S = 5.0  # seconds of a try to connect to the store's host
_RETRY_S = 0.02  # seconds between two tries
_LEAST_WAIT_S = 0.1
_LENGTH_BYTES = 4  # of the length before each entry that append_entry() adds
#: The store's server lives in this object on the launcher's rank 0. It is kept as long as the process.
_opened: list[Any] = []


def open_store(process: Process, timeout_s: float) -> Any:
    """Return a client of the job's key-value store; the launcher's rank 0 also starts its server.

    Exception: if torchrun's agent already hosts a store, rank 0 starts none. All ranks, rank 0
    included, then connect to the agent's store.

    Args:
        process: This rank, as its launcher numbered it, with the address of the store.
        timeout_s: Seconds to wait for the store.

    Returns:
        A torch.distributed.TCPStore.

    Raises:
        HolmesError: The store cannot be hosted, or does not answer within `timeout_s` seconds.
    """
    is_host = process.rank == 0 and not process.agent_store
    if not is_host:
        _wait_for_listener(process, timeout_s)
    try:
        # Keeps the object, and with it the server on the host, until the process ends.
        _opened.append(connect(process, timeout_s, is_host=is_host))
    except (RuntimeError, ValueError) as error:  # torch.distributed.DistError is a RuntimeError
        reason = str(error).splitlines()[0]
        action = "host" if is_host else "reach"
        raise HolmesError(
            f"the launcher's rank {process.rank} on {socket.gethostname()} cannot {action} the job's store at"
            f" {process.master_addr}:{process.master_port} ({reason}); check MASTER_ADDR and MASTER_PORT"
        ) from None
    return _opened[-1]


def connect(process: Process, timeout_s: float, is_host: bool = False) -> Any:
    """Return a new client of the job's store.

    A client serves one call at a time. A thread that may wait long for a key must have its own client.

    Args:
        process: This process; it has the address of the store.
        timeout_s: Seconds that each call may take.
        is_host: Start the store's server in this process, too.

    Raises:
        RuntimeError: The store cannot be reached or hosted (torch.distributed.DistError).
    """
    import torch.distributed as dist

    return dist.TCPStore(
        process.master_addr,
        process.master_port,
        process.world_size,
        is_master=is_host,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,  # stores of a process at the same address share a server
    )


@contextmanager
def until_gone(process: Process, store: Any) -> Iterator[None]:
    """Let the caller drop a torch store in the `with` block; the block is left after its server has ended.

    Then no rank can connect to the old server by mistake when the program makes a new store at the same
    address. On the host (rank 0), the server is part of the object `store`, and ends with the last reference
    to it: the caller must keep none. The ranks agree on its end like this:

        1. every other rank   opens a plain connection to the server, and adds 1 to holmes/leave
        2. the last of them   sets holmes/leave/all
        3. the host           waits for this key, then drops the server
        4. every other rank   sees its plain connection end

    The server of a torchrun agent is not waited for: it outlives the job.
    """
    connection = None
    if process.rank > 0 and not process.agent_store:
        # Step 1.
        with suppress(OSError):  # the program's store has another address
            address = (process.master_addr, process.master_port)
            connection = socket.create_connection(address, timeout=STORE_S)
        if store.add("holmes/leave", 1) == process.world_size - 1:  # step 2
            store.set("holmes/leave/all", b"1")
    elif process.world_size > 1 and not process.agent_store:
        store.get("holmes/leave/all")  # step 3: get() waits for the key
    del (
        store
    )  # this function's reference, so that the caller can drop the last reference in the block
    yield
    if connection is not None:
        with connection, suppress(OSError):
            connection.recv(1)  # step 4: nothing is sent, so this returns when the connection ends


def wait_for_value(store: Any, key: str, seconds: float) -> bytes:
    """Return the value of a key as soon as the key is set; b"" if it is not set within `seconds`.

    The store's own timeout is set to this limit, and restored afterwards. Only get() is called, which waits
    by itself: it needs a message less than wait() and get(), and there may be thousands of ranks.

    Raises:
        RuntimeError: The store is lost (torch.distributed.DistError).
    """
    previous_timeout = store.timeout
    store.set_timeout(timedelta(seconds=seconds))
    try:
        value: bytes = store.get(key)
    except RuntimeError:  # no value in time, or the store is lost: then check() raises, too
        value = store.get(key) if store.check([key]) else b""
    finally:
        store.set_timeout(previous_timeout)
    return value


def append_entry(store: Any, key: str, entry: bytes, count: int, total: int) -> None:
    """Append an entry to a list in the store; collect_entries() reads the list.

    Args:
        store: The job's store.
        key: Prefix of the list's keys.
        entry: Content of the entry.
        count: Number of ranks that the entry stands for.
        total: Number of ranks that a complete list stands for.
    """
    store.append(f"{key}/entries", len(entry).to_bytes(_LENGTH_BYTES, "big") + entry)
    if store.add(f"{key}/count", count) >= total:
        store.set(f"{key}/all", b"1")


def collect_entries(store: Any, key: str, seconds: float) -> list[bytes]:
    """Return the entries that append_entry() added, as soon as the list is complete.

    After `seconds`, the entries of an incomplete list are returned.

    Args:
        store: The job's store.
        key: Prefix of the list's keys.
        seconds: Seconds to wait.
    """
    is_complete = bool(wait_for_value(store, f"{key}/all", max(_LEAST_WAIT_S, seconds)))
    packed = b""
    if is_complete or store.check([f"{key}/entries"]):
        packed = store.get(f"{key}/entries")
    unread = memoryview(packed)
    entries = []
    while unread:  # the length of an entry, the entry, the length of the next one, ...
        end = _LENGTH_BYTES + int.from_bytes(unread[:_LENGTH_BYTES], "big")
        entries.append(bytes(unread[_LENGTH_BYTES:end]))
        unread = unread[end:]
    return entries


def _wait_for_listener(process: Process, timeout_s: float) -> None:
    """Wait until the store's host accepts connections.

    Plain sockets are used because an error of TCPStore is several pages of C++ stack.

    Raises:
        HolmesError: The host accepts no connection within `timeout_s` seconds.
    """
    deadline = Deadline(timeout_s)
    address = (process.master_addr, process.master_port)
    while True:
        try:
            socket.create_connection(address, timeout=_CONNECT_S).close()
            return
        except OSError as error:
            if deadline.passed:
                raise HolmesError(
                    f"the launcher's rank {process.rank} on {socket.gethostname()} cannot reach the job's "
                    f"store at {process.master_addr}:{process.master_port} within {timeout_s:g} s "
                    f"({error.strerror or error}); is rank 0 running with --holmes, and do MASTER_ADDR and "
                    f"MASTER_PORT name its host?"
                ) from None
            time.sleep(_RETRY_S)


_RESTART_KEY = "holmes/restart"


def leave_layers(store: Any, layers: str, sizes: Sizes) -> None:
    """Write the layers of each pipeline stage into the store, for the next start of the job.

    Args:
        store: The job's store.
        layers: As --holmes-partition takes them, such as "5,3".
        sizes: The parallel sizes of the job.
    """
    store.set(_RESTART_KEY, json.dumps({"partition": layers, "sizes": asdict(sizes)}))


def left_layers(store: Any) -> tuple[str, Sizes | None]:
    """Return the layers of each pipeline stage that the job's previous start left for this start.

    With --holmes-restart auto, a job may end to be started again with other numbers of layers per
    stage. Before its end, it writes these numbers into the store by leave_layers(). torchrun keeps
    the store.

    Returns:
        The layers of each stage, such as "5,3", and the parallel sizes; ("", None) if there are
        none.
    """
    if not store.check([_RESTART_KEY]):
        return "", None
    left = json.loads(store.get(_RESTART_KEY))
    return left["partition"], Sizes(**left["sizes"])

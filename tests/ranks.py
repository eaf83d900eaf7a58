"""Runs a function in several processes that form a process group on loopback, for tests.

    assert run_ranks(function, 2, argument) == [of_rank_0, of_rank_1]
    # function(rank, argument), at a module's top

The backend is gloo, or NCCL with a GPU as the default device of each process (carriers.py). Tensors in an
answer are moved to the CPU.

Each process is forked from a server that has imported torch and done nothing else (multiprocessing's
"forkserver"). The server has one thread, which every rank checks, so a fork of it is as good as a new
interpreter. New interpreters would import torch for seconds, some 170 times in the suite. Forks of pytest
itself would share its threads and locks.

Hence a rank receives only what pickle can carry: the function by name, and its arguments. The environment
and the working directory are the caller's. Changes that a test has made in its own process (monkeypatch, a
session) do not exist in a rank: let the function make them.
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any

import carriers
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

TIMEOUT_S = 60
_context = multiprocessing.get_context("forkserver")
#: What the server imports; torch._dynamo is what the first checkpoint() of a process would import.
_preloaded = [
    "torch",
    "torch._dynamo",
    "pytest",
    "holmes_ext.job",
    "holmes_ext.runtime.reduce.reducer",
    "holmes_ext.runtime.reduce.hierarchical",
    "holmes_ext.runtime.reduce.hierarchical_nccl",
]
_parent: Any = None  # in a rank: its end of the pipe to run_ranks


class RankError(RuntimeError):
    """Error of a rank that raised, or ended without an answer.

    The attribute `said` has the lines that all ranks sent by say().
    """

    def __init__(self, text: str, said: list[str]):
        super().__init__(text)
        self.said = said


def preload(*modules: str) -> None:
    """Let the server import further modules; call this before the first run_ranks()."""
    _preloaded.extend(modules)


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Run function(rank, *args) in each of `world_size` processes, and return the results by rank.

    Raises:
        RankError: A rank raised (the message has its traceback), or gave no answer within timeout_s seconds.
    """
    _context.set_forkserver_preload(_preloaded)
    # numpy's BLAS starts its threads when it is imported
    with _environment(OMP_NUM_THREADS="1", **carriers.environment()):
        forkserver.ensure_running()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children, readers = [], {}
    for rank in range(world_size):
        reader, writer = _context.Pipe(duplex=False)
        job = (
            writer,
            rank,
            function,
            args,
            world_size,
            store.port,
            {**os.environ, **carriers.environment()},
        )
        children.append(_context.Process(target=_rank, args=job, daemon=True))
        children[-1].start()
        writer.close()
        readers[reader] = rank
    answers: dict[int, Any] = {}
    said: list[str] = []
    end = time.monotonic() + timeout_s
    try:
        while readers and (ready := wait(list(readers), max(0.0, end - time.monotonic()))):
            for reader in ready:
                try:
                    kind, value = pickle.loads(reader.recv_bytes())
                except EOFError:  # the rank has ended
                    del readers[reader]
                    continue
                rank = readers[reader]
                if (
                    kind == "error"
                ):  # at the first one, not when the others have waited for that rank in vain
                    raise RankError(f"rank {rank}:\n{value}", said)
                if kind == "said":
                    said.append(f"rank {rank}: {value}")
                else:
                    answers[rank] = value
    finally:
        for child in children:
            if readers:  # too late, or one has raised
                child.kill()
            child.join()
    silent = [(rank, child.exitcode) for rank, child in enumerate(children) if rank not in answers]
    if silent:
        raise RankError(f"ranks (with exit codes) that gave no answer: {silent}", said)
    return [answers[rank] for rank in range(world_size)]


def run_cases(
    function: Callable[..., dict], world_size: int, names: list[str], timeout_s: float
) -> list[dict]:
    """Run function(rank, names) in each process, and return a dictionary by name for each rank.

    On emulated GPUs, processes are started anew for every two names: a process keeps the memory of its
    communicators until it ends.
    """
    few, results = (
        2 if carriers.EMULATED else len(names),
        [dict[str, Any]() for _ in range(world_size)],
    )
    for some in (names[start : start + few] for start in range(0, len(names), few)):
        for result, more in zip(
            results, run_ranks(function, world_size, some, timeout_s=timeout_s)
        ):
            result |= more
    return results


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def seeded(seed: int) -> torch.Generator:
    """Return a seeded generator of random numbers on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def hosted_store() -> tuple[dist.TCPStore, dict[str, str]]:
    """Return a store, and environment variables by which other processes find it.

    The store's port is already bound. The variables are those of torchrun if its agent hosts the store. The
    store lives as long as the caller keeps it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def all_are_here(rank: int, world_size: int) -> None:
    """Wait until every rank has called this function.

    It uses only the store: a rank may die right afterwards, while other ranks still wait.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(world_size)])


def say(text: object) -> None:
    """Send a text from a rank to the caller of run_ranks(), even if the rank fails later.

    RankError.said then has the line "rank R: TEXT".
    """
    _tell(_parent, "said", str(text))


def _tell(parent: Any, kind: str, value: object) -> None:
    """Send a value to the parent process by plain pickle.

    multiprocessing's own pickle sends a tensor as a file of the rank, which may have ended when the file is
    opened.
    """
    parent.send_bytes(pickle.dumps((kind, value)))


def _rank(
    parent: Any,
    rank: int,
    function: Callable[..., Any],
    args: tuple,
    world_size: int,
    port: int,
    environ: dict[str, str],
) -> None:
    global _parent
    gc.freeze()  # a collection would touch, so copy, all that the server has imported
    threads = os.listdir(f"/proc/{os.getppid()}/task")
    assert len(threads) == 1, (
        f"the server of ranks has {len(threads)} threads: what it has imported has started some"
    )
    _parent = parent
    os.environ.clear()
    os.environ.update(
        environ,
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        HOLMES_LAB_RANK=str(rank),
        NCCL_HOSTID=f"host {rank}",
    )
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        if carriers.ON_GPUS:
            torch.cuda.set_device(0)
            torch.set_default_device("cuda")
        dist.init_process_group(
            carriers.BACKEND, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        answer = function(rank, *args)
        _tell(parent, "answer", tree_map_only(torch.Tensor, torch.Tensor.cpu, answer))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - handed to the parent, which raises it
        _tell(parent, "error", traceback.format_exc())

"""Runs a function in several processes that form a gloo process group on loopback. For tests of runtime/."""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 60


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """[function(rank, *args) of every rank]; RuntimeError with the trace of the first rank that raised."""
    context = multiprocessing.get_context("fork")  # torch is imported once; each child uses one thread
    results: Any = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [
        context.Process(target=_child, args=(function, rank, world_size, port, results, args), daemon=True)
        for rank in range(world_size)
    ]
    for child in children:
        child.start()
    answers: dict[int, Any] = {}
    try:
        end = time.monotonic() + timeout_s
        while any(child.is_alive() for child in children) and time.monotonic() < end:
            # Not longer than a moment: all may have ended since they were last looked at, and then nothing comes any more.
            multiprocessing.connection.wait([*(child.sentinel for child in children if child.is_alive()), results._reader], 0.2)
            _take(results, answers)  # at the first error, not when the others have waited for that rank in vain
        _take(results, answers)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
                child.join()
    silent = [(rank, child.exitcode) for rank, child in enumerate(children) if rank not in answers]
    if silent:
        raise RuntimeError(f"ranks (with exit codes) that gave no answer: {silent}")
    return [answers[rank] for rank in range(world_size)]


def _take(results: Any, answers: dict[int, Any]) -> None:
    while not results.empty():
        rank, value, error = results.get()
        if error:
            raise RuntimeError(f"rank {rank}:\n{error}")
        answers[rank] = value


def all_are_here(rank: int, world_size: int) -> None:
    """Returns when every rank called it. Through the store alone: a rank may die right after it, while others still wait."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(world_size)])


def say(text: str) -> None:
    """One line on standard output in one write: print() under pytest makes two, between which another rank's line may fall."""
    os.write(1, f"{text}\n".encode())


def _child(function: Callable[..., Any], rank: int, world_size: int, port: int, results: Any, args: tuple) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
        results.put((rank, function(rank, *args), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - handed to the parent, which raises it
        results.put((rank, None, traceback.format_exc()))

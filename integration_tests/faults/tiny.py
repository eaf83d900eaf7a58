"""A job without a model, which communicates like a training job, for faults in fast tests.

    tiny.py JOB

Each rank is one of 2 pipeline stages x 2 data-parallel ranks. A step is a send between the stages, an all-
reduce in the data-parallel group of the stage and an all-reduce over all ranks. Each step prints "step N
sum S". The backend is NCCL on GPUs, and gloo otherwise.

JOB is JSON: {"ranks": {"rank": {...}}, "flags": [...], "env": {...}}. `flags` and `env` are holmes's flags
and variables for all ranks; `ranks` are differences of some of the launcher's ranks:

    flags      more flags                       environ   variables
    versions   {"holmes_ext": ..., "python": ..., "frameworks": {"torch": ...}}
    do, when   "kill" | "stop" | "exit" this process, or "silent": be a store that never answers;
               "before" | "preflight" | "agreed" | step number (in the reduction) | "send" (of step 3)

Flags and variables are not passed to the process itself for two reasons: the lab forks all jobs from one
Python that has imported torch, and holmes would have started before this file could interfere.
"""

import datetime
import json
import os
import platform
import signal
import socket
import sys
import time

JOB = json.loads(sys.argv.pop(1))
MINE = JOB["ranks"].get(os.environ["RANK"], {})
STEPS = 6
ELEMENTS = 50_000  # of each reduced tensor


def fail_at(when):
    """Kill, stop, exit or silence this rank if its failure is due at this moment."""
    if MINE.get("when") != when:
        return
    if MINE["do"] == "silent":
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        with socket.create_server(address, backlog=64):
            time.sleep(600)
    if MINE["do"] == "exit":
        os._exit(0)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[MINE["do"]])


def pretend_other_versions():
    """Report other versions than the other ranks have, as this rank's "versions" say."""
    versions = MINE.get("versions", {})
    if "holmes_ext" in versions:
        from holmes_ext.runtime.start import rank as start

        start.__version__ = versions["holmes_ext"]
    if "python" in versions:
        platform.python_version = lambda: versions["python"]
    if "frameworks" in versions:
        import holmes_ext.patches

        holmes_ext.patches.installed_versions = lambda features: versions["frameworks"]
    if "patches" in versions:
        from holmes_ext.patches import Registry

        states = Registry.states
        Registry.states = lambda registry: dict.fromkeys(states(registry), versions["patches"])


def start_holmes():
    from holmes_ext.runtime.start import exchange, preflight

    exchange._LEFTOVER_SECONDS = 1.0
    if "PREFLIGHT_S" in os.environ:
        preflight.FINDINGS_S = float(os.environ["PREFLIGHT_S"])
        preflight.LISTEN_S = preflight.FINDINGS_S / 2
    original_run = preflight.run

    def run(*args):
        fail_at("preflight")
        return original_run(*args)

    preflight.run = run
    if not MINE.get("stock"):
        from holmes_ext import _pth

        sys.argv += [*JOB["flags"], *MINE.get("flags", [])]
        _pth.start(sys.argv)


def train():
    import torch
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=float(os.environ.get("GROUP_TIMEOUT_S", "60")))
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=timeout)
    rank = dist.get_rank()
    world = dist.get_world_size()
    half = world // 2  # number of ranks of each pipeline stage
    first_stage = dist.new_group(list(range(half)), timeout=timeout)
    last_stage = dist.new_group(list(range(half, world)), timeout=timeout)
    data_group = first_stage if rank < half else last_stage
    values = torch.ones(ELEMENTS)
    for step in range(1, STEPS + 1):
        if step == 3:
            fail_at("send")
        if rank < half:
            dist.send(values, rank + half)
        else:
            dist.recv(values, rank - half)
        work = dist.all_reduce(values, group=data_group, async_op=True)
        fail_at(step)
        work.wait()
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        os.write(1, f"step {step} sum {total.item():g}\n".encode())
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
        values.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    fail_at("before")
    os.environ.update({**JOB["env"], **MINE.get("environ", {})})
    pretend_other_versions()
    start_holmes()
    fail_at("agreed")
    train()

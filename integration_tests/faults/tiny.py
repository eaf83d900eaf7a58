"""The job to which the cheap faults happen: no model, but the traffic of one. Prints "step N" as it goes.
NCCL on GPUs.

Each rank is a stage of pipeline 2 x data 2: a step is a send between stages, a reduction in the data group
(of the stage) and one over all ranks. Its argument (JSON: {"ranks": {"rank": {...}}, "flags": [...], "env":
{...}}) says what all are given, and what is different on some of the launcher's ranks. (Not by flags and
variables of the process: then the lab could not fork all jobs from one Python that has torch imported, and
holmes would have started before this file could interfere.)

    flags      more flags                       environ   variables
    versions   {"holmes_ext": ..., "python": ..., "frameworks": {"torch": ...}}
    do, when   "kill" | "stop" | "exit" this process, or "silent": be a store that never answers;
               "before" | "preflight" | "agreed" | step number (in the reduction) | "send" (of step 3)
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
STEPS, ELEMENTS = 6, 50_000


def perhaps(when):
    """Do what this rank is to do now, if it is to."""
    if MINE.get("when") != when:
        return
    if MINE["do"] == "silent":
        with socket.create_server(
            (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), backlog=64
        ):
            time.sleep(600)
    if MINE["do"] == "exit":
        os._exit(0)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[MINE["do"]])


def pretend():
    """Other versions than the other ranks have."""
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
    run = preflight.run
    preflight.run = lambda *args: (perhaps("preflight"), run(*args))[1]
    if not MINE.get("stock"):
        from holmes_ext import _pth

        sys.argv += [*JOB["flags"], *MINE.get("flags", [])]
        _pth.start(sys.argv)


def train():
    import torch
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=float(os.environ.get("GROUP_TIMEOUT_S", "60")))
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    half = world // 2
    data = [
        dist.new_group(list(ranks), timeout=timeout) for ranks in (range(half), range(half, world))
    ][rank >= half]
    values = torch.ones(ELEMENTS)
    for step in range(1, STEPS + 1):
        if step == 3:
            perhaps("send")
        if rank < half:
            dist.send(values, rank + half)
        else:
            dist.recv(values, rank - half)
        work = dist.all_reduce(values, group=data, async_op=True)
        perhaps(step)
        work.wait()
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        os.write(1, f"step {step} sum {total.item():g}\n".encode())
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
        values.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    perhaps("before")
    os.environ.update({**JOB["env"], **MINE.get("environ", {})})
    pretend()
    start_holmes()
    perhaps("agreed")
    train()

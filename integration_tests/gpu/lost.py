"""Script of one rank of a job whose communicators end before the job does: python lost.py SCENE --holmes ...

torchrun's variables say which rank. After its scene the rank waits for some seconds, so that holmes would
report a failure that it sees, and prints "survived".
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

#: Seconds after which torch ends the process if an operation has not ended.
TIMEOUT = timedelta(seconds=float(os.environ.get("TIMEOUT_S", "600")))
#: holmes looks for failures of NCCL every second.
LOOK_S = 3.0
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def wait_for_all_ranks(store: dist.Store, name: str) -> None:
    """Wait until all ranks have called this function with the same name. NCCL is not used."""
    if store.add(f"{name}/count", 1) == int(os.environ["WORLD_SIZE"]):
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"])


def start_operation(group: dist.ProcessGroup) -> None:
    """Start an all-reduce that does not end, because rank 0 never joins it."""
    if dist.get_rank() != 0:
        dist.all_reduce(torch.ones(1000, device=DEVICE), group=group, async_op=True)


def abort_idle_group(group: dist.ProcessGroup) -> None:
    """Abort a group without an operation under way."""
    group.abort()


def abort_busy_group(group: dist.ProcessGroup) -> None:
    """Abort a group that waits for a rank."""
    start_operation(group)
    time.sleep(0.5)
    group.abort()


def abort_busy_backend(group: dist.ProcessGroup) -> None:
    """Abort the NCCL backend of a group that waits for a rank."""
    start_operation(group)
    time.sleep(0.5)
    group._get_backend(DEVICE).abort()


def abort_all_groups(group: dist.ProcessGroup) -> None:
    """Abort all groups, as a program does before it makes its groups anew."""
    start_operation(group)
    time.sleep(0.5)
    dist.distributed_c10d._abort_process_group()


def lose_a_rank(group: dist.ProcessGroup) -> None:
    """Kill the last rank, while the others wait for it in an all-reduce."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1000, device=DEVICE), group=group)
    torch.cuda.synchronize()


def call_different_operations(group: dist.ProcessGroup) -> None:
    """Call an all-reduce on most ranks, but a broadcast on the last one, as a faulty program does."""
    value = torch.ones(1000, device=DEVICE)
    if dist.get_rank() == dist.get_world_size() - 1:
        dist.broadcast(value, src=0, group=group)
    else:
        dist.all_reduce(value, group=group)
    torch.cuda.synchronize()


if __name__ == "__main__":
    scene = globals()[sys.argv[1]]
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    all_ranks = dist.new_group(list(range(dist.get_world_size())), timeout=TIMEOUT)
    dist.all_reduce(torch.ones(1000, device=DEVICE), group=all_ranks)
    torch.cuda.synchronize()
    store = dist.distributed_c10d._get_default_store()  # lives on when all groups are aborted
    wait_for_all_ranks(store, "start")
    scene(all_ranks)
    time.sleep(LOOK_S)
    print("survived", flush=True)
    wait_for_all_ranks(store, "end")
    if int(os.environ["RANK"]) == 0:
        time.sleep(1.0)  # its process has the store, which the others still read
    os._exit(0)  # destroy_process_group would wait for the operation that rank 0 never joins

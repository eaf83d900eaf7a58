"""Script of one rank that aborts process groups itself, or in whose job NCCL fails.

Usage: lost.py CASE --holmes ...

test_lost.py starts it on four ranks and checks what holmes prints. Every rank first makes a process group of
all ranks over NCCL, and then runs CASE, one of the functions in CASES:

    abort_idle_group             Abort the group without a running collective.
    abort_busy_group             Abort the group during an all-reduce.
    abort_busy_backend           Abort only the group's NCCL backend, during an all-reduce.
    abort_all_groups             Abort all groups during an all-reduce.
    lose_a_rank                  Kill the last rank during an all-reduce.
    call_different_operations    Call mismatched collectives, which time out.

After the first four cases all ranks continue and print "survived": holmes must not report a failure, since
the program itself aborted the groups. In the last two cases, torch aborts the processes, and holmes must
report the failure before that.

Environment variables: those of torchrun, and TIMEOUT_S, the timeout of the group's collectives in seconds.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

#: Timeout of the group's collectives. torch aborts the process when it has passed.
TIMEOUT = timedelta(seconds=float(os.environ.get("TIMEOUT_S", "600")))
#: Seconds that a rank waits after its case. holmes polls NCCL once a second, so within this time it would
#: report a failure.
POLLING_S = 3.0
#: Seconds until an all-reduce that was started has certainly begun on the GPU.
BEGIN_S = 0.5
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def wait_for_all_ranks(store: dist.Store, name: str) -> None:
    """Wait at a barrier until all ranks have reached it, over the rendezvous store instead of NCCL.

    Args:
        store: The rendezvous store of the job.
        name: Name of the barrier. It must be new: the keys stay in the store.
    """
    if store.add(f"{name}/count", 1) == int(os.environ["WORLD_SIZE"]):
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"])


def start_endless_all_reduce(group: dist.ProcessGroup) -> None:
    """Start an all-reduce on all ranks but rank 0, so that it never completes."""
    if dist.get_rank() != 0:
        dist.all_reduce(torch.ones(1000, device=DEVICE), group=group, async_op=True)
    time.sleep(BEGIN_S)


def abort_idle_group(group: dist.ProcessGroup) -> None:
    """Abort a process group that runs no collective."""
    group.abort()


def abort_busy_group(group: dist.ProcessGroup) -> None:
    """Abort a process group during an all-reduce."""
    start_endless_all_reduce(group)
    group.abort()


def abort_busy_backend(group: dist.ProcessGroup) -> None:
    """Abort only the NCCL backend of a process group, during an all-reduce."""
    start_endless_all_reduce(group)
    group._get_backend(DEVICE).abort()


def abort_all_groups(group: dist.ProcessGroup) -> None:
    """Abort all process groups of this rank, as a program does before it makes new ones.

    Args:
        group: The group that runs an all-reduce meanwhile.
    """
    start_endless_all_reduce(group)
    dist.distributed_c10d._abort_process_group()


def lose_a_rank(group: dist.ProcessGroup) -> None:
    """Kill the last rank of the job, while the other ranks wait for it in an all-reduce."""
    is_last_rank = dist.get_rank() == dist.get_world_size() - 1
    if is_last_rank:
        time.sleep(1.0)  # the other ranks have begun the all-reduce by then
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1000, device=DEVICE), group=group)
    torch.cuda.synchronize()  # torch aborts the process here


def call_different_operations(group: dist.ProcessGroup) -> None:
    """Call a broadcast on the last rank and an all-reduce on the others, as a faulty program might."""
    value = torch.ones(1000, device=DEVICE)
    is_last_rank = dist.get_rank() == dist.get_world_size() - 1
    if is_last_rank:
        dist.broadcast(value, src=0, group=group)
    else:
        dist.all_reduce(value, group=group)
    torch.cuda.synchronize()  # torch aborts the process here, when TIMEOUT has passed


CASES = {
    "abort_idle_group": abort_idle_group,
    "abort_busy_group": abort_busy_group,
    "abort_busy_backend": abort_busy_backend,
    "abort_all_groups": abort_all_groups,
    "lose_a_rank": lose_a_rank,
    "call_different_operations": call_different_operations,
}

if __name__ == "__main__":
    run_case = CASES[sys.argv[1]]
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    all_ranks = dist.new_group(list(range(dist.get_world_size())), timeout=TIMEOUT)
    # The first collective creates the communicator of the group.
    dist.all_reduce(torch.ones(1000, device=DEVICE), group=all_ranks)
    torch.cuda.synchronize()
    store = dist.distributed_c10d._get_default_store()  # stays usable when all groups are aborted
    wait_for_all_ranks(store, "start")
    run_case(all_ranks)
    time.sleep(POLLING_S)
    print("survived", flush=True)
    wait_for_all_ranks(store, "end")
    if int(os.environ["RANK"]) == 0:
        time.sleep(1.0)  # this process hosts the store, which the other ranks may still read
    # destroy_process_group() would wait for the all-reduce that rank 0 never joins.
    os._exit(0)

"""Script of one rank that excludes a rank from a process group while the job runs.

Usage: shrink.py CASE --holmes ...

test_shrink.py starts it on four ranks over NCCL. Ranks 0 and 1 are in a cluster with InfiniBand, ranks 2 and
3 in another cluster. CASE is one of the functions in CASES:

    shrink_group            Exclude rank 3 from a group of ranks 0, 1 and 3. The new group should use
                            InfiniBand.
    shrink_default_group    Exclude rank 3 from the default group by torch's shrink_group.
    reconfigure             Exclude rank 3 from the default group by torch's _reconfigure.

Each case all-reduces the ranks' numbers in the group before and after the change. Each rank prints a JSON
line with these keys:

    rank      rank of this process
    sums      results of its all-reduces, in order: [before the change, after it]; an excluded rank has only
              the first, a rank outside the group none
    groups    [name, ranks, network] of each process group that holmes has recorded on this rank
"""

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from holmes_ext.runtime import session

DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
RANK = int(os.environ["RANK"])
EXCLUDED = 3  # rank that is excluded from a group
#: Elements of the all-reduced tensor: 400 kB, so that the NICs' byte counters show which network was used.
ELEMENTS = 100_000
#: Seconds that the excluded rank waits. The launcher would end the job if the rank exited while the other
#: ranks still change the group.
EXCLUDED_WAIT_S = 20


def sum_of_ranks(group: dist.ProcessGroup | None = None) -> float:
    """Return the sum of the ranks in a process group, computed by an all-reduce.

    Each rank adds the number that it had at the start of the script, even if torch has renumbered it since.

    Args:
        group: The process group; None for the default group.
    """
    value = torch.full((ELEMENTS,), float(RANK), device=DEVICE)
    dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    return value[0].item()


def shrink_group() -> list[float]:
    """Exclude rank 3 from a process group of ranks 0, 1 and 3.

    Returns:
        The sums of ranks before and after the change; see the docstring of this file.
    """
    members = [0, 1, EXCLUDED]
    group = dist.new_group(members)
    if RANK not in members:
        return []
    sum_before = sum_of_ranks(group)
    if RANK == EXCLUDED:
        return [sum_before]
    group_rank_to_exclude = members.index(EXCLUDED)
    shrunk_group: Any = dist.shrink_group([group_rank_to_exclude], group=group)
    return [sum_before, sum_of_ranks(shrunk_group)]


def shrink_default_group() -> list[float]:
    """Exclude rank 3 from the default group by torch's shrink_group. The other ranks keep their numbers.

    Returns:
        The sums of ranks before and after the change; see the docstring of this file.
    """
    sum_before = sum_of_ranks()
    if RANK == EXCLUDED:
        time.sleep(EXCLUDED_WAIT_S)
        return [sum_before]
    dist.shrink_group([EXCLUDED])
    return [sum_before, sum_of_ranks()]


def reconfigure() -> list[float]:
    """Exclude rank 3 from the default group by torch's _reconfigure.

    With enable_reconfigure, the default group starts without a communicator. So it is reconfigured twice:
    first with all ranks, then without rank 3.

    Returns:
        The sums of ranks after the first and the second call of _reconfigure.
    """
    sums = [reconfigure_default_group(uuid=1, members=(0, 1, 2, EXCLUDED))]
    if RANK == EXCLUDED:
        time.sleep(EXCLUDED_WAIT_S)
        return sums
    sums.append(reconfigure_default_group(uuid=2, members=(0, 1, 2)))
    return sums


def reconfigure_default_group(uuid: int, members: tuple[int, ...]) -> float:
    """Give the default group a communicator of other members, and return their sum of ranks.

    Args:
        uuid: Identifies the new communicator.
        members: Ranks of the new members. Each of them calls this function.
    """
    # The members exchange their handles by the rendezvous store.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"handle/{uuid}/{RANK}", dist._get_reconfigure_handle())
    handles = [store.get(f"handle/{uuid}/{rank}").decode() for rank in members]
    dist._reconfigure(uuid=uuid, handles=handles).wait()
    return sum_of_ranks()


CASES = {
    "shrink_group": shrink_group,
    "shrink_default_group": shrink_default_group,
    "reconfigure": reconfigure,
}

if __name__ == "__main__":
    run_case = CASES[sys.argv[1]]
    torch.cuda.set_device(DEVICE)
    if run_case is reconfigure:
        dist.init_process_group("nccl", enable_reconfigure=True)
    else:
        dist.init_process_group("nccl", device_id=DEVICE)
    sums = run_case()
    current = session.active()
    assert current is not None
    groups = [[record.name, record.ranks, record.transport.net_name] for record in current.groups]
    print(json.dumps({"rank": RANK, "sums": sums, "groups": groups}), flush=True)
    time.sleep(5)  # rank 0 hosts the rendezvous store, which the other ranks may still use
    # destroy_process_group() would fail: the ranks have different groups.
    os._exit(0)

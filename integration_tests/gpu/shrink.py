"""Script of one rank whose process groups lose a rank while the job runs: python shrink.py SCENE --holmes ...

torchrun's variables say which rank. The ranks use NCCL. Each prints a JSON line: "sums" of the ranks' numbers
over the groups, and "groups": name, ranks and network of each group in the session of holmes.
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
#: The rank that leaves. Ranks 0 and 1 are in one cluster, ranks 2 and 3 in the other.
EXCLUDED = 3


def total(group: dist.ProcessGroup | None = None) -> float:
    """Return the sum of the first numbers of the ranks in a group, by an all-reduce of 400 kB."""
    value = torch.full((100_000,), float(RANK), device=DEVICE)
    dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    return value[0].item()


def shrink_group() -> list[float]:
    """Exclude a rank from a group of three ranks; the two that remain are in one cluster."""
    members = [0, 1, EXCLUDED]
    group = dist.new_group(members)
    if RANK not in members:
        return []
    sums = [total(group)]
    if RANK == EXCLUDED:
        return sums
    shrunk: Any = dist.shrink_group([members.index(EXCLUDED)], group=group)
    return [*sums, total(shrunk)]


def shrink_default_group() -> list[float]:
    """Exclude the last rank from the group of all ranks. The other ranks keep their numbers."""
    sums = [total()]
    if RANK == EXCLUDED:
        time.sleep(20)  # the others shrink the group meanwhile; at its end this rank would end the job
        return sums
    dist.shrink_group([EXCLUDED])
    return [*sums, total()]


def reconfigure() -> list[float]:
    """Give the default group a communicator of all ranks, and then one without the last rank."""
    store = dist.distributed_c10d._get_default_store()
    sums = []
    for uuid, members in ((1, (0, 1, 2, 3)), (2, (0, 1, 2))):
        if RANK not in members:
            time.sleep(20)
            continue
        store.set(f"handle/{uuid}/{RANK}", dist._get_reconfigure_handle())
        handles = [store.get(f"handle/{uuid}/{rank}").decode() for rank in members]
        dist._reconfigure(uuid=uuid, handles=handles).wait()
        sums.append(total())
    return sums


if __name__ == "__main__":
    scene = sys.argv[1]
    torch.cuda.set_device(DEVICE)
    more = {"enable_reconfigure": True} if scene == "reconfigure" else {"device_id": DEVICE}
    dist.init_process_group("nccl", **more)
    sums = globals()[scene]()
    current = session.active()
    assert current is not None
    groups = [[record.name, record.ranks, record.transport.net_name] for record in current.groups]
    print(json.dumps({"rank": RANK, "sums": sums, "groups": groups}), flush=True)
    time.sleep(5)  # rank 0 has the store
    os._exit(0)  # the groups of the ranks differ, so they cannot be destroyed together

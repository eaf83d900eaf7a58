"""One rank of a job whose ranks share one GPU: makes a group inside each cluster and one across, and reduces over each.

Each rank calls itself another host (NCCL_HOSTID), so that NCCL uses its network between them. Prints a JSON line.
"""

import json
import os

import torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
half = world // 2
clusters = [dist.new_group(list(range(start, start + half)), group_desc=f"inside {name}")
            for start, name in ((0, "a"), (half, "b"))]
across = dist.new_group([0, half], group_desc="across")


def total(group) -> float:
    value = torch.full((1 << 18,), float(rank), device="cuda")
    dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    return value[0].item()


report = {"rank": rank, "inside": total(clusters[rank >= half]), "across": total(across) if rank in (0, half) else None,
          "world": total(None)}
print(json.dumps({**report, "nccl": ".".join(map(str, torch.cuda.nccl.version())), "torch": torch.__version__,
                  "hostid": os.environ["NCCL_HOSTID"]}), flush=True)
dist.destroy_process_group()

"""One rank that makes and uses process groups, and prints the memory that each of them takes, as JSON.

The memory is the private memory of the process that has been written to (RssAnon of /proc/self/status).
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

GROUPS = 4


def private_memory_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) / 1024  # "RssAnon:  123456 kB"


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
tensor = torch.ones(1, device="cuda")
dist.all_reduce(tensor)
torch.cuda.synchronize()

before_mb = private_memory_mb()
for _ in range(GROUPS):
    dist.all_reduce(tensor, group=dist.new_group(list(range(dist.get_world_size()))))
torch.cuda.synchronize()
print(json.dumps({"mb_for_each_group": (private_memory_mb() - before_mb) / GROUPS}))
dist.destroy_process_group()

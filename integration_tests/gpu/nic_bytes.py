"""Script of one rank that calls all-reduce.

    python nic_bytes.py ROUNDS MEGABYTES

torchrun's environment variables must be set. Prints a JSON line: {"rank", "peak_mb"}, where peak_mb is the
largest resident memory of the process.
"""

import json
import os
import resource
import sys

import torch
import torch.distributed as dist

if __name__ == "__main__":
    rounds = int(sys.argv[1])
    size = int(float(sys.argv[2]) * 1e6)  # bytes
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    value = torch.full((size // 4,), float(dist.get_rank()), device="cuda")
    for _ in range(rounds):
        dist.all_reduce(value, dist.ReduceOp.MAX)
    assert (value == dist.get_world_size() - 1).all()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"rank": dist.get_rank(), "peak_mb": peak / 1e6}), flush=True)
    dist.destroy_process_group()

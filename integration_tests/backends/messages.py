"""Sends 8 MB from each even rank to the next rank, over the group of all ranks with the backend nccl-lazy.

Prints a JSON line: {"rank", "is_right": whether the received numbers are those that were sent}.
"""

import json
import os

import torch
import torch.distributed as dist

if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl-lazy")
    rank = dist.get_rank()
    tensor = torch.full((2_000_000,), float(rank), device="cuda")
    if rank % 2 == 0:
        dist.isend(tensor, rank + 1).wait()
        expected = float(rank)
    else:
        dist.recv(tensor, rank - 1)
        expected = float(rank - 1)
    torch.cuda.synchronize()
    print(json.dumps({"rank": rank, "is_right": bool((tensor == expected).all())}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
